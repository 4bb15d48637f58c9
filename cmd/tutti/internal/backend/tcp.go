package backend

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/segment"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// tcpBackend is one rank of a job over TCP (comm/tcp). Any launcher starts one process per rank.
var tcpBackend = Backend{
	Name:    "tcp",
	Jobs:    true,
	Summary: "processes on any machines, over TLS, without MPI",
	Probe:   probeTCP,
	Run:     runTCP,
}

func probeTCP(context.Context) (string, error) {
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil || job.Launcher == "none" {
		return "needs nothing; " + processOption("tutti") + ", torchrun, srun and mpirun start it; " + sharing(), err
	}
	launcher := env.LauncherTitle(job.Launcher)
	return fmt.Sprintf("rank %d of %d, started by %s; %s", job.Rank, job.WorldSize, launcher, sharing()), nil
}

// sharedVariable disables shared memory.
const sharedVariable = "TUTTI_TCP_SHARED"

// sharing says whether ranks of this machine can use shared memory.
func sharing() string {
	unshared := segment.Probe()
	if value := os.Getenv(sharedVariable); value != "" {
		unshared = fmt.Errorf("%s=%s", sharedVariable, value)
	}
	if unshared != nil {
		return fmt.Sprintf("ranks share no memory (%v)", unshared)
	}
	return "ranks of a machine share memory"
}

func runTCP(ctx context.Context, opts Options, body func(context.Context, Rank) error) error {
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return err
	}
	if err := checkRanks("tcp", job.Launcher, opts.Ranks, job.WorldSize); err != nil {
		return err
	}
	opts.note(alone(processOption(job.Launcher), job))
	starting, cancel := withLimit(ctx, opts.Timeout)
	defer cancel()
	world, err := tcp.FromEnv(starting)
	if err != nil {
		return err
	}
	rt := cpu.New()
	if err = opts.onHost(ctx, world, rt, body); err != nil {
		world.Abort(err)
	}
	return errors.Join(err, world.Close(), rt.Close())
}
