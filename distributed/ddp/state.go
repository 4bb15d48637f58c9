package ddp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/runtime"
)

// gradientsMagic is the beginning of what [Gradients.State] returns; its last
// byte is the version. Behind it come gradientsHeader; of each bucket its pattern and the state of its sparse.Reducer, empty for a
// plain bucket, both with their lengths (U32) in front; and a CRC-32C.
const gradientsMagic = "tutti-gradients\x04"

type gradientsHeader struct {
	Fingerprint        uint64
	Steps              uint64
	Gradients, Buckets uint32
}

// savedGradients is a state that was parsed.
type savedGradients struct {
	gradientsHeader
	patterns []string
	parts    [][]byte
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
	for _, t := range g.step.given {
		if t != nil {
			return base.OpError(op, fmt.Errorf("%w: in the middle of a step, want after Wait", comm.ErrArgument))
		}
	}
	return base.OpError(op, g.side.catchUp()) // a graph has the side stream's work on the compute stream
}

// State returns what a [Gradients] of the same gradients and configuration needs
// to go on from here, bit for bit: what [sparse.Reducer.State] returns for each bucket. It
// is for between two steps, when nothing is accumulated, does not communicate, and
// waits for the device until ctx is done. Every rank saves its own.
func (g *Gradients) State(ctx context.Context) ([]byte, error) {
	return g.state(ctx, reducer.State)
}

// SharedState is [sparse.Reducer.SharedState] of all buckets.
func (g *Gradients) SharedState(ctx context.Context) ([]byte, error) {
	return g.state(ctx, reducer.SharedState)
}

func (g *Gradients) state(ctx context.Context, of func(reducer, context.Context) ([]byte, error)) ([]byte, error) {
	const op = "gradient state"
	if err := g.between(op); err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(g.gradients, func(p gradient) bool { return p.sum.any }); i >= 0 {
		return nil, base.OpError(op, fmt.Errorf("%w: gradient %d is accumulated, want after the step that reduces it", comm.ErrArgument, i))
	}
	state := []byte(gradientsMagic)
	header := gradientsHeader{Fingerprint: g.fingerprint(), Steps: uint64(g.steps), Gradients: uint32(len(g.gradients)), Buckets: uint32(len(g.buckets))}
	state, err := binary.Append(state, binary.LittleEndian, header)
	chunk := func(part []byte) { state = append(binary.LittleEndian.AppendUint32(state, uint32(len(part))), part...) }
	for i, b := range g.buckets {
		var part []byte
		if err == nil {
			part, err = of(b.reducer, ctx)
		}
		if int64(len(part)) > math.MaxUint32 {
			err = fmt.Errorf("%w: bucket %d has a state of %d bytes", comm.ErrUnsupported, i, len(part))
		}
		chunk([]byte(b.pattern))
		chunk(part)
	}
	if err != nil {
		return nil, base.OpError(op, err)
	}
	return base.Seal(state), nil
}

// Restore makes g what it was when [Gradients.State] returned its state. What
// [sparse.Reducer.Restore] says of other world sizes and of errors holds here too, for all
// buckets: a wrong state is found before anything has changed. What is accumulated is
// forgotten. Where [sparse.Auto] had chosen other patterns than it has for g, theirs are
// restored: then there are other buckets than before, which all ranks make together.
func (g *Gradients) Restore(ctx context.Context, states ...[]byte) error {
	const op = "gradient restore"
	if err := g.between(op); err != nil {
		return err
	}
	if err := g.restore(ctx, states); err != nil {
		return base.OpError(op, err)
	}
	g.stats, g.open = Stats{}, false
	return nil
}

func (g *Gradients) restore(ctx context.Context, states [][]byte) error {
	if len(states) == 0 {
		return fmt.Errorf("%w: no state", comm.ErrArgument)
	}
	var saved []savedGradients
	for i, state := range states {
		p, err := g.parse(state)
		if err == nil && i > 0 && !slices.Equal(p.patterns, saved[0].patterns) {
			err = fmt.Errorf("%w: its buckets are not those of the first", comm.ErrMismatch)
		}
		if err == nil && i > 0 && p.Steps != saved[0].Steps {
			err = fmt.Errorf("%w: it is of step %d, the first of %d", comm.ErrMismatch, p.Steps, saved[0].Steps)
		}
		if err != nil {
			return fmt.Errorf("state %d: %w", i, err)
		}
		saved = append(saved, p)
	}
	before, side := g.arrangement, g.side
	anew := !slices.Equal(saved[0].patterns, g.Patterns())
	var restores []func(context.Context) error
	var err error
	if anew {
		err = g.arrange(ctx, saved[0].patterns)
	}
	if err == nil {
		restores, err = g.prepareBuckets(ctx, saved)
	}
	switch {
	case err != nil && anew:
		err = errors.Join(err, g.dismiss(ctx, g.arrangement, false))
		if g.side != side {
			err = errors.Join(err, g.side.close())
		}
		g.arrangement, g.side = before, side
		return err
	case err != nil:
		return err
	case anew:
		if g.err = g.dismiss(ctx, before, false); g.err != nil {
			return g.err
		}
		g.agreed = false
		g.newStep()
	}
	g.steps = int(saved[0].Steps)
	for i := range g.gradients {
		g.gradients[i].sum.any = false
	}
	g.endWeights()
	for i, restore := range restores {
		if g.err = restore(ctx); g.err != nil {
			return g.bucketError(i, g.err)
		}
	}
	return g.side.join()
}

// prepareBuckets checks the states of the buckets, and returns what restores each.
func (g *Gradients) prepareBuckets(ctx context.Context, saved []savedGradients) ([]func(context.Context) error, error) {
	all := make([]func(context.Context) error, len(g.buckets))
	for i, b := range g.buckets {
		var parts [][]byte
		for _, s := range saved {
			if part := s.parts[i]; (len(part) > 0) == g.transaction.plain {
				return nil, fmt.Errorf("%w: bucket %d is configured otherwise", comm.ErrMismatch, i)
			} else {
				parts = append(parts, part)
			}
		}
		var err error
		if all[i], err = b.reducer.PrepareRestore(ctx, parts...); err != nil {
			return nil, g.bucketError(i, err)
		}
	}
	return all, nil
}

// parse checks a state, but for those of its buckets' reducers.
func (g *Gradients) parse(state []byte) (p savedGradients, err error) {
	rest, err := base.Unseal(state, gradientsMagic, "a Gradients")
	if err != nil {
		return p, err
	}
	damaged := fmt.Errorf("%w: the state is damaged", comm.ErrArgument)
	size, err := binary.Decode(rest, binary.LittleEndian, &p.gradientsHeader)
	if err != nil {
		return p, damaged
	}
	others := fmt.Errorf("%w: the state is of other gradients or buckets", comm.ErrMismatch)
	if int(p.Gradients) != len(g.gradients) {
		return p, others
	}
	rest = rest[size:]
	if p.Steps > math.MaxInt64 {
		return p, damaged
	}
	if g.fingerprint() != p.Fingerprint || len(g.buckets) != int(p.Buckets) {
		return p, others
	}
	chunk := func() []byte {
		if len(rest) < base.WordSize || int64(binary.LittleEndian.Uint32(rest)) > int64(len(rest)-base.WordSize) {
			err = damaged
			return nil
		}
		end := base.WordSize + int(binary.LittleEndian.Uint32(rest))
		part := rest[base.WordSize:end]
		rest = rest[end:]
		return part
	}
	for range p.Buckets {
		p.patterns = append(p.patterns, string(chunk()))
		p.parts = append(p.parts, chunk())
	}
	if err == nil && len(rest) > 0 {
		err = damaged
	}
	for i, name := range p.patterns {
		known := slices.Contains(engine.Patterns(), name)
		if err == nil && !known {
			err = fmt.Errorf("%w: bucket %d has pattern %q", comm.ErrMismatch, i, name)
		}
	}
	return p, err
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

// Residuals returns [sparse.Reducer.Residual] of the buckets that have one, and [Memory].Residual of those of a [Reducer], between two
// steps. Along a mesh each rank has the residual of its share, which is no other rank's: [comm.ErrUnsupported].
func (g *Gradients) Residuals() (list []*runtime.Tensor, err error) {
	const op = "gradient residuals"
	for _, b := range g.buckets {
		switch r := b.reducer.(type) {
		case *engine.Reducer:
			t, err := r.Residual()
			if err == nil {
				list = append(list, t)
			} else if !errors.Is(err, comm.ErrUnsupported) {
				return nil, err
			}
		case *custom:
			list = append(list, r.kept[:r.sums]...)
		case *meshed:
			if s, ok := r.between.(*engine.Reducer); ok {
				if _, err := s.Residual(); errors.Is(err, comm.ErrUnsupported) {
					continue
				}
			}
			return nil, base.OpError(op, fmt.Errorf("%w: along a mesh, a residual is that of a rank's share", comm.ErrUnsupported))
		}
	}
	return list, g.between(op)
}
