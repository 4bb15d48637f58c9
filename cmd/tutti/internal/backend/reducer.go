package backend

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
)

// Reducer averages a gradient over the ranks, step after step: with a pattern
// between all of them, or densely within hosts and with the pattern between these.
type Reducer struct {
	steps
	last   comm.Communicator // of a step
	mesh   *distributed.Mesh // of hosts, nil: there are none
	from   int               // where the residual begins
	weight float32           // how many ranks' gradients it is the average of
}

// steps is what [sparse.Reducer] and [sparse.Hierarchical] have in common.
type steps interface {
	AllReduce(ctx context.Context, t *runtime.Tensor) error
	Stats(ctx context.Context) (sparse.Stats, error)
	Residual() (*runtime.Tensor, error)
	Close() error
}

// PatternName is that of a pattern, what auto has chosen, and as what values travel unless that is f32.
func PatternName(pattern, chosen, values string) string {
	if chosen != "" {
		pattern += ": " + chosen
	}
	if values != "" && values != sparse.F32 {
		pattern += " " + values
	}
	return pattern
}

// NewReducer prepares the reduction of n elements of a rank's memory. hosts is on
// how many hosts the ranks are, equally many on each and one host after the other;
// 0 makes no difference between ranks. It is collective if there are hosts.
func NewReducer(ctx context.Context, r Rank, backend string, hosts, n int, cfg sparse.Config) (*Reducer, error) {
	if hosts == 0 {
		s, err := sparse.New(r.Runtime, r.Comm, n, cfg)
		return &Reducer{steps: s, last: r.Comm, weight: 1}, err
	}
	ctx, cancel := r.Within(ctx)
	defer cancel()
	mesh, err := Hosts(backend, hosts)(ctx, r.Comm)
	if err != nil {
		return nil, err
	}
	last, err := mesh.Comm("rank")
	if err != nil {
		return nil, errors.Join(err, mesh.Close())
	}
	levels, err := sparse.NewHierarchical(r.Runtime, mesh, n, cfg)
	if err != nil {
		return nil, errors.Join(err, mesh.Close())
	}
	from, _ := levels.Share()
	return &Reducer{steps: levels, last: last, mesh: mesh, from: from, weight: float32(r.Comm.WorldSize() / hosts)}, nil
}

// Hosts returns what arranges ranks in so many hosts, equally many on each and one host after the other.
func Hosts(backend string, hosts int) func(context.Context, comm.Communicator) (*distributed.Mesh, error) {
	return func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
		ranks := c.WorldSize()
		if ranks%hosts != 0 {
			return nil, &OptionError{Backend: backend, Reason: fmt.Sprintf("--hosts %d does not divide %s", hosts, Counted(ranks, "rank"))}
		}
		return distributed.NewMesh(ctx, c, distributed.Dim{Name: "host", Size: hosts}, distributed.Dim{Name: "rank", Size: ranks / hosts})
	}
}

// Sparse is what reduces, if there are no hosts.
func (r *Reducer) Sparse() (*sparse.Reducer, bool) {
	s, ok := r.steps.(*sparse.Reducer)
	return s, ok
}

// Sync waits for the communication of the last step.
func (r *Reducer) Sync(ctx context.Context) error { return r.last.Sync(ctx) }

// Pending returns what this rank's residual holds for each of n elements: the sum
// over the ranks is what has not been in a result yet. It is zero for a pattern
// without residual.
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
	for i, v := range values {
		pending[r.from+i] = r.weight * v
	}
	return pending, err
}

// Close frees what NewReducer made.
func (r *Reducer) Close() error {
	err := r.steps.Close()
	if r.mesh != nil {
		err = errors.Join(err, r.mesh.Close())
	}
	return err
}
