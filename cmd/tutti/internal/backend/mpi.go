package backend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// mpiBackend is one rank of an MPI job (comm/mpi): mpirun starts a process for
// each.
var mpiBackend = Backend{
	Name:    "mpi",
	Jobs:    true,
	Summary: "processes started by mpirun",
	Probe:   probeMPI,
	Run:     runMPI,
}

// ProbeMPI is the program that tells MPI's thread level when it is called with ProbeCommand: tutti itself. It is known
// only after MPI_Init, which may end a process outside of a job and which cannot be repeated, so another process calls
// it. Empty, as in tests, it is not asked for.
var ProbeMPI string

// ProbeCommand is the hidden command of that program.
const ProbeCommand = "probe-mpi"

// probeTime is how long MPI_Init may take there.
const probeTime = 10 * time.Second

// ThreadLevel initializes MPI in this process and returns the level of threads.
func ThreadLevel() (string, error) {
	if _, err := mpi.Init(context.Background()); err != nil {
		return "", err
	}
	info, err := mpi.Library()
	return info.Threads, errors.Join(err, mpi.Finalize(context.Background()))
}

// probeMPI describes the library without initializing MPI here.
func probeMPI(ctx context.Context) (string, error) {
	info, err := mpi.Library()
	if err != nil {
		return "", err
	}
	shares := "ranks of a host share memory"
	if info.Unshared != "" {
		shares = "ranks share no memory (" + info.Unshared + ")"
	}
	return fmt.Sprintf("%s; %s; ABI of %s; %s; %s",
		info.Library, info.File, info.ABI, probeThreads(ctx, info), shares), nil
}

// probeThreads describes the thread level.
func probeThreads(ctx context.Context, info mpi.Info) string {
	const unknown = "thread level not known before a job starts"
	switch job, err := rendezvous.FromEnv(os.Getenv); {
	case info.Threads != "":
		return info.Threads
	case ProbeMPI == "" || err != nil || job.Launcher != "none": // another process would claim this one's rank
		return unknown
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, ProbeMPI, ProbeCommand).Output()
	if err != nil {
		return fmt.Sprintf("%s (MPI_Init alone: %v)", unknown, err)
	}
	return strings.TrimSpace(string(out))
}

// finalizeTime is how long a rank that is done waits for the others, and for MPI_Finalize.
const finalizeTime = 30 * time.Second

// runMPI runs body for this process's rank. When that fails, MPI is not finalized:
// the other ranks may be waiting for this one forever, and launchers end a job
// of which a process exits with a failure and without MPI_Finalize.
func runMPI(ctx context.Context, opts Options, body func(context.Context, Rank) error) error {
	starting, cancel := withLimit(ctx, opts.Timeout)
	defer cancel()
	world, err := mpi.Init(starting)
	if err != nil {
		return err
	}
	finalize := func() error {
		ctx, cancel := withLimit(ctx, opts.Timeout)
		defer cancel()
		ctx, cancel = context.WithTimeout(ctx, finalizeTime)
		defer cancel()
		return mpi.Finalize(ctx)
	}
	if err := checkRanks("mpi", "mpirun", opts.Ranks, world.WorldSize()); err != nil {
		return errors.Join(err, finalize()) // every rank is here
	}
	if world.WorldSize() == 1 && opts.Ranks == 0 {
		job, _ := rendezvous.FromEnv(os.Getenv)
		opts.note(alone("mpirun -n", job))
	}
	rt := cpu.New()
	if err = opts.onHost(ctx, world, rt, body); err != nil && world.WorldSize() > 1 {
		return err
	}
	return errors.Join(err, finalize(), rt.Close())
}
