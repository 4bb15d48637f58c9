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

// mpiBackend is one rank of an MPI job (comm/mpi). mpirun starts one process per rank.
var mpiBackend = Backend{
	Name:    "mpi",
	Jobs:    true,
	Summary: "processes started by mpirun",
	Probe:   probeMPI,
	Run:     runMPI,
}

// ProbeMPI is the program that reports MPI's thread level when called with ProbeCommand: tutti itself. The level is
// known only after MPI_Init, which cannot be repeated and may end a process outside a job, so another process calls
// it. Empty, as in tests, skips the probe.
var ProbeMPI string

// ProbeCommand is that program's hidden command.
const ProbeCommand = "probe-mpi"

// probeTime is the longest time that MPI_Init may take there.
const probeTime = 10 * time.Second

// ThreadLevel initializes MPI in this process and returns its thread level.
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
	case ProbeMPI == "" || err != nil || job.Launcher != "none": // another process would claim this rank
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

// finalizeTime is the longest time that a finished rank waits for the others, and for MPI_Finalize.
const finalizeTime = 30 * time.Second

// runMPI runs body for this process's rank. If body fails, MPI is not finalized: other ranks may be waiting for this
// one forever, and launchers end a job when one of its processes fails without MPI_Finalize.
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
		return errors.Join(err, finalize()) // every rank has come this far
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
