package console

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/internal/env"
)

// World describes the ranks that a command runs on, by flags.
type World struct {
	Backend string // its name
	P2P     bool   // GPUs write into each other's memory

	gpus    bool          // the command runs on GPUs only
	ranks   int           // 0 lets the backend choose
	timeout time.Duration // of each wait, 0 means unlimited
}

// Register adds the flags.
func (w *World) Register(flags *pflag.FlagSet) {
	ranks := "4 for local (at most 1024), 1 for noop, what mpirun started for mpi, " +
		"and for nccl what a launcher started or all GPUs"
	if w.gpus {
		ranks = "what a launcher started, or all GPUs"
	}
	flags.Var(
		NameFlag(&w.Backend, func(text string) (string, error) {
			return OneOf("backend", text, backend.Names(), backend.Aliases)
		}),
		"backend",
		"backend of the ranks: "+strings.Join(backend.Names(), ", ")+
			"; tcp where tutti launch, torchrun or srun started several processes",
	)
	flags.IntVar(&w.ranks, "ranks", 0, "number of `ranks`; without it "+ranks)
	flags.BoolVar(&w.P2P, "p2p", false,
		"let GPUs of this machine write into each other's memory where that is faster (nccl)")
	flags.DurationVar(&w.timeout, "timeout", 0,
		"how long a rank waits for the others before it aborts, such as 30s; 0 forever")
	Restrict(flags, "ranks", "1 or more", func() bool { return w.ranks >= 1 })
	Restrict(flags, "timeout", "0 or more", func() bool { return w.timeout >= 0 })
	if w.gpus {
		_ = flags.MarkHidden("backend")
	} else {
		TCPFlags(flags)
	}
}

// TCPFlags adds a flag for each variable of package tcp. A flag sets its variable for this process and for ranks that
// it starts.
func TCPFlags(flags *pflag.FlagSet) {
	for _, f := range []struct{ name, variable, usage string }{
		{
			"tcp-listen",
			env.TCPListen,
			"`address` on which ranks of tcp listen, " +
				"the first rank of a machine at its port, if it has one, the others at the next ones",
		},
		{
			"tcp-advertise",
			env.TCPAdvertise,
			"`addresses` at which others reach ranks of tcp that are behind network address " +
				"translation, separated by commas",
		},
		{
			"tcp-connections",
			env.TCPConnections,
			"`number` of connections between two ranks of tcp; by default it follows from the round trip",
		},
		{
			"tcp-silence",
			env.TCPSilence,
			"`time` without data after which a rank of tcp counts as lost, the same on all machines; by default " +
				tcp.DefaultSilence.String(),
		},
	} {
		flags.Func(f.name, f.usage+" ("+f.variable+")", func(text string) error {
			getenv := func(name string) string {
				return map[string]string{f.variable: text}[name]
			}
			return cmp.Or(new(tcp.Config).ReadEnv(getenv, 0), os.Setenv(f.variable, text))
		})
	}
}

// NewWorld returns the World of a command without flags.
func NewWorld() World {
	return World{Backend: cmp.Or(os.Getenv(env.Backend), backend.Default())}
}

// NewGPUWorld returns the World of a command for GPUs.
func NewGPUWorld() World {
	return World{Backend: "nccl", gpus: true}
}

// Run runs prepare in rank 0's process, unless it is nil, and then body on every rank of this process.
func (w *World) Run(
	cmd *cobra.Command,
	prepare func() error,
	body func(ctx context.Context, r backend.Rank) error,
) error {
	b, err := backend.Find(w.Backend)
	if err != nil {
		return UsageError{err}
	}
	if w.P2P && b.Name != "nccl" {
		return backend.Needs(b.Name, "--p2p", "GPUs")
	}
	note := func(text string) {
		fmt.Fprintf(cmd.ErrOrStderr(), "tutti: %s\n", text)
	}
	if text := backend.SeparateWorlds(b); text != "" {
		note(text)
	}
	opts := backend.Options{
		Ranks:      w.ranks,
		Timeout:    w.timeout,
		PeerMemory: w.P2P,
		Note:       note,
		Prepare:    prepare,
	}
	return b.Run(cmd.Context(), opts, func(ctx context.Context, r backend.Rank) error {
		return instrument.Run(ctx, r.Runtime, r.Comm, func(ctx context.Context, c comm.Communicator) error {
			r.Comm = c // with the checks that the environment requests
			return body(ctx, r)
		})
	})
}
