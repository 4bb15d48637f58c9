package ddp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/state"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// turnLen is how many elements are summed in a turn whose integers stay in the second-level cache on their way from
// gradients to results, and sharedTurnLen how many where ranks share memory: an exchange has copies of them there.
const (
	turnLen       = 1 << 17
	sharedTurnLen = 1 << 15
)

// reproducible sums what the ranks contribute to a bucket as integers, so that the sums do not depend on how many
// ranks there are, and who contributes what. The blocks of a gradient first get the largest exponent that any
// contribution has there, of all ranks, and each contribution is rounded once, below that exponent. So the
// contributions of a step are kept until all are there.
type reproducible struct {
	g       *Gradients       // whose contributions it sums
	b       *bucket          // the bucket
	index   int              // of the bucket
	order   base.Order       // of the communicator of all ranks
	inner   []base.Order     // with a Mesh, the communicators within hosts, the fastest dimension first
	outer   base.Order       // and that between hosts
	memory  base.Buffer      // the number of contributions to each gradient, exponents, and sums unless buckets share them
	wholes  []fixedPart      // one of each gradient
	turns   []turn           // parts of the bucket that are summed one after the other
	counts  uintptr          // I32 of each gradient
	counted []int32          // those of the last step, of all ranks
	calls   []comm.Call      // reused
	gathers []comm.Call      // reused
	keeps   bool             // there is room for exponents and sums
	written int              // turns whose results may be in the gradients, where those before are saved
	sums    []fixedpoint.Sum // where ranks sum together, those of the gradients that have elements
}

// fixedPart is the sums of some elements of a gradient.
type fixedPart struct {
	param int          // number of the gradient
	from  int          // the first element
	fixed kernel.Fixed // its sums and exponents
	saved uintptr      // where the elements are saved before they hold results; 0: they are not
}

// turn is what is summed at once. Its sums follow each other, and so do its exponents.
type turn struct {
	parts  []fixedPart // of gradients
	n      int         // elements
	blocks int         // of exponents
}

// sums is where those of a turn are.
func (t *turn) sums() uintptr { return t.parts[0].fixed.Sums }

// exponents is where those of a turn are.
func (t *turn) exponents() uintptr { return t.parts[0].fixed.Exponents }

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
	switch {
	case !dense || c.Reducer != nil || c.Wire != dtype.Invalid:
		return base.ConfigError("Reproducible is for dense gradients in F32 without Momentum: it excludes Reducer and " +
			"Wire, by which a rank rounds what it has, and not what it contributes")
	case c.Shard && c.Mesh != nil:
		return base.ConfigError("Shard with Mesh, whose ranks within a host have shards already")
	case c.Shard && c.BucketViews:
		return base.ConfigError("Reproducible with Shard and BucketViews: padding of shards, which follows the number of " +
			"ranks, would move the views")
	}
	return nil
}

// fixedEarly reports whether results are written turn by turn: on the host, where nothing has to be known of all of
// them before. If a step is to be rolled back, gradients are saved, which takes less than to keep the integers until it
// commits; between hosts, the ways of all turns would take more.
func (g *Gradients) fixedEarly() bool {
	cfg := &g.transaction.cfg
	if g.cfg.Reproducible == 0 || g.cfg.Shard || g.runtime().ComputeStream() != 0 || g.fixedTogether() {
		return false
	}
	return (cfg.NoUndo || g.lines.shared) && cfg.ClipNorm == 0 && cfg.NonFinite == engine.PassNonFinite
}

// savesGradients reports whether gradients are saved before results are written.
func (g *Gradients) savesGradients() bool {
	return g.fixedEarly() && !g.transaction.cfg.NoUndo
}

// fixedTogether reports whether ranks read each other's contributions and write each other's results: in one pass, and
// with neither exponents nor integers between them.
func (g *Gradients) fixedTogether() bool {
	var c comm.Communicator = g.meter
	for {
		m, ok := c.(*metered.Communicator)
		if !ok {
			break
		}
		c = m.Unwrap()
	}
	_, ok := c.(fixedpoint.Reducer)
	return ok && g.runtime().ComputeStream() == 0 && len(g.lines.inner) == 0 && !g.cfg.Shard
}

// fixedAtOnce reports whether ranks that sum together do so for all buckets at once, when nothing else of the step can
// fail any more: in one collective, which all ranks have the results of, or none. So a step is rolled back without
// anything that was kept for that.
func (g *Gradients) fixedAtOnce() bool {
	if g.cfg.Reproducible == 0 || !g.fixedTogether() {
		return false
	}
	cfg := &g.transaction.cfg
	return cfg.ClipNorm == 0 && cfg.NonFinite == engine.PassNonFinite && g.confirm == nil
}

// turnLimit is how many elements a turn has at most. Sums that are kept until the step commits pass through memory
// anyway, and those of a bucket are one turn.
func (g *Gradients) turnLimit() int {
	switch {
	case !g.fixedEarly():
		return math.MaxInt32 &^ (kernel.FixedBlock - 1)
	case g.lines.shared:
		return sharedTurnLen
	}
	return turnLen
}

// newReproducible makes what reduces a bucket.
func (g *Gradients) newReproducible(index int, b *bucket) (reducer, error) {
	r := &reproducible{
		g:       g,
		b:       b,
		index:   index,
		counted: make([]int32, len(b.params)),
	}
	precision, err := contributionBits(g.cfg.Reproducible, g.cfg.ReproducibleBits)
	if err != nil {
		return nil, err
	}
	for _, i := range b.params {
		f := kernel.Fixed{
			N:    g.gradients[i].n,
			Bits: precision,
		}
		r.wholes = append(r.wholes, fixedPart{param: i, fixed: f})
	}
	return r, r.Rebind(g.meter)
}

// Rebind implements reducer. The room for sums follows the ranks.
func (r *reproducible) Rebind(c comm.Communicator) error {
	t := r.g.transaction
	r.order = base.NewOrder(t.rt, c)
	r.inner = r.inner[:0]
	r.outer = base.NewOrder(t.rt, r.g.lines.outer)
	for _, line := range r.g.lines.inner {
		r.inner = append(r.inner, base.NewOrder(t.rt, line))
	}
	return r.allocate()
}

// allocate makes room for what is kept of a step.
func (r *reproducible) allocate() error {
	t := r.g.transaction
	blocks := 0
	for _, p := range r.wholes {
		blocks += p.fixed.Blocks()
	}
	words := len(r.wholes)
	r.keeps = !r.g.fixedAtOnce()
	switch {
	case !r.keeps:
		blocks = 0
	case !r.g.fixedEarly():
		words += r.g.fixedRoom(r.b.len())
	case r.g.savesGradients():
		words += (r.b.bytes + base.WordSize - 1) / base.WordSize
	}
	if err := t.buffers.Allocate(t.rt, &r.memory, base.WordSize*words+blocks); err != nil {
		return err
	}
	r.counts = r.memory.Ptr
	sums := base.At(r.counts, len(r.wholes))
	saved := sums // one or the other
	exponents := base.At(r.counts, words)
	for i := range r.wholes {
		p := &r.wholes[i]
		p.fixed.Sums = sums
		p.fixed.Exponents = exponents
		p.saved = 0
		if r.g.savesGradients() {
			p.saved = saved
			saved += uintptr(p.fixed.N * r.b.dt.Size())
		}
		sums = base.At(sums, p.fixed.N)
		exponents += uintptr(p.fixed.Blocks())
	}
	return nil
}

// fixedRoom is how many sums there is to be memory for, where n are in use: ranks have equal parts of them.
func (g *Gradients) fixedRoom(n int) int {
	ranks := g.lines.ranks()
	if g.cfg.Shard {
		ranks = g.meter.WorldSize()
	}
	return (n + ranks - 1) / ranks * ranks
}

// turnMemory is how many bytes of memory buckets share for the sums of one turn at a time.
func (g *Gradients) turnMemory() (bytes int) {
	if !g.fixedEarly() {
		return 0
	}
	for _, b := range g.buckets {
		bytes = max(bytes, base.WordSize*g.fixedRoom(min(g.turnLimit(), b.len())))
	}
	return bytes
}

// JoinTransaction implements reducer. Memory that buckets share is allocated by now.
func (r *reproducible) JoinTransaction(flags, skip uintptr) { r.cut() }

// cut cuts gradients into turns, between blocks.
func (r *reproducible) cut() {
	limit := r.g.turnLimit()
	r.turns = []turn{{}}
	for _, whole := range r.wholes {
		for from := 0; from < whole.fixed.N; {
			t := &r.turns[len(r.turns)-1]
			n := whole.fixed.N - from
			room := limit - t.n
			if n > room {
				n = room &^ (kernel.FixedBlock - 1)
			}
			if n == 0 {
				r.turns = append(r.turns, turn{})
				continue
			}
			part := whole
			part.from = from
			part.fixed.N = n
			part.fixed.Sums = base.At(whole.fixed.Sums, from)
			part.fixed.Exponents += uintptr(from / kernel.FixedBlock)
			if whole.saved != 0 {
				part.saved = whole.saved + uintptr(from*r.b.dt.Size())
			}
			if r.g.fixedEarly() {
				part.fixed.Sums = base.At(r.g.transaction.shared.Ptr, t.n)
			}
			t.parts = append(t.parts, part)
			t.n += n
			t.blocks += part.fixed.Blocks()
			from += n
		}
	}
}

// contributions is how many this rank has for a gradient.
func (r *reproducible) contributions(param int) int {
	n := r.g.gradients[param].held.n
	if r.g.lastCounts(param) {
		n++
	}
	return n
}

// contribution returns a part of one of them: those that are held come first.
func (r *reproducible) contribution(p fixedPart, number int) (ptr uintptr, dt dtype.DType, err error) {
	t := r.g.step.tensors[p.param]
	if h := &r.g.gradients[p.param].held; number < h.n {
		t = h.tensors[number]
	}
	ptr, err = t.Ptr()
	return ptr + uintptr(p.from*t.DType().Size()), t.DType(), err
}

// Select implements reducer. Contributions stay where they are.
func (r *reproducible) Select(context.Context, engine.Input) error {
	r.written = 0
	return r.storeCounts()
}

// Exchange implements reducer. The ranks agree on the exponents of a turn while they sum the one before.
func (r *reproducible) Exchange(ctx context.Context) error {
	if r.g.fixedTogether() {
		return r.sumTogether(ctx)
	}
	first := &r.turns[0]
	if err := r.raise(first); err != nil {
		return err
	}
	r.calls = append(r.calls[:0], comm.AllReduceCall(r.counts, r.counts, len(r.wholes), dtype.I32, comm.Sum))
	if err := r.exchange(ctx, nil, first); err != nil {
		return err
	}
	for i := range r.turns {
		t := &r.turns[i]
		if err := r.store(t); err != nil {
			return err
		}
		var next *turn
		if i+1 < len(r.turns) {
			next = &r.turns[i+1]
			if err := r.raise(next); err != nil {
				return err
			}
		}
		if err := r.exchange(ctx, t, next); err != nil {
			return err
		}
		if r.g.fixedEarly() {
			r.written = i + 1
			if err := r.finish(t); err != nil {
				return err
			}
		}
	}
	return nil
}

// sumTogether has the ranks share the elements of a bucket, and each make the sums of its share for all, unless all
// buckets are summed at once later on.
func (r *reproducible) sumTogether(ctx context.Context) error {
	if !r.keeps && !r.g.fixedAtOnce() { // since the last step, there is somebody to ask before it commits
		if err := r.allocate(); err != nil {
			return err
		}
		if err := r.storeCounts(); err != nil {
			return err
		}
	}
	if err := r.order.CommAfterCompute(ctx); err != nil {
		return err
	}
	if err := r.g.meter.AllReduce(r.counts, r.counts, len(r.wholes), dtype.I32, comm.Sum); err != nil {
		return err
	}
	if !r.g.fixedAtOnce() {
		var err error
		r.sums, err = r.appendSums(r.sums[:0])
		if err != nil {
			return err
		}
		if err := r.g.meter.AllReduceFixed(r.sums); err != nil {
			return err
		}
	}
	return r.order.ComputeAfterComm(ctx)
}

// sumAtOnce has the gradients of all buckets hold the results, on all ranks or, after an error, on none. A rank may
// find that the world has failed although the sums were done before: then it has the results, as the others do.
func (g *Gradients) sumAtOnce(ctx context.Context) error {
	t := g.transaction
	t.sums = t.sums[:0]
	for _, b := range g.buckets {
		var err error
		t.sums, err = b.reducer.(*reproducible).appendSums(t.sums)
		if err != nil {
			return err
		}
	}
	submitted := false // otherwise Reduced speaks of the sums of an earlier step
	err := t.order.Around(ctx, func() error {
		err := g.meter.AllReduceFixed(t.sums)
		submitted = err == nil
		return err
	})
	if submitted && g.meter.Reduced() {
		return nil
	}
	return err
}

// appendSums appends those of the gradients that have elements. It reuses what is behind the end of the list.
func (r *reproducible) appendSums(list []fixedpoint.Sum) ([]fixedpoint.Sum, error) {
	for i := range r.wholes {
		if r.wholes[i].fixed.N == 0 {
			continue
		}
		last := len(list)
		if last == cap(list) {
			list = append(list, fixedpoint.Sum{})
		}
		list = list[:last+1]
		if err := r.describe(&list[last], r.wholes[i]); err != nil {
			return list, gradientError(r.wholes[i].param, err)
		}
	}
	return list, nil
}

// describe says what this rank has of the sum of a gradient.
func (r *reproducible) describe(s *fixedpoint.Sum, whole fixedPart) error {
	*s = fixedpoint.Sum{
		N:         whole.fixed.N,
		Bits:      whole.fixed.Bits,
		Divisor:   r.g.divisor(r.g.step.total),
		DType:     r.b.dt,
		Terms:     s.Terms[:0],
		Sums:      whole.fixed.Sums,
		Exponents: whole.fixed.Exponents,
	}
	for i := range r.contributions(whole.param) {
		ptr, dt, err := r.contribution(whole, i)
		if err != nil {
			return err
		}
		s.Terms = append(s.Terms, fixedpoint.Term{Ptr: ptr, DType: dt})
	}
	if !r.g.fixedAtOnce() {
		return nil
	}
	result, err := r.target(whole)
	s.Result = result
	return err
}

// exchange makes the calls that are left to make, sums a turn, and raises the exponents of another one.
func (r *reproducible) exchange(ctx context.Context, sums, exponents *turn) error {
	if sums != nil && sums.n > 0 && len(r.inner) == 0 {
		r.calls = append(r.calls, r.sum(sums))
	}
	if exponents != nil && exponents.n > 0 {
		p := exponents.exponents()
		r.calls = append(r.calls, comm.AllReduceCall(p, p, exponents.blocks, dtype.I8, comm.Max))
	}
	if len(r.calls) > 0 {
		err := r.order.CommAfterCompute(ctx)
		if err == nil {
			err = r.g.meter.Group(r.calls...)
		}
		r.calls = r.calls[:0]
		if err != nil {
			return err
		}
		if err := r.order.ComputeAfterComm(ctx); err != nil {
			return err
		}
	}
	if sums != nil && sums.n > 0 && len(r.inner) > 0 {
		return r.sumAlong(ctx, sums)
	}
	return nil
}

// sum is the call that sums a turn: for this rank's shard, or for all that look at the norm, or have all results.
func (r *reproducible) sum(t *turn) comm.Call {
	if r.shardsSums() {
		n := r.g.fixedRoom(t.n) / r.g.meter.WorldSize()
		return comm.ReduceScatterCall(t.sums(), r.shard(), n, dtype.I32, comm.Sum)
	}
	return comm.AllReduceCall(t.sums(), t.sums(), t.n, dtype.I32, comm.Sum)
}

// shardsSums reports whether a rank has the sums of its shard alone.
func (r *reproducible) shardsSums() bool {
	cfg := &r.g.transaction.cfg
	return r.g.cfg.Shard && cfg.ClipNorm == 0 && cfg.NonFinite == engine.PassNonFinite
}

// shard is where the sums of this rank's shard are.
func (r *reproducible) shard() uintptr {
	n := r.g.fixedRoom(r.b.len()) / r.g.meter.WorldSize()
	return base.At(r.wholes[0].fixed.Sums, n*r.g.meter.Rank())
}

// sumAlong sums a turn along a mesh: within hosts each rank gets a part, which it sums between hosts. Padding has any
// numbers in it.
func (r *reproducible) sumAlong(ctx context.Context, t *turn) error {
	region := t.sums()
	n := r.g.fixedRoom(t.n)
	r.gathers = r.gathers[:0]
	for i := range r.inner {
		o := &r.inner[i]
		n /= o.C.WorldSize()
		part := base.At(region, n*o.C.Rank())
		scatter := comm.ReduceScatterCall(region, part, n, dtype.I32, comm.Sum)
		if err := along(ctx, o, scatter); err != nil {
			return err
		}
		r.gathers = append(r.gathers, comm.AllGatherCall(part, region, n, dtype.I32))
		region = part
	}
	sum := comm.AllReduceCall(region, region, n, dtype.I32, comm.Sum)
	if err := along(ctx, &r.outer, sum); err != nil {
		return err
	}
	for i, gather := range slices.Backward(r.gathers) {
		if err := along(ctx, &r.inner[i], gather); err != nil {
			return err
		}
	}
	return nil
}

// along makes a call along a dimension.
func along(ctx context.Context, o *base.Order, call comm.Call) error {
	return o.Around(ctx, func() error { return call.Make(o.C) })
}

// raise raises the exponents of a turn to those of this rank's contributions. It saves the gradients, which are in the
// cache then.
func (r *reproducible) raise(turn *turn) error {
	t := r.g.transaction
	if turn.n == 0 {
		return nil
	}
	if err := t.rt.Fill(turn.exponents(), turn.blocks, dtype.I8, math.MinInt8); err != nil {
		return err
	}
	err := r.eachContribution(turn, func(p fixedPart, _ int, ptr uintptr, dt dtype.DType) error {
		return t.kernels.RaiseExponents(p.fixed, ptr, dt)
	})
	if err != nil {
		return err
	}
	return r.eachSaved(turn, func(gradient, saved uintptr, bytes int) error {
		hostops.Copy(saved, gradient, bytes, true)
		return nil
	})
}

// eachSaved calls f with where the gradients of a turn are, and where they are saved, if they are.
func (r *reproducible) eachSaved(turn *turn, f func(gradient, saved uintptr, bytes int) error) error {
	for _, p := range turn.parts {
		if p.saved == 0 {
			continue
		}
		ptr, err := r.target(p)
		if err == nil {
			err = f(ptr, p.saved, p.fixed.N*r.b.dt.Size())
		}
		if err != nil {
			return gradientError(p.param, err)
		}
	}
	return nil
}

// restore has gradients be as before the step.
func (r *reproducible) restore() error {
	var errs []error
	for i := range r.turns[:r.written] {
		errs = append(errs, r.eachSaved(&r.turns[i], func(gradient, saved uintptr, bytes int) error {
			return r.g.transaction.rt.Copy(gradient, saved, bytes)
		}))
	}
	r.written = 0
	return errors.Join(errs...)
}

// store stores the sums of this rank's contributions.
func (r *reproducible) store(turn *turn) error {
	t := r.g.transaction
	for _, p := range turn.parts {
		if r.contributions(p.param) > 0 {
			continue
		}
		if err := t.rt.Fill(p.fixed.Sums, p.fixed.N, dtype.I32, 0); err != nil {
			return err
		}
	}
	return r.eachContribution(turn, func(p fixedPart, i int, ptr uintptr, dt dtype.DType) error {
		return t.kernels.StoreFixed(p.fixed, ptr, dt, i > 0)
	})
}

// eachContribution calls a kernel with each contribution of this rank to a part.
func (r *reproducible) eachContribution(
	t *turn, call func(p fixedPart, number int, ptr uintptr, dt dtype.DType) error,
) error {
	for _, p := range t.parts {
		for i := range r.contributions(p.param) {
			ptr, dt, err := r.contribution(p, i)
			if err == nil {
				err = call(p, i, ptr, dt)
			}
			if err != nil {
				return gradientError(p.param, err)
			}
		}
	}
	return nil
}

// finish has the gradients of a turn hold the results.
func (r *reproducible) finish(turn *turn) error {
	for _, p := range turn.parts {
		if err := r.load(p, 0); err != nil {
			return gradientError(p.param, err)
		}
	}
	return nil
}

// load stores the result of a part in the gradient.
func (r *reproducible) load(p fixedPart, factor uintptr) error {
	ptr, err := r.target(p)
	if err != nil || p.fixed.N == 0 {
		return err
	}
	return r.g.transaction.kernels.LoadFixed(ptr, r.b.dt, p.fixed, r.g.divisor(r.g.step.total), factor)
}

// target is where the result of a part belongs.
func (r *reproducible) target(p fixedPart) (uintptr, error) {
	ptr, err := r.g.step.tensors[p.param].Ptr()
	return ptr + uintptr(p.from*r.b.dt.Size()), err
}

// storeCounts stores the numbers of this rank's contributions, those of equal ones at once.
func (r *reproducible) storeCounts() error {
	for from := 0; from < len(r.wholes); {
		count := r.contributions(r.wholes[from].param)
		end := from + 1
		for end < len(r.wholes) && r.contributions(r.wholes[end].param) == count {
			end++
		}
		err := r.g.transaction.rt.Fill(base.At(r.counts, from), end-from, dtype.I32, float64(count))
		if err != nil {
			return err
		}
		from = end
	}
	return nil
}

// checkCounts refuses more contributions to a gradient than are expected.
func (r *reproducible) checkCounts() error {
	if err := r.g.transaction.rt.CopyOut(hostmem.Bytes(r.counted), r.counts); err != nil {
		return err
	}
	for i, count := range r.counted {
		if int(count) > r.g.cfg.Reproducible {
			return gradientError(r.wholes[i].param, fmt.Errorf("%w: %d contributions in a step, Config.Reproducible is %d",
				comm.ErrArgument, count, r.g.cfg.Reproducible))
		}
	}
	return nil
}

// Commit implements reducer.
func (r *reproducible) Commit(v engine.Verdict) error {
	if r.g.cfg.Shard {
		return r.commitShard(v)
	}
	for _, p := range r.wholes {
		if err := r.commit(p, v); err != nil {
			return gradientError(p.param, err)
		}
	}
	return nil
}

// commit has a gradient hold the result.
func (r *reproducible) commit(whole fixedPart, v engine.Verdict) error {
	t := r.g.transaction
	switch {
	case r.g.fixedEarly() || r.g.fixedAtOnce():
	case v == engine.Skips:
		ptr, err := r.target(whole)
		if err == nil {
			err = t.rt.Fill(ptr, whole.fixed.N, r.b.dt, 0)
		}
		if err != nil {
			return err
		}
	default:
		if err := r.load(whole, r.factor()); err != nil {
			return err
		}
	}
	return r.writeView(whole.param)
}

// factor is the address of what clips results, 0 if nothing does.
func (r *reproducible) factor() uintptr {
	if t := r.g.transaction; t.cfg.ClipNorm > 0 {
		return t.factor
	}
	return 0
}

// commitShard has this rank's shard hold the results of its parts, which begin and end within blocks.
func (r *reproducible) commitShard(v engine.Verdict) error {
	t := r.g.transaction
	shard := &r.g.shards.Buckets[r.index]
	ptr, err := shard.Tensor.Ptr()
	if err != nil {
		return err
	}
	if err := t.rt.Fill(ptr, shard.Tensor.Len(), r.b.dt, 0); err != nil || v == engine.Skips { // padding is 0
		return err
	}
	for _, p := range shard.Parts {
		whole := &r.wholes[slices.Index(r.b.params, p.Param)].fixed
		f := *whole
		f.Sums = base.At(f.Sums, p.From)
		f.Exponents += uintptr(p.From / kernel.FixedBlock)
		f.Skip = p.From % kernel.FixedBlock
		f.N = p.To - p.From
		dst := ptr + uintptr(p.Offset*r.b.dt.Size())
		if err := t.kernels.LoadFixed(dst, r.b.dt, f, r.g.divisor(r.g.step.total), r.factor()); err != nil {
			return gradientError(p.Param, err)
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

// divisor is what sums are divided by, in a step of that weight.
func (g *Gradients) divisor(weight float64) int {
	switch {
	case g.cfg.Sum:
		return 1
	case g.cfg.Weighted:
		return max(int(weight), 1) // without any weight, there are zeros
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
		if judges || t.cfg.ClipNorm > 0 {
			if err := r.square(g.divisor(g.step.total)); err != nil {
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

// square computes the squared norms of the bucket's gradients.
func (r *reproducible) square(divisor int) error {
	t := r.g.transaction
	for _, p := range r.wholes {
		if err := t.kernels.SquareFixed(p.fixed, divisor, base.At(t.squares, 2*p.param)); err != nil {
			return err
		}
	}
	return nil
}

// fixedNorm returns the norm of the last step's results, for which all ranks get the sums of all shards.
func (g *Gradients) fixedNorm(ctx context.Context) (float64, error) {
	t := g.transaction
	if g.steps == 0 || g.stats.Skipped {
		return 0, nil
	}
	for _, b := range g.buckets {
		r := b.reducer.(*reproducible)
		n := g.fixedRoom(b.len()) / g.meter.WorldSize()
		if r.shardsSums() && n > 0 {
			whole := r.wholes[0].fixed.Sums
			gather := comm.AllGatherCall(r.shard(), whole, n, dtype.I32)
			if err := along(ctx, &r.order, gather); err != nil {
				return 0, err
			}
		}
		if err := r.square(g.divisor(g.stats.Weight)); err != nil {
			return 0, err
		}
	}
	if err := t.order.HostAfterAll(ctx); err != nil {
		return 0, err
	}
	if len(t.norms) < len(g.gradients) {
		t.norms = make([]float64, len(g.gradients))
	}
	squares := t.norms[:len(g.gradients)]
	if err := t.rt.CopyOut(hostmem.Bytes(squares), t.squares); err != nil {
		return 0, err
	}
	factor := []float32{1}
	if t.cfg.ClipNorm > 0 {
		if err := t.rt.CopyOut(hostmem.Bytes(factor), t.factor); err != nil {
			return 0, err
		}
	}
	sum := 0.0
	for _, s := range squares {
		sum += s
	}
	return math.Sqrt(sum) * float64(factor[0]), nil
}

// fixedKind is the kind of a reproducible bucket's states, which are empty: no step leaves anything to the next.
var fixedKind = state.Kind{Name: "tutti-reproducible", Version: 1, Owner: "a reproducible bucket"}

func (r *reproducible) State(context.Context) ([]byte, error) {
	return state.NewEncoder(fixedKind, 0).Seal(), nil
}

func (r *reproducible) SharedState(ctx context.Context) ([]byte, error) {
	return r.State(ctx)
}

// PrepareRestore implements reducer, for any number of ranks.
func (r *reproducible) PrepareRestore(_ context.Context, states ...[]byte) (func(context.Context) error, error) {
	for i, saved := range states {
		if err := state.NewDecoder(fixedKind, saved).End(); err != nil {
			return nil, fmt.Errorf("state %d: %w", i, err)
		}
	}
	return func(context.Context) error { return nil }, nil
}

func (r *reproducible) RollBack() error {
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	return errors.Join(r.Drain(ctx), r.restore())
}

// Drain implements reducer.
func (r *reproducible) Drain(ctx context.Context) error {
	for i := range r.inner {
		if err := r.inner[i].Drain(ctx); err != nil {
			return err
		}
	}
	if err := r.outer.Drain(ctx); err != nil {
		return err
	}
	return r.order.Drain(ctx)
}

// Close implements reducer.
func (r *reproducible) Close() error {
	errs := []error{r.order.DrainToFree(), r.outer.DrainToFree()}
	for i := range r.inner {
		errs = append(errs, r.inner[i].DrainToFree())
	}
	return errors.Join(errs...)
}

func (r *reproducible) Terms() string {
	terms := fmt.Sprintf("reproducible, of %d contributions with %d bits, in turns of %d",
		r.g.cfg.Reproducible, r.wholes[0].fixed.Bits, r.g.turnLimit())
	if r.g.fixedTogether() {
		terms += ", from each other's memory"
	}
	return terms
}

// Skipped implements reducer. The host has judged the step.
func (r *reproducible) Skipped(context.Context) (bool, error) { return false, nil }

func (r *reproducible) InFlight() bool {
	return !r.g.fixedEarly()
}
func (r *reproducible) Complete(context.Context) (waited bool, _ error) {
	return false, nil
}
func (r *reproducible) ScaleResidual(float64) error {
	return nil
}
