package ddp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/state"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// reproducible sums what the ranks contribute to a bucket as integers, so that the sums do not depend on how many
// ranks there are, and who contributes what. The blocks of a gradient first get the largest exponent that any
// contribution has there, of all ranks, and each contribution is rounded once, below that exponent. So the
// contributions of a step are kept until all are there.
type reproducible struct {
	g      *Gradients
	b      *bucket
	order  base.Order
	memory base.Buffer // the integers, and behind them the exponents
	parts  []fixedPart
	sums   uintptr // I32 of each element, and the number of contributions to each gradient
	n      int     // elements
	blocks int

	counted []int32 // the numbers of contributions of the last step, of all ranks
}

// fixedPart is the sums of a gradient.
type fixedPart struct {
	param int
	fixed kernel.Fixed
}

// held is the contributions of a gradient that wait for the last one of the step.
type held struct {
	tensors []*runtime.Tensor // reused
	n       int               // how many of them there are in this step
}

// contributionBits returns how many bits a contribution has below the largest exponent, where 0 is as many as possible.
func contributionBits(contributions, wanted int) (int, error) {
	if contributions < 1 || contributions > 1<<20 {
		return 0, base.ConfigError("Reproducible is %d, want 1 to %d contributions a step", contributions, 1<<20)
	}
	limit := 31 - bits.Len(uint(contributions))
	switch {
	case wanted == 0:
		return limit, nil
	case wanted < 8 || wanted > 30:
		return 0, base.ConfigError("ReproducibleBits is %d, want 8 to 30", wanted)
	case contributions > math.MaxInt32>>wanted:
		return 0, base.ConfigError("ReproducibleBits is %d, which allows %d contributions a step, and Reproducible is %d; "+
			"want at most %d", wanted, math.MaxInt32>>wanted, contributions, limit)
	}
	return wanted, nil
}

// checkReproducible refuses what depends on who computes what.
func (c *Config) checkReproducible(whole *engine.Settings) error {
	if c.Reproducible == 0 {
		if c.ReproducibleBits != 0 {
			return base.ConfigError("ReproducibleBits without Reproducible")
		}
		return nil
	}
	if _, err := contributionBits(c.Reproducible, c.ReproducibleBits); err != nil {
		return err
	}
	dense := whole.Pattern == sparsity.Dense && whole.Values == sparsity.F32 && whole.Momentum == 0
	if !dense || c.Reducer != nil || c.Mesh != nil || c.Shard || c.Weighted || c.Wire != dtype.Invalid {
		return base.ConfigError("Reproducible is for dense gradients in F32 without Momentum: it excludes Reducer, " +
			"Mesh, Shard, Weighted and Wire")
	}
	return nil
}

// newReproducible makes what reduces a bucket.
func (g *Gradients) newReproducible(b *bucket) (reducer, error) {
	r := &reproducible{g: g, b: b, n: b.len(), order: base.NewOrder(g.transaction.rt, g.meter)}
	precision, err := contributionBits(g.cfg.Reproducible, g.cfg.ReproducibleBits)
	if err != nil {
		return nil, err
	}
	for _, i := range b.params {
		f := kernel.Fixed{N: g.gradients[i].n, Bits: precision}
		r.blocks += f.Blocks()
		r.parts = append(r.parts, fixedPart{i, f})
	}
	r.counted = make([]int32, len(r.parts))
	words := 4 * (r.n + len(r.parts))
	if err := g.transaction.buffers.Allocate(g.transaction.rt, &r.memory, words+r.blocks); err != nil {
		return nil, err
	}
	r.sums = r.memory.Ptr
	sums := r.sums
	exponents := r.exponents()
	for i := range r.parts {
		f := &r.parts[i].fixed
		f.Sums = sums
		f.Exponents = exponents
		sums += uintptr(4 * f.N)
		exponents += uintptr(f.Blocks())
	}
	return r, nil
}

// exponents is where those of all blocks are.
func (r *reproducible) exponents() uintptr { return r.count(len(r.parts)) }

// count is where the number of contributions to a part is.
func (r *reproducible) count(part int) uintptr { return r.sums + uintptr(4*(r.n+part)) }

// contributions is how many this rank has for a gradient.
func (r *reproducible) contributions(param int) int {
	n := r.g.gradients[param].held.n
	if !r.g.step.absent[param] {
		n++
	}
	return n
}

// contribution returns where one of them is: those that are held come first.
func (r *reproducible) contribution(param, number int) (uintptr, error) {
	t := r.g.step.tensors[param]
	if h := &r.g.gradients[param].held; number < h.n {
		t = h.tensors[number]
	}
	ptr, err := t.Ptr()
	if err != nil {
		return 0, gradientError(param, err)
	}
	return ptr, nil
}

// Select implements reducer: it raises the exponents to those of this rank's contributions.
func (r *reproducible) Select(context.Context, engine.Input) error {
	t := r.g.transaction
	if err := t.rt.Fill(r.exponents(), r.blocks, dtype.I8, math.MinInt8); err != nil {
		return err
	}
	for _, p := range r.parts {
		for i := range r.contributions(p.param) {
			ptr, err := r.contribution(p.param, i)
			if err != nil {
				return err
			}
			if err := t.kernels.RaiseExponents(p.fixed, ptr, r.b.dt); err != nil {
				return gradientError(p.param, err)
			}
		}
	}
	return nil
}

// Exchange implements reducer.
func (r *reproducible) Exchange(ctx context.Context) error {
	err := r.order.Around(ctx, func() error {
		return r.g.meter.AllReduce(r.exponents(), r.exponents(), r.blocks, dtype.I8, comm.Max)
	})
	if err != nil {
		return err
	}
	if err := r.store(); err != nil {
		return err
	}
	return r.order.Around(ctx, func() error {
		return r.g.meter.AllReduce(r.sums, r.sums, r.n+len(r.parts), dtype.I32, comm.Sum)
	})
}

// store stores the sums of this rank's contributions, and their numbers.
func (r *reproducible) store() error {
	t := r.g.transaction
	for _, p := range r.parts {
		count := r.contributions(p.param)
		if count == 0 {
			if err := t.rt.Fill(p.fixed.Sums, p.fixed.N, dtype.I32, 0); err != nil {
				return err
			}
		}
		for i := range count {
			ptr, err := r.contribution(p.param, i)
			if err != nil {
				return err
			}
			if err := t.kernels.StoreFixed(p.fixed, ptr, r.b.dt, i > 0); err != nil {
				return gradientError(p.param, err)
			}
		}
	}
	return r.storeCounts()
}

// storeCounts stores the numbers of this rank's contributions, those of equal ones at once.
func (r *reproducible) storeCounts() error {
	for from := 0; from < len(r.parts); {
		count := r.contributions(r.parts[from].param)
		end := from + 1
		for end < len(r.parts) && r.contributions(r.parts[end].param) == count {
			end++
		}
		if err := r.g.transaction.rt.Fill(r.count(from), end-from, dtype.I32, float64(count)); err != nil {
			return err
		}
		from = end
	}
	return nil
}

// checkCounts refuses more contributions to a gradient than are expected.
func (r *reproducible) checkCounts() error {
	if err := r.g.transaction.rt.CopyOut(hostmem.Bytes(r.counted), r.count(0)); err != nil {
		return err
	}
	for i, count := range r.counted {
		if int(count) > r.g.cfg.Reproducible {
			return gradientError(r.parts[i].param, fmt.Errorf("%w: %d contributions in a step, Config.Reproducible is %d",
				comm.ErrArgument, count, r.g.cfg.Reproducible))
		}
	}
	return nil
}

// Commit implements reducer.
func (r *reproducible) Commit(v engine.Verdict) error {
	t := r.g.transaction
	factor := uintptr(0)
	if t.cfg.ClipNorm > 0 {
		factor = t.factor
	}
	for _, p := range r.parts {
		ptr, err := r.g.step.tensors[p.param].Ptr()
		if err != nil {
			return gradientError(p.param, err)
		}
		if v == engine.Skips {
			err = t.rt.Fill(ptr, p.fixed.N, r.b.dt, 0)
		} else {
			err = t.kernels.LoadFixed(ptr, r.b.dt, p.fixed, r.g.divisor(), factor)
		}
		if err == nil {
			err = r.writeView(p.param)
		}
		if err != nil {
			return gradientError(p.param, err)
		}
	}
	return nil
}

// writeView has the view of a gradient hold the result, also where that was left out, or passed as another tensor.
func (r *reproducible) writeView(param int) error {
	if r.g.views == nil {
		return nil
	}
	return r.g.copyOnStream(r.g.views[param], r.g.step.tensors[param])
}

// divisor is what sums are divided by.
func (g *Gradients) divisor() int {
	if g.cfg.Sum {
		return 1
	}
	return g.cfg.Reproducible
}

// concludeFixed checks how many contributions the buckets have had, and computes the norm of the results, for what
// clips them and judges them. All ranks have the same integers, and find the same.
func (g *Gradients) concludeFixed(ctx context.Context) error {
	t := g.transaction
	if err := t.order.HostAfterAll(ctx); err != nil {
		return err
	}
	judges := t.cfg.NonFinite != engine.PassNonFinite
	for _, b := range g.buckets {
		r := b.reducer.(*reproducible)
		if err := r.checkCounts(); err != nil {
			return err
		}
		for _, p := range r.parts {
			if !judges && t.cfg.ClipNorm == 0 {
				continue
			}
			if err := t.kernels.SquareFixed(p.fixed, g.divisor(), base.At(t.squares, 2*p.param)); err != nil {
				return err
			}
		}
	}
	if judges && len(g.gradients) > 0 {
		if err := t.judgeNorm(len(g.gradients), len(g.buckets)); err != nil {
			return err
		}
	}
	if t.cfg.ClipNorm == 0 || len(g.gradients) == 0 {
		return nil
	}
	return t.kernels.ClipFactor(t.factor, t.squares, len(g.gradients), 1, t.cfg.ClipNorm)
}

// contribute takes a contribution of gradient i that is not the last one of this rank. Wait rolls a step back of which
// one could not be kept.
func (g *Gradients) contribute(i int, t *runtime.Tensor) error {
	if g.repeats {
		if err := g.beginAnew(); err != nil {
			return err
		}
	}
	err := g.hold(i, t)
	if err != nil {
		g.step.begun = true
		g.fail(err)
	}
	return err
}

// hold keeps a copy of a contribution of gradient i until the step reduces it.
func (g *Gradients) hold(i int, t *runtime.Tensor) error {
	h := &g.gradients[i].held
	if h.n == len(h.tensors) {
		c, err := runtime.New(g.rt, t.DType(), t.Len())
		if err != nil {
			return err
		}
		h.tensors = append(h.tensors, c)
	}
	to, err := h.tensors[h.n].Ptr()
	if err != nil {
		return err
	}
	from, err := t.Ptr()
	if err != nil {
		return err
	}
	if t.Bytes() > 0 {
		if err := g.rt.Copy(to, from, t.Bytes()); err != nil {
			return err
		}
	}
	h.n++
	return nil
}

// beginAnew leaves out the contributions of a step that was rolled back, for a step that does not repeat it.
func (g *Gradients) beginAnew() error {
	for i := range g.gradients {
		if g.step.tensors[i] != nil && g.gradients[i].held.n > 0 {
			return fmt.Errorf("%w: gradient %d is ready with what it had in the step that was rolled back: begin another "+
				"step with Accumulate", comm.ErrArgument, i)
		}
	}
	g.forgetHeld()
	return nil
}

// forgetHeld leaves out the contributions of a step that has ended, or is not repeated.
func (g *Gradients) forgetHeld() {
	g.repeats = false
	for i := range g.gradients {
		g.gradients[i].held.n = 0
	}
}

// freeHeld gives the memory of contributions back: with other ranks, this one may have fewer.
func (g *Gradients) freeHeld() error {
	g.forgetHeld()
	var errs []error
	for i := range g.gradients {
		h := &g.gradients[i].held
		for _, t := range h.tensors {
			errs = append(errs, t.Free())
		}
		h.tensors = nil
	}
	return errors.Join(errs...)
}

// fixedKind is that of a reproducible bucket's states, which have nothing in them: no step leaves anything to the next.
var fixedKind = state.Kind{Name: "tutti-reproducible", Version: 1, Owner: "a reproducible bucket"}

func (r *reproducible) State(context.Context) ([]byte, error) {
	return state.NewEncoder(fixedKind, 0).Seal(), nil
}

func (r *reproducible) SharedState(ctx context.Context) ([]byte, error) { return r.State(ctx) }

// PrepareRestore implements reducer, for any number of ranks.
func (r *reproducible) PrepareRestore(_ context.Context, states ...[]byte) (func(context.Context) error, error) {
	for i, saved := range states {
		if err := state.NewDecoder(fixedKind, saved).End(); err != nil {
			return nil, fmt.Errorf("state %d: %w", i, err)
		}
	}
	return func(context.Context) error { return nil }, nil
}

func (r *reproducible) Rebind(c comm.Communicator) error {
	r.order = base.NewOrder(r.g.transaction.rt, c)
	return nil
}

func (r *reproducible) RollBack() error {
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	return r.order.Drain(ctx)
}

func (r *reproducible) Terms() string {
	return fmt.Sprintf("reproducible, of %d contributions with %d bits", r.g.cfg.Reproducible, r.parts[0].fixed.Bits)
}

// Skipped implements reducer. The host has judged the step.
func (r *reproducible) Skipped(context.Context) (bool, error) { return false, nil }

func (r *reproducible) Drain(ctx context.Context) error                 { return r.order.Drain(ctx) }
func (r *reproducible) InFlight() bool                                  { return true }
func (r *reproducible) Complete(context.Context) (waited bool, _ error) { return false, nil }
func (r *reproducible) JoinTransaction(flags, skip uintptr)             {}
func (r *reproducible) ScaleResidual(float64) error                     { return nil }
func (r *reproducible) Close() error                                    { return r.order.DrainToFree() }
