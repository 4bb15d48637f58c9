// Package backend is how the commands get ranks: one file for each
// communication backend, all behind one interface.
//
// A backend that needs something the machine lacks is listed as unavailable
// with its reason; it is never an error to have it in the list.
package backend

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// Options say which world to make.
type Options struct {
	// Ranks is the number of ranks that was asked for, 0 for the backend's
	// default. A backend whose launcher sets the number refuses another one.
	Ranks int
	// Timeout bounds each wait for the peers, 0 for the backend's default.
	Timeout time.Duration
	// PeerMemory has GPUs write into each other's memory (comm/p2p) where that is
	// faster than the backend.
	PeerMemory bool
	// Note tells the user what the world is like, where that may not be meant; nil for
	// nobody.
	Note func(text string)
	// Prepare runs in the process of rank 0 before that rank does anything, nil
	// for nothing; its error ends the world.
	Prepare func() error
}

// note calls Note.
func (o Options) note(text string) {
	if o.Note != nil && text != "" {
		o.Note(text)
	}
}

// onHost runs body for the only rank of this process, whose memory is the host's.
func (o Options) onHost(
	ctx context.Context,
	c comm.Communicator,
	rt runtime.Runtime,
	body func(context.Context, Rank) error,
) error {
	if c.Rank() == 0 {
		if err := o.prepare(); err != nil {
			return err
		}
	}
	return body(ctx, Rank{
		Comm:      bound(c, o.Timeout),
		Runtime:   rt,
		HostRanks: 1,
		limit:     o.Timeout,
	})
}

// prepare runs Prepare.
func (o Options) prepare() error {
	if o.Prepare == nil {
		return nil
	}
	return o.Prepare()
}

// A Backend makes ranks.
type Backend struct {
	Name    string // what --backend takes
	Summary string // what the ranks are, in a few words
	// Jobs: the ranks can be the processes that a launcher started;
	// where not, each process is its own world.
	Jobs bool
	// Probe finds out whether the backend works on this machine: a line about
	// what it would use, or an error wrapping [comm.ErrUnavailable] that says
	// what is missing.
	Probe func(ctx context.Context) (detail string, err error)
	// Run calls body once for every rank that lives in this process, each in
	// its own goroutine, and returns when all have, with their errors
	// joined. When one fails, the others are not left waiting. Options that the
	// backend cannot serve are an [OptionError].
	Run func(ctx context.Context, opts Options, body func(ctx context.Context, r Rank) error) error
}

// OptionError says that a backend cannot serve the options it was given: the
// user's mistake, not a failure.
type OptionError struct {
	Backend string // its name
	Reason  string // names the option
}

// Error returns "backend: reason".
func (e *OptionError) Error() string {
	return e.Backend + ": " + e.Reason
}

// Unsupported turns an error that wraps [comm.ErrUnsupported] into an
// [OptionError] without the rank, which is the same on all ranks. Others are
// left alone.
func Unsupported(backend string, err error) error {
	if !errors.Is(err, comm.ErrUnsupported) {
		return err
	}
	reason := err.Error()
	var op *comm.OpError
	if errors.As(err, &op) {
		reason = fmt.Sprintf("%s: %v", op.Op, op.Err)
	}
	return &OptionError{Backend: backend, Reason: reason}
}

// Counted writes a number of things, as in "1 GPU" and "2 GPUs".
func Counted(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// All returns every backend, in the order in which they are shown.
func All() []Backend {
	return []Backend{localBackend, noopBackend, mpiBackend, tcpBackend, ncclBackend}
}

// Aliases are names that users may try, with those of the backends that serve
// them.
var Aliases = map[string]string{
	"gpu":     "nccl",
	"cuda":    "nccl",
	"openmpi": "mpi",
	"mpich":   "mpi",
	"mpirun":  "mpi",
	"cpu":     "local",
}

// Names returns the names of all backends.
func Names() []string {
	var names []string
	for _, b := range All() {
		names = append(names, b.Name)
	}
	return names
}

// Find returns the backend of that name.
func Find(name string) (Backend, error) {
	all := All()
	i := slices.IndexFunc(all, func(b Backend) bool { return b.Name == name })
	if i < 0 {
		return Backend{}, fmt.Errorf("unknown backend %q (want %s)", name, strings.Join(Names(), ", "))
	}
	return all[i], nil
}
