package backend

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Reducer averages gradients over the ranks, step after step. The pattern runs between all ranks or, with hosts,
// between the hosts, after a dense average within each.
type Reducer struct {
	*sparse.Reducer                   // with hosts, between ranks with the same share
	host            *host             // nil if all ranks are alike
	last            comm.Communicator // the communicator that Sync waits for
}

// PatternName names a pattern, auto's choice, and the codec of the values unless it is f32.
func PatternName(pattern, chosen, values string) string {
	if chosen != "" {
		pattern += ": " + chosen
	}
	if values != "" && values != sparse.F32 {
		pattern += " " + values
	}
	return pattern
}

// NewReducer prepares the reduction of n elements of a type in a rank's memory. hosts is the number of hosts that the
// ranks run on, with equally many consecutive ranks on each; 0 treats all ranks alike. With hosts, NewReducer is
// collective, and a step is no transaction.
func NewReducer(
	ctx context.Context,
	r Rank,
	backend string,
	hosts, n int,
	dt dtype.DType,
	cfg sparse.Config,
) (*Reducer, error) {
	if hosts == 0 {
		s, err := sparse.New(r.Runtime, r.Comm, n, cfg)
		return &Reducer{Reducer: s, last: r.Comm}, err
	}
	ctx, cancel := r.Within(ctx)
	defer cancel()
	mesh, err := Hosts(backend, hosts)(ctx, r.Comm)
	if err != nil {
		return nil, err
	}
	h, err := newHost(r.Runtime, mesh, n, dt)
	if err != nil {
		return nil, errors.Join(err, mesh.Close())
	}
	reducer := &Reducer{host: h, last: h.comm}
	between, err := mesh.Comm("host")
	if err == nil {
		cfg.NoUndo = true // the ranks of a host have no common verdict
		reducer.Reducer, err = sparse.New(r.Runtime, between, h.share.Len(), cfg)
	}
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	return reducer, nil
}

// Hosts returns a function that divides ranks among a number of hosts, equally many consecutive ranks on each.
func Hosts(backend string, hosts int) func(context.Context, comm.Communicator) (*distributed.Mesh, error) {
	return func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
		ranks := c.WorldSize()
		if ranks%hosts != 0 {
			return nil, &OptionError{
				Backend: backend,
				Reason:  fmt.Sprintf("--hosts %d does not divide %s", hosts, Counted(ranks, "rank")),
			}
		}
		return distributed.NewMesh(
			ctx,
			c,
			distributed.Dim{Name: "host", Size: hosts},
			distributed.Dim{Name: "rank", Size: ranks / hosts},
		)
	}
}

// Sparse returns the underlying reducer if there are no hosts.
func (r *Reducer) Sparse() (*sparse.Reducer, bool) {
	return r.Reducer, r.host == nil
}

// AllReduce replaces t with the average over all ranks, as the pattern defines it.
func (r *Reducer) AllReduce(ctx context.Context, t *runtime.Tensor) error {
	if r.host == nil {
		return r.Reducer.AllReduce(ctx, t)
	}
	return r.host.allReduce(ctx, t, r.Reducer)
}

// Within returns the bytes that this rank sent within its host in the last step, and the host's time for it.
func (r *Reducer) Within() (sent int64, took time.Duration) {
	if r.host == nil {
		return 0, 0
	}
	return r.host.sent, r.host.took
}

// Sync waits for the communication of the last step.
func (r *Reducer) Sync(ctx context.Context) error {
	return r.last.Sync(ctx)
}

// Pending returns this rank's residual for each of n elements. Its sum over ranks has not been in a result yet. It is
// zero for a pattern without residual.
func (r *Reducer) Pending(n int) ([]float32, error) {
	pending := make([]float32, n)
	t, err := r.Residual()
	if errors.Is(err, comm.ErrUnsupported) {
		return pending, nil
	}
	if err != nil {
		return nil, err
	}
	values, err := runtime.ToSlice[float32](t)
	if r.host == nil {
		copy(pending, values)
		return pending, err
	}
	ranks := float32(r.host.comm.WorldSize()) // the residual holds their average
	first := r.host.comm.Rank() * len(values)
	for i := first; i < min(first+len(values), n); i++ {
		pending[i] = ranks * values[i-first]
	}
	return pending, err
}

// Close frees what NewReducer made.
func (r *Reducer) Close() error {
	err := r.Reducer.Close()
	if r.host != nil {
		err = errors.Join(err, r.host.close())
	}
	return err
}
