package distributedtest

import (
	"bytes"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// RunReducer runs what a [ddp.Reducer] promises as subtests of t, for each world size of b: the same
// bits on all ranks, and those of plain steps with overlap, accumulation, Join, weights and clipping, around
// steps that are skipped or fail at one of their collectives, and after Restore. If its residual is a
// tensor as long as the bucket, nothing may get lost: gradients and residuals of all ranks add up to
// the average times their number and the residuals that the step leaves, also after a Rebind without
// one rank, and where a state is restored on fewer ranks or more.
func RunReducer(t *testing.T, b commtest.Backend, reducer func(ddp.Bucket) (ddp.Reducer, error), opts ...Option) {
	t.Helper()
	var cases []testCase
	add := func(name string, body func(x *reduced)) {
		cases = append(cases, testCase{name, func(r *rank) {
			body(&reduced{
				rank:    r,
				top:     r,
				reducer: reducer,
			})
		}, true})
	}
	skip := sparse.Config{NonFinite: sparse.SkipNonFinite}
	fail := sparse.Config{NonFinite: sparse.FailNonFinite}
	add("Overlap", func(x *reduced) {
		x.follow(ddp.Config{}, (*reduced).overlap)
	})
	add("Accumulate", func(x *reduced) {
		x.follow(ddp.Config{}, (*reduced).accumulate)
	})
	add("Join", func(x *reduced) {
		x.follow(ddp.Config{Uneven: true}, (*reduced).plain)
	})
	add("Weighted", func(x *reduced) {
		x.follow(ddp.Config{Weighted: true}, (*reduced).weighted)
	})
	add("Clip", func(x *reduced) {
		x.follow(ddp.Config{Config: sparse.Config{ClipNorm: 1}}, (*reduced).clip)
	})
	add("Skip", func(x *reduced) {
		x.follow(ddp.Config{Config: skip}, (*reduced).afterNaN)
	})
	add("Fail", func(x *reduced) {
		x.follow(ddp.Config{Config: fail}, (*reduced).afterNaN)
	})
	add("Fault", func(x *reduced) {
		x.follow(ddp.Config{}, (*reduced).afterFaults)
	})
	add("Restore", func(x *reduced) {
		x.follow(ddp.Config{}, (*reduced).restored)
	})
	add("Worlds", (*reduced).worlds)
	runCases(t, b, cases, opts)
}

// watched is a Reducer whose calls are seen, and may fail.
type watched struct {
	ddp.Reducer
	begun chan struct{}
	calls int  // collectives of the last step
	fails int  // which of them fails, from 1; 0: none
	made  bool // it is made all the same, and in flight when Reduce returns
}

var errFault = errors.New("this collective is to fail")

func (w *watched) Reduce(ctx context.Context, b ddp.Bucket) error {
	select {
	case w.begun <- struct{}{}:
	default:
	}
	w.calls = 0
	c := b.Comm
	group := func(calls []comm.Call) error {
		w.calls++
		if w.calls == w.fails {
			if w.made {
				return errors.Join(errFault, c.Group(calls...))
			}
			return errFault
		}
		return c.Group(calls...)
	}
	b.Comm = struct {
		comm.Methods
		comm.Wrapped
	}{comm.Methods{Do: func(call comm.Call) error { return group([]comm.Call{call}) }, Together: group}, comm.Wrap(c)}
	return w.Reducer.Reduce(ctx, b)
}

// reduced is a Gradients whose buckets a Reducer reduces.
type reduced struct {
	*rank
	top       *rank // which frees the gradients
	reducer   func(ddp.Bucket) (ddp.Reducer, error)
	cfg       ddp.Config
	g         *ddp.Gradients
	params    []*runtime.Tensor
	buckets   []*watched
	residuals map[int]*runtime.Tensor // of the parameters
	kept      []float64               // residuals, added up over the ranks
}

// restart returns a Gradients over c, which goes on from states if there are some.
func (x *reduced) restart(c comm.Communicator, cfg ddp.Config, states ...[]byte) *reduced {
	o := &reduced{
		rank:      newRank(x.ctx, x.suite, commtest.Rank{Comm: c, Runtime: x.rt}),
		top:       x.top,
		reducer:   x.reducer,
		cfg:       cfg,
		residuals: map[int]*runtime.Tensor{},
	}
	n := 0
	for _, shape := range [][]int{{40, 50}, {50}, {30, 5, 4}, {7, 100}, {100}, {3}} {
		t := got(runtime.New(x.rt, dtype.F32, shape...))
		x.top.after(t.Free)
		o.params = append(o.params, t)
		n += t.Len()
	}
	cfg.ClipNorm *= math.Sqrt(float64(n * o.size)) // the norm of gradients of 1 and -1
	cfg.BucketBytes = 6000
	cfg.Reducer = func(b ddp.Bucket) (ddp.Reducer, error) {
		r, err := x.reducer(b)
		o.buckets = append(o.buckets, &watched{Reducer: r, begun: make(chan struct{}, 1)})
		if r == nil || err != nil { // the bucket is dense
			return nil, err
		}
		for _, p := range b.Parts {
			if kept := r.Memory().Residual; len(kept) == 1 && kept[0].Len() == b.Tensor.Len() {
				o.residuals[p.Param] = got(kept[0].Slice(0, p.Offset, p.Offset+o.params[p.Param].Len()))
			}
		}
		return o.buckets[len(o.buckets)-1], nil
	}
	o.g = got(ddp.New(x.ctx, x.rt, c, o.params, cfg))
	if len(states) > 0 {
		must(o.g.Restore(x.ctx, states...))
	}
	o.kept = o.sums(true)
	return o
}

// load writes gradients of 1 and -1, times a factor. The last of several ranks has none from step 2 on.
func (x *reduced) load(step int, factor float32) {
	rng := rand.New(rand.NewPCG(seed, uint64(x.rank.rank)<<32|uint64(step)))
	for _, t := range x.params {
		values := make([]float32, t.Len())
		for i := range values {
			if !x.left(step) {
				values[i] = sign(rng) * factor
			}
		}
		x.write(t, values)
	}
}

func (x *reduced) left(step int) bool {
	return step >= 2 && x.size > 1 && x.rank.rank == x.size-1
}

// bits are the bits of the gradients, which become results.
func (x *reduced) bits() (all []byte) {
	for _, t := range x.params {
		all = append(all, x.bytes(t)...)
	}
	return all
}

// sums returns the gradients or the residuals, added up over the ranks; nil if there are none.
func (x *reduced) sums(residuals bool) (all []float64) {
	for i, t := range x.params {
		if residuals {
			t = x.residuals[i]
			if t == nil {
				return nil
			}
		}
		for _, v := range x.read(t) {
			all = append(all, float64(v))
		}
	}
	x.sum(all)
	return all
}

// checked makes a plain step, checks it against what all ranks had before, and returns its bits.
func (x *reduced) checked(step int) []byte {
	x.load(step, 1)
	want := x.sums(false)
	before := x.kept
	must(x.g.ReduceAll(x.ctx, x.params))
	bits := x.bits()
	for rank, peer := range got(distributed.AllGatherBytes(x.ctx, x.rt, x.c, bits)) {
		if !bytes.Equal(bits, peer) {
			fail("step %d: results of rank %d have other bits", step, rank)
		}
	}
	results := x.sums(false)
	x.kept = x.sums(true)
	for i, kept := range x.kept {
		if lost := want[i] + before[i] - results[i] - kept; !(math.Abs(lost) <= 1e-4*float64(x.size)) {
			fail("step %d: element %d has lost %v", step, i, lost)
		}
	}
	return bits
}

// follow makes steps in a way that has the results of plain ones.
func (x *reduced) follow(cfg ddp.Config, way func(x *reduced, step int)) {
	reference := x.restart(x.c, ddp.Config{})
	o := x.restart(x.c, cfg)
	var want [4][]byte
	for step := range want {
		want[step] = reference.checked(step)
	}
	step := 0
	compare := func() error {
		if !bytes.Equal(o.bits(), want[step]) {
			fail("step %d has other bits than a plain one", step)
		}
		step++
		return nil
	}
	for step < len(want) && !(cfg.Uneven && x.left(step)) {
		way(o, step)
		must(compare())
	}
	if cfg.Uneven {
		must(o.g.Join(x.ctx, o.params, compare))
	}
	must(o.g.Close(), reference.g.Close())
}

func (x *reduced) plain(step int) {
	x.scaled(step, 1)
}

// weighted has means over samples, of which all ranks have as many.
func (x *reduced) weighted(step int) {
	must(x.g.Weigh(float64(3 + step)))
	x.plain(step)
}

func (x *reduced) clip(step int) {
	x.scaled(step, 2)
}

func (x *reduced) scaled(step int, factor float32) {
	x.load(step, factor)
	must(x.g.ReduceAll(x.ctx, x.params))
}

// overlap has each bucket reduced before the gradients of the next are there.
func (x *reduced) overlap(step int) {
	x.load(step, 1)
	for b, params := range x.g.Buckets() {
		for _, i := range params {
			must(x.g.Ready(x.ctx, i, x.params[i]))
		}
		if x.buckets[b].Reducer == nil {
			continue
		}
		select {
		case <-x.buckets[b].begun:
		case <-x.ctx.Done():
			fail("bucket %d is not reduced before Wait", b)
		}
	}
	must(x.g.Wait(x.ctx))
}

func (x *reduced) accumulate(step int) {
	x.load(step, 0.5)
	for i, t := range x.params {
		must(x.g.Accumulate(i, t))
	}
	must(x.g.ReduceAll(x.ctx, x.params))
}

// afterNaN makes each step after one in which one rank has a gradient that is not finite.
func (x *reduced) afterNaN(step int) {
	x.load(step, 1)
	if x.rank.rank == x.size-1 {
		x.write(x.params[0], append(make([]float32, x.params[0].Len()-1), float32(math.NaN())))
	}
	given := x.bits()
	err := x.g.ReduceAll(x.ctx, x.params)
	undone := bytes.Equal(given, x.bits())
	skipped := got(x.g.Stats(x.ctx)).Skipped
	skips := x.cfg.NonFinite == sparse.SkipNonFinite
	refused := errors.Is(err, sparse.ErrNonFinite)
	if skipped != skips || undone == skips || refused == skips {
		fail("step %d: not finite, but skipped is %v, rolled back %v: %w", step, skipped, undone, err)
	}
	x.plain(step)
}

// afterFaults makes each step but the first after it has failed at each of its collectives, and behind each.
func (x *reduced) afterFaults(step int) {
	for bucket, w := range x.buckets {
		for i := range 2 * w.calls {
			call := i / 2
			x.load(step, 1)
			given := x.bits()
			w.fails = call + 1
			w.made = i%2 == 1
			err := x.g.ReduceAll(x.ctx, x.params)
			w.fails = 0
			if !errors.Is(err, errFault) || !bytes.Equal(given, x.bits()) {
				fail("collective %d of bucket %d failed, and gradients have changed or the error is %w", call, bucket, err)
			}
		}
	}
	x.plain(step)
}

func (x *reduced) restored(step int) {
	state := got(x.g.State(x.ctx))
	must(x.g.Close())
	*x = *x.restart(x.c, x.cfg, state)
	x.plain(step)
}

// worlds restores states of all ranks on one less, and of these on all, and rebinds without the last
// one after a fault.
func (x *reduced) worlds() {
	if x.size == 1 {
		return
	}
	lost := x.rank.rank == x.size-1
	survivors := got(x.c.Split(x.ctx, map[bool]int{lost: 1}[true], x.rank.rank))
	move := func(state []byte, saved int, c comm.Communicator, kept []float64) *reduced {
		var states [][]byte
		all := got(distributed.AllGatherBytes(x.ctx, x.rt, x.c, state))
		if c == nil {
			return nil
		}
		for _, rank := range sparse.RestoreRanks(saved, c.WorldSize(), c.Rank()) {
			states = append(states, all[rank])
		}
		o := x.restart(c, ddp.Config{}, states...)
		for i := range kept {
			if math.Abs(o.kept[i]-kept[i]) > 1e-4 {
				fail("residuals of %d ranks, restored on %d: element %d has %v, want %v",
					saved, c.WorldSize(), i, o.kept[i], kept[i])
			}
		}
		return o
	}
	all := x.restart(x.c, ddp.Config{})
	all.checked(0)
	all.checked(1)
	var kept []float64
	var state []byte
	if lost {
		move(got(all.g.State(x.ctx)), x.size, nil, nil)
	} else {
		fewer := move(got(all.g.State(x.ctx)), x.size, survivors, all.kept)
		fewer.checked(2)
		kept = fewer.kept
		state = got(fewer.g.State(x.ctx))
		must(fewer.g.Close())
	}
	grown := move(state, x.size-1, x.c, kept)
	grown.checked(3)
	must(grown.g.Close())

	all.load(2, 1)
	for _, w := range all.buckets {
		w.fails = 1
	}
	if err := all.g.ReduceAll(x.ctx, all.params); !errors.Is(err, errFault) {
		fail("a collective failed, the error is %w", err)
	}
	for _, w := range all.buckets {
		w.fails = 0
	}
	if !lost {
		must(all.g.Rebind(x.ctx, survivors))
		all.rank = newRank(x.ctx, x.suite, commtest.Rank{Comm: survivors, Runtime: x.rt})
		all.kept = all.sums(true)
		all.checked(2)
	}
	must(all.g.Close())
}
