package ddp

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/state"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// custom is a bucket that a Reducer reduces, in memory beside its gradients'.
type custom struct {
	Reducer
	g      *transaction      // steps of all buckets
	b      Bucket            // the bucket
	order  base.Order        // of b.Comm; in flight is what the program has submitted before an error
	kept   []*runtime.Tensor // its memory, residuals first
	sums   int               // how many of them are residuals
	before base.Buffer       // the memory before the step, if it may be rolled back
	n      int               // elements of the bucket
	dt     dtype.DType       // their type
	target uintptr           // of the step

	room    int         // elements of the memory
	memory  base.Buffer // the tensor's, and behind it what follows
	squares [2]uintptr  // F64: of the gradients of all ranks, and of the result
	limit   uintptr     // F32: what is as large is not finite
	flags   uintptr     // I32 of each rank, of the transaction
	begun   bool        // Reduce was called, and its memory is not what it was
	counted bool        // as a step
	inner   bool        // it is a part of another reducer, which judges
	scratch bool        // of the step: its target
}

// allocate allocates memory for a bucket of n elements, which may be more than it has.
func (c *custom) allocate(n int) error {
	bytes := (n*c.dt.Size() + 7) &^ 7
	if err := c.g.buffers.Allocate(c.g.rt, &c.memory, bytes+5*base.WordSize); err != nil {
		return err
	}
	first := c.memory.Ptr + uintptr(bytes)
	c.room = n
	c.squares = [2]uintptr{first, base.At(first, 2)}
	c.limit = base.At(first, 4)
	return nil
}

// newCustom makes what the program reduces a bucket with, or a share of one, nil for none.
func (g *Gradients) newCustom(i int, dt dtype.DType, to comm.Communicator, n int, parts []Part) (reducer, error) {
	c := &custom{
		g:     g.transaction,
		n:     n,
		dt:    dt,
		b:     Bucket{Index: i, Comm: to, Parts: parts},
		inner: g.lines.mesh != nil,
	}
	c.order = base.NewOrder(c.g.rt, to)
	held := len(c.g.buffers)
	if err := c.allocate(n); err != nil {
		return nil, err
	}
	var err error
	c.b.Tensor, err = runtime.Wrap(c.g.rt, c.memory.Ptr, c.dt, []int{c.n}, nil, nil)
	if err != nil {
		return nil, err
	}
	c.Reducer, err = g.cfg.Reducer(c.b)
	if err != nil {
		c.order.Submitted()
		if inFlight := c.order.DrainToFree(); inFlight != nil {
			return nil, errors.Join(err, inFlight)
		}
	}
	if c.Reducer == nil || err != nil {
		return nil, errors.Join(err, c.b.Tensor.Free(), c.g.buffers.Release(c.g.rt, held))
	}
	m := c.Memory()
	c.kept = slices.Concat(m.Residual, m.Shared)
	c.sums = len(m.Residual)
	for _, t := range m.Residual {
		if t.DType() != dtype.F32 {
			return nil, errors.Join(fmt.Errorf("%w: a residual is %v, want f32", comm.ErrUnsupported, t.DType()), c.Close())
		}
	}
	if err := base.Disjoint("tensor", append(slices.Concat(c.kept, m.Scratch), c.b.Tensor)); err != nil {
		return nil, errors.Join(fmt.Errorf("memory of the Reducer: %w", err), c.Close())
	}
	if c.g.cfg.NoUndo {
		return c, nil
	}
	if err := c.g.buffers.Allocate(c.g.rt, &c.before, c.size()); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// size returns how many bytes of memory there are, each tensor's rounded up to words of 8.
func (c *custom) size() (bytes int) {
	for _, t := range c.kept {
		bytes += (t.Bytes() + 7) &^ 7
	}
	return bytes
}

// copyMemory keeps the memory, or copies it back.
func (c *custom) copyMemory(back bool) error {
	place := c.before.Ptr
	for _, t := range c.kept {
		bytes := t.Bytes()
		if bytes == 0 {
			continue
		}
		memory, err := t.Ptr()
		if err != nil {
			return err
		}
		from := memory
		to := place
		if back {
			from = place
			to = memory
		}
		if err := c.g.rt.Copy(to, from, bytes); err != nil {
			return err
		}
		place += uintptr((bytes + 7) &^ 7)
	}
	return nil
}

func (c *custom) Drain(ctx context.Context) error {
	return c.order.Drain(ctx)
}

func (c *custom) Select(_ context.Context, in engine.Input) error {
	c.target = in.Ptr
	c.scratch = in.Scratch
	c.begun = false
	c.counted = false
	if err := c.g.rt.Copy(c.memory.Ptr, in.Ptr, c.n*c.dt.Size()); err != nil || in.Factor == 0 {
		return err
	}
	return c.g.kernels.Scale(c.memory.Ptr, c.dt, c.n, in.Factor)
}

func (c *custom) Exchange(ctx context.Context) error {
	if !c.g.cfg.NoUndo {
		if err := c.copyMemory(false); err != nil {
			return err
		}
		c.begun = true
	}
	if !c.judges() {
		return c.reduce(ctx)
	}
	// Non-finite values may wait in a residual, and all ranks are to know of it.
	if err := c.g.kernels.SumSquares(c.memory.Ptr, c.dt, c.n, c.squares[0]); err != nil {
		return err
	}
	if err := c.reduce(ctx); err != nil {
		return err
	}
	sum := func() error {
		return c.b.Comm.AllReduce(c.squares[0], c.squares[0], 1, dtype.F64, comm.Sum)
	}
	return c.g.order.Around(ctx, sum)
}

// reduce calls the program's Reduce. After an error, it waits for the collectives that Reduce has submitted: they write
// the bucket, and may write the memory, both of which a rollback restores.
func (c *custom) reduce(ctx context.Context) error {
	err := c.Reduce(ctx, c.b)
	if err != nil {
		c.order.Submitted()
		_ = c.order.Drain(ctx) // RollBack tries again
	}
	return err
}

// judges reports whether entries that are not finite are looked for.
func (c *custom) judges() bool {
	return !c.inner && c.g.cfg.NonFinite != engine.PassNonFinite && c.n > 0
}

// InFlight implements reducer. The result is in memory that no other bucket uses.
func (c *custom) InFlight() bool { return true }

// Complete implements reducer. The device cannot roll a Reducer back, so the host waits for the
// verdict.
func (c *custom) Complete(context.Context) (hostWaited bool, err error) {
	if !c.judges() {
		return true, nil
	}
	// A sum of squares is not finite if an element is not, and then the high word of the F64 is, as
	// an F32, a NaN.
	if err := c.g.rt.Fill(c.limit, 1, dtype.F32, math.MaxFloat32); err != nil {
		return true, err
	}
	if err := c.g.kernels.SumSquares(c.memory.Ptr, c.dt, c.n, c.squares[1]); err != nil {
		return true, err
	}
	flags := min(len(c.squares), c.b.Comm.WorldSize()) // there is one of each rank
	for i, square := range c.squares[:flags] {
		high := kernel.Entries{
			Idx: square,
			Val: base.At(square, 1),
			N:   1,
		}
		if err := c.g.kernels.CountAbove(high, c.limit, 1, base.At(c.flags, i)); err != nil {
			return true, err
		}
	}
	return true, nil
}

func (c *custom) Commit(v engine.Verdict) error {
	if v == engine.Skips {
		return cmp.Or(c.RollBack(), c.g.rt.Fill(c.target, c.n, c.dt, 0))
	}
	c.begun = c.begun && c.scratch
	c.counted = true
	c.b.Step++
	return c.g.rt.Copy(c.target, c.memory.Ptr, c.n*c.dt.Size())
}

func (c *custom) RollBack() error {
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	if err := c.order.Drain(ctx); err != nil {
		return err
	}
	if !c.begun {
		return nil
	}
	c.begun = false
	if c.counted {
		c.b.Step--
	}
	return c.copyMemory(true)
}

func (c *custom) JoinTransaction(flags, _ uintptr) {
	c.flags = flags
}

func (c *custom) Terms() string {
	if s, ok := c.Reducer.(fmt.Stringer); ok {
		return "reduced by " + s.String()
	}
	return fmt.Sprintf("reduced by %T", c.Reducer)
}

// Skipped implements reducer. The host has judged the step.
func (c *custom) Skipped(context.Context) (bool, error) { return false, nil }

// customKind is the kind of a custom's states.
var customKind = state.Kind{
	Name:    "tutti-reducer",
	Version: 1,
	Owner:   "a Reducer of the program",
}

// savedCustom has the fields of a state, in their order.
type savedCustom struct {
	step       int      // of the reducer, from 0
	rank, size int      // rank is size where the state has what ranks share
	parts      [][]byte // the memory, tensor by tensor
}

func (c *custom) State(ctx context.Context) ([]byte, error) {
	return c.state(ctx, c.b.Comm.Rank())
}

func (c *custom) SharedState(ctx context.Context) ([]byte, error) {
	return c.state(ctx, c.b.Comm.WorldSize())
}

// state is the state of a rank; the number of ranks stands for what they share.
func (c *custom) state(ctx context.Context, rank int) ([]byte, error) {
	if err := c.g.order.HostAfterAll(ctx); err != nil {
		return nil, err
	}
	e := state.NewEncoder(customKind, c.size())
	e.Int(c.b.Step)
	e.Int(rank)
	e.Int(c.b.Comm.WorldSize())
	for _, t := range c.kept {
		part := e.Extend(t.Bytes())
		p, err := t.Ptr()
		if err != nil {
			return nil, err
		}
		if len(part) == 0 {
			continue
		}
		if err := c.g.rt.CopyOut(part, p); err != nil {
			return nil, err
		}
	}
	return e.Seal(), nil
}

// parse checks a state, by itself.
func (c *custom) parse(saved []byte) (savedCustom, error) {
	d := state.NewDecoder(customKind, saved)
	p := savedCustom{step: d.Int(math.MaxInt)}
	p.rank = d.Int(engine.MaxRanks)
	p.size = d.Int(engine.MaxRanks)
	for i, t := range c.kept {
		part := d.Bytes()
		if d.Err() == nil && len(part) != t.Bytes() {
			d.Fail(fmt.Errorf("%w: tensor %d of the memory has %d bytes, want %d", comm.ErrMismatch, i, len(part), t.Bytes()))
		}
		p.parts = append(p.parts, part)
	}
	if d.Err() == nil && d.Len() > 0 {
		d.Fail(fmt.Errorf("%w: it has more tensors than the memory, %d", comm.ErrMismatch, len(c.kept)))
	}
	if p.size < 1 || p.rank > p.size {
		d.Damaged("rank %d of %d", p.rank, p.size)
	}
	return p, d.End()
}

// PrepareRestore implements reducer. A rank that was not there before begins without a residual.
func (c *custom) PrepareRestore(ctx context.Context,
	states ...[]byte) (restore func(context.Context) error, err error) {
	saved := make([]savedCustom, len(states))
	ranks := make([]int, len(states))
	for i, bytes := range states {
		p, err := c.parse(bytes)
		if err != nil {
			return nil, fmt.Errorf("state %d: %w", i, err)
		}
		saved[i] = p
		ranks[i] = p.rank
		if p.size != saved[0].size || p.step != saved[0].step {
			return nil, fmt.Errorf("state %d: %w: of %d ranks after %d steps, the first is of %d after %d",
				i, comm.ErrMismatch, p.size, p.step, saved[0].size, saved[0].step)
		}
	}
	rank := c.b.Comm.Rank()
	world := c.b.Comm.WorldSize()
	size := saved[0].size
	shared := len(ranks) == 1 && ranks[0] == size && size == world
	if !shared && !slices.Equal(ranks, engine.RestoreRanks(size, world, rank)) {
		return nil, fmt.Errorf("%w: the states are those of the ranks %v of %d, for rank %d of %d",
			comm.ErrMismatch, ranks, size, rank, world)
	}
	if err := c.g.order.HostAfterAll(ctx); err != nil {
		return nil, err
	}
	return func(context.Context) error { return c.restore(saved) }, nil
}

// restore takes what was parsed.
func (c *custom) restore(saved []savedCustom) error {
	first := &saved[0]
	c.b.Step = first.step
	world := c.b.Comm.WorldSize()
	inherits := first.rank < first.size && first.rank%world == c.b.Comm.Rank() // the residual
	for i, t := range c.kept {
		part := slices.Clone(first.parts[i])
		if i < c.sums {
			if !inherits {
				clear(part)
			}
			for _, s := range saved[1:] {
				addF32(part, s.parts[i])
			}
		}
		p, err := t.Ptr()
		if err != nil {
			return err
		}
		if len(part) == 0 {
			continue
		}
		if err := c.g.rt.CopyIn(p, part); err != nil {
			return err
		}
	}
	return nil
}

// addF32 adds numbers to others.
func addF32(sum, x []byte) {
	for i := 0; i < len(sum); i += 4 {
		a := math.Float32frombits(binary.LittleEndian.Uint32(sum[i:]))
		b := math.Float32frombits(binary.LittleEndian.Uint32(x[i:]))
		binary.LittleEndian.PutUint32(sum[i:], math.Float32bits(a+b))
	}
}

func (c *custom) ScaleResidual(factor float64) error {
	if !(factor >= 0) || math.IsInf(float64(float32(factor)), 0) {
		return fmt.Errorf("%w: factor is %v, want a finite number, not negative", comm.ErrArgument, factor)
	}
	if err := c.g.rt.Fill(c.limit, 1, dtype.F32, factor); err != nil {
		return err
	}
	for _, t := range c.kept[:c.sums] {
		ptr, err := t.Ptr()
		if err != nil {
			return err
		}
		if err := c.g.kernels.Scale(ptr, dtype.F32, t.Len(), c.limit); err != nil {
			return err
		}
	}
	return nil
}

func (c *custom) Rebind(to comm.Communicator) error {
	c.b.Comm = to
	c.order = base.NewOrder(c.g.rt, to)
	return nil
}

func (c *custom) Close() error {
	if err := errors.Join(c.g.order.DrainToFree(), c.order.DrainToFree()); err != nil {
		return err
	}
	var errs []error
	for _, t := range append(c.kept, c.Memory().Scratch...) {
		errs = append(errs, t.Free())
	}
	return errors.Join(errs...)
}
