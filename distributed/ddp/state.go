package ddp

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/state"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
)

// kind is the kind of a Gradients' states.
var kind = state.Kind{
	Name:    "tutti-gradients",
	Version: 5,
	Owner:   "a Gradients",
}

// savedGradients has the fields of a state, in their order.
type savedGradients struct {
	fingerprint uint64   // of the gradients and options that a state is for
	gradients   int      // number of them
	steps       int      // complete ones
	patterns    []string // of the buckets
	parts       [][]byte // the states of their reducers; empty: plain ones
}

// fingerprint is a hash of which gradients the buckets have.
func (a *arrangement) fingerprint() uint64 {
	h := fnv.New64a()
	for _, b := range a.buckets {
		fmt.Fprintf(h, "%v %v %v\n", b.dt, b.params, b.bytes)
	}
	return h.Sum64()
}

// between checks that no step is in flight.
func (g *Gradients) between(op string) error {
	if err := g.usable(op); err != nil {
		return err
	}
	for _, t := range g.step.tensors {
		if t != nil {
			return base.OpError(op, fmt.Errorf("%w: in the middle of a step, want after Wait", comm.ErrArgument))
		}
	}
	return base.OpError(op, g.side.catchUp()) // a graph has the side stream's work on the compute stream
}

// State returns the state from which a [Gradients] of the same gradients and configuration continues, bit for bit: the
// [sparse.Reducer.State] of each bucket. Call it between two steps, when nothing is accumulated. It does not
// communicate, and waits for the device until ctx is done. Every rank saves its own state.
func (g *Gradients) State(ctx context.Context) ([]byte, error) {
	return g.state(ctx, reducer.State)
}

// SharedState is [sparse.Reducer.SharedState] of all buckets.
func (g *Gradients) SharedState(ctx context.Context) ([]byte, error) {
	return g.state(ctx, reducer.SharedState)
}

func (g *Gradients) state(ctx context.Context, save func(reducer, context.Context) ([]byte, error)) ([]byte, error) {
	const op = "gradient state"
	if err := g.between(op); err != nil {
		return nil, err
	}
	for i, p := range g.gradients {
		if p.sum.accumulated || p.held.n > 0 {
			return nil, base.OpError(op, fmt.Errorf("%w: gradient %d is accumulated, want after the step that reduces it",
				comm.ErrArgument, i))
		}
	}
	e := state.NewEncoder(kind, 0)
	e.Uint64(g.fingerprint())
	e.Int(len(g.gradients))
	e.Int(g.steps)
	e.Int(len(g.buckets))
	for _, b := range g.buckets {
		part, err := save(b.reducer, ctx)
		if err != nil {
			return nil, base.OpError(op, err)
		}
		e.Bytes([]byte(b.cfg.Pattern))
		e.Bytes(part)
	}
	return e.Seal(), nil
}

// Restore returns g to the state that [Gradients.State] returned. Other world sizes and errors are as for
// [sparse.Reducer.Restore], for all buckets: a wrong state is detected before anything changes. Accumulated gradients
// are discarded. If the states have other choices of [sparse.Auto] than g, theirs are restored, and all ranks together
// make new buckets for them.
func (g *Gradients) Restore(ctx context.Context, states ...[]byte) error {
	const op = "gradient restore"
	if err := g.between(op); err != nil {
		return err
	}
	if err := g.restore(ctx, states); err != nil {
		return base.OpError(op, err)
	}
	g.stats = Stats{}
	g.undecided = false
	return nil
}

func (g *Gradients) restore(ctx context.Context, states [][]byte) error {
	saved, err := g.parseAll(states)
	if err != nil {
		return err
	}
	restores, err := g.prepareRestore(ctx, saved)
	if err != nil {
		return err
	}
	g.steps = saved[0].steps
	for i := range g.gradients {
		g.gradients[i].sum.accumulated = false
	}
	g.forgetHeld()
	g.endWeights()
	for i, restore := range restores {
		g.err = restore(ctx)
		if g.err != nil {
			return g.bucketError(i, g.err)
		}
	}
	return g.side.join()
}

// parseAll parses states, which are those of one step with one arrangement of buckets.
func (g *Gradients) parseAll(states [][]byte) ([]savedGradients, error) {
	if len(states) == 0 {
		return nil, fmt.Errorf("%w: no state", comm.ErrArgument)
	}
	saved := make([]savedGradients, len(states))
	for i, bytes := range states {
		p, err := g.parse(bytes)
		if err != nil {
			return nil, fmt.Errorf("state %d: %w", i, err)
		}
		saved[i] = p
		if !slices.Equal(p.patterns, saved[0].patterns) {
			return nil, fmt.Errorf("state %d: %w: its buckets are not those of the first", i, comm.ErrMismatch)
		}
		if p.steps != saved[0].steps {
			return nil, fmt.Errorf("state %d: %w: it is of step %d, the first of %d",
				i, comm.ErrMismatch, p.steps, saved[0].steps)
		}
	}
	return saved, nil
}

// prepareRestore returns what restores each bucket, after the buckets are those of the states. After an error they are
// as before.
func (g *Gradients) prepareRestore(ctx context.Context, saved []savedGradients) ([]func(context.Context) error, error) {
	if slices.Equal(saved[0].patterns, g.patterns) {
		return g.prepareBuckets(ctx, saved)
	}
	before := g.arrangement
	side := g.side
	restores, err := g.rearrange(ctx, saved)
	if err != nil {
		err = errors.Join(err, g.dismiss(ctx, g.arrangement, false))
		if g.side != side {
			err = errors.Join(err, g.side.close())
		}
		g.arrangement = before
		g.side = side
		return nil, err
	}
	g.err = g.dismiss(ctx, before, false)
	if g.err != nil {
		return nil, g.err
	}
	g.agreed = false
	g.newStep()
	return restores, nil
}

// rearrange makes the buckets of the states, and returns what restores each.
func (g *Gradients) rearrange(ctx context.Context, saved []savedGradients) ([]func(context.Context) error, error) {
	if err := g.arrange(ctx, saved[0].patterns); err != nil {
		return nil, err
	}
	return g.prepareBuckets(ctx, saved)
}

// prepareBuckets checks the states of the buckets, and returns what restores each.
func (g *Gradients) prepareBuckets(ctx context.Context, saved []savedGradients) ([]func(context.Context) error, error) {
	all := make([]func(context.Context) error, len(g.buckets))
	for i, b := range g.buckets {
		parts := make([][]byte, len(saved))
		for rank, s := range saved {
			plain := len(s.parts[i]) == 0
			if plain != g.transaction.plain {
				return nil, fmt.Errorf("%w: bucket %d is configured otherwise", comm.ErrMismatch, i)
			}
			parts[rank] = s.parts[i]
		}
		restore, err := b.reducer.PrepareRestore(ctx, parts...)
		if err != nil {
			return nil, g.bucketError(i, err)
		}
		all[i] = restore
	}
	return all, nil
}

// parse checks a state, but for those of its buckets' reducers.
func (g *Gradients) parse(saved []byte) (savedGradients, error) {
	d := state.NewDecoder(kind, saved)
	p := savedGradients{fingerprint: d.Uint64()}
	p.gradients = d.Int(math.MaxInt)
	p.steps = d.Int(math.MaxInt)
	buckets := d.Int(math.MaxInt)
	if err := d.Err(); err != nil {
		return savedGradients{}, err
	}
	if p.gradients != len(g.gradients) || buckets != len(g.buckets) || p.fingerprint != g.fingerprint() {
		return savedGradients{}, fmt.Errorf("%w: the state is of other gradients or buckets", comm.ErrMismatch)
	}
	for i := range buckets {
		name := string(d.Bytes())
		part := d.Bytes()
		if !slices.Contains(sparsity.Patterns(), name) {
			d.Fail(fmt.Errorf("%w: bucket %d has pattern %q", comm.ErrMismatch, i, name))
		}
		p.patterns = append(p.patterns, name)
		p.parts = append(p.parts, part)
	}
	return p, d.End()
}

// ScaleResidual is [sparse.Reducer.ScaleResidual] for all buckets, between two steps.
func (g *Gradients) ScaleResidual(factor float64) error {
	const op = "gradient scale residual"
	if err := g.between(op); err != nil {
		return err
	}
	for i, b := range g.buckets {
		if err := b.reducer.ScaleResidual(factor); err != nil {
			return base.OpError(op, g.bucketError(i, err))
		}
	}
	return g.side.join()
}

// Residuals returns [sparse.Reducer.Residual] of the buckets that have one, and [Memory].Residual of buckets with a
// [Reducer], between two steps. Along a mesh this is [comm.ErrUnsupported], because a residual belongs to a rank's
// share.
func (g *Gradients) Residuals() (list []*runtime.Tensor, err error) {
	const op = "gradient residuals"
	for _, b := range g.buckets {
		switch r := b.reducer.(type) {
		case *engine.Reducer:
			t, err := r.Residual()
			if errors.Is(err, comm.ErrUnsupported) {
				continue
			}
			if err != nil {
				return nil, err
			}
			list = append(list, t)
		case *custom:
			list = append(list, r.kept[:r.sums]...)
		case *meshed:
			if s, ok := r.between.(*engine.Reducer); ok {
				if _, err := s.Residual(); errors.Is(err, comm.ErrUnsupported) {
					continue
				}
			}
			return nil, base.OpError(op, fmt.Errorf("%w: along a mesh, a residual belongs to a rank's share",
				comm.ErrUnsupported))
		}
	}
	return list, g.between(op)
}
