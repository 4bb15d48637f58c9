// Package backend makes the ranks for the commands, with one file for each communication backend, all behind one
// interface.
//
// A backend that cannot work on this machine stays in the list as unavailable, with its reason. Listing it is never
// an error.
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

// Options describe the world to make.
type Options struct {
	// Ranks is the requested number of ranks, 0 for the backend's default. A backend whose launcher sets the number
	// refuses any other.
	Ranks int
	// Timeout bounds each wait for peers, 0 for the backend's default.
	Timeout time.Duration
	// PeerMemory lets GPUs write into each other's memory (comm/p2p) where this is faster than the backend.
	PeerMemory bool
	// Note tells the user about a property of the world that may be unintended; nil discards notes.
	Note func(text string)
	// Prepare runs in rank 0's process before that rank begins; nil for nothing. Its error ends the world.
	Prepare func() error
}

// note calls Note.
func (o Options) note(text string) {
	if o.Note != nil && text != "" {
		o.Note(text)
	}
}

// onHost runs body for the only rank of this process, in host memory.
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
	Name    string // value of --backend
	Summary string // what the ranks are, in a few words
	// Jobs: the ranks can be processes that a launcher started. Without it, each process is a separate world.
	Jobs bool
	// Probe finds out whether the backend works on this machine. It returns a line about what it would use, or an
	// error that wraps [comm.ErrUnavailable] and says what is missing.
	Probe func(ctx context.Context) (detail string, err error)
	// Run calls body once for every rank in this process, each in its own goroutine, and returns their joined errors
	// when all have returned. If one fails, the others are not left waiting. Options that the backend does not
	// support produce an [OptionError].
	Run func(ctx context.Context, opts Options, body func(ctx context.Context, r Rank) error) error
}

// OptionError reports an option that a backend does not support: a mistake of the user, not a failure.
type OptionError struct {
	Backend string // its name
	Reason  string // names the option
}

// Error returns "backend: reason".
func (e *OptionError) Error() string {
	return e.Backend + ": " + e.Reason
}

// Unsupported turns an error that wraps [comm.ErrUnsupported], and is the same on all ranks, into an [OptionError]
// without the rank. It returns other errors unchanged.
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

// Counted writes a count with its noun, such as "1 GPU" or "2 GPUs".
func Counted(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// All returns every backend, in display order.
func All() []Backend {
	return []Backend{localBackend, noopBackend, mpiBackend, tcpBackend, ncclBackend}
}

// Aliases maps names that users may try to the backends that serve them.
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

// Find returns the backend with the given name.
func Find(name string) (Backend, error) {
	all := All()
	i := slices.IndexFunc(all, func(b Backend) bool { return b.Name == name })
	if i < 0 {
		return Backend{}, fmt.Errorf("unknown backend %q (want %s)", name, strings.Join(Names(), ", "))
	}
	return all[i], nil
}
