//go:build simulated

package simulation

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/sim"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// trainer makes the steps of a rank.
type trainer interface {
	// step makes one step or none, and fails if a step is half done. input is the gradient, or the change of
	// parameters by the rank's optimizer.
	step(ctx context.Context, input [][]float32) error
	// state returns the rank's own state, and the state shared with the other ranks.
	state() (own []float32, shared []float32)
	Rebind(ctx context.Context, c comm.Communicator) error
	Close() error
}

// lengths are the lengths of the trained tensors.
var lengths = []int{40, 7, 1, 24}

// training is one program that is run twice: without faults, and with one.
type training struct {
	*play
	size, steps int
	wired       bool   // ranks are connected by a wire, not by memory
	pattern     string // in another world, thresholds and partitions of some patterns start anew
	make        func(ctx context.Context, rank int, c comm.Communicator) (trainer, error)
}

// history is the state of the ranks after each number of steps.
type history [][][]float32

// world connects the ranks.
func (t *training) world(nodes []*sim.Node) (world []comm.Communicator) {
	if !t.wired {
		return must(local.New(t.size))
	}
	links := newLinks(t.play, nodes)
	for rank := range t.size {
		world = append(world, links.join(rank))
	}
	return world
}

// run runs the program. If expected is not nil, a rank fails, and the state after each step must be the expected one:
// before the fault, and after all ranks have repeated the step in another world.
func (t *training) run(expected history) (all history) {
	nodes := slices.Repeat([]*sim.Node{t.NewNode("all")}, t.size)
	world, trainers, done := t.world(nodes), make([]trainer, t.size), make([]int, t.size)
	if all = expected; all == nil {
		all = make(history, t.size)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	victim, cancels := t.IntN(t.size), t.Chance(3)
	theirs, stop := context.WithCancel(ctx)
	defer stop()
	if kind := t.IntN(4); expected != nil {
		sim.AfterFunc(t.Between(0, time.Millisecond<<t.IntN(6)), func() {
			switch t.Event("fault of rank %d, cancels: %v", victim, cancels); {
			case cancels:
				stop()
			case kind == 0:
				_ = world[victim].Close()
			default:
				world[victim].Abort(errors.New("a rank has had enough"))
			}
		})
	}
	errs, anew := make([]error, t.size), false
	part := func(rank int) {
		ctx := ctx
		if cancels && rank == victim && expected != nil && errs[rank] == nil {
			ctx = theirs
		}
		errs[rank] = func() (err error) {
			if trainers[rank] == nil {
				trainers[rank], err = t.make(ctx, rank, world[rank])
			} else {
				err = trainers[rank].Rebind(ctx, world[rank])
			}
			for err == nil && done[rank] < t.steps {
				var input [][]float32
				for i, n := range lengths {
					x := make([]float32, n)
					for k := range x {
						x[k] = float32(value(t.Seed, done[rank], rank, i<<16|k))
					}
					input = append(input, x)
				}
				if err = trainers[rank].step(ctx, input); err == nil {
					done[rank]++
				}
				if err == nil && expected == nil {
					own, _ := trainers[rank].state()
					all[rank] = append(all[rank], own)
				}
				if n := done[rank]; expected != nil && err == nil && !anew {
					if own, _ := trainers[rank].state(); !equal(own, all[rank][n-1]) {
						t.fail("rank %d after %d steps: %v, expected %v", rank, n, own, all[rank][n-1])
					}
				}
			}
			return err
		}()
		t.Event("%d steps: %v", done[rank], errs[rank])
		if errs[rank] != nil {
			_ = comm.CloseAll(world[rank], errs[rank])
		}
	}
	t.together(nodes, part)
	broken := slices.ContainsFunc(errs, func(err error) bool { return err != nil })
	for rank, err := range errs {
		switch {
		case err == nil:
		case expected == nil:
			t.fail("rank %d failed, though nothing went wrong: %v", rank, err)
		case errors.Is(err, comm.ErrTimeout):
			t.fail("rank %d: nothing but the deadline has ended the wait: %v", rank, err)
		case strings.Contains(err.Error(), "it left"): // perhaps because another rank had left
		case rank != victim && !names(err, victim) && !strings.Contains(err.Error(), "has had enough"):
			t.fail("rank %d: the error does not name rank %d: %v", rank, victim, err)
		}
	}
	if broken && slices.Min(done) == slices.Max(done) && !slices.Contains(trainers, nil) { // all ranks have the same steps
		t.Event("all begin again with step %d", done[0])
		for _, c := range world {
			_ = comm.CloseAll(c, errors.New("this world is over"))
		}
		world = t.world(nodes)
		cancels, anew = false, !slices.Contains([]string{sparse.Dense, sparse.TopkA, sparse.TopkA2, sparse.Gtopk, sparse.Chunked}, t.pattern)
		if t.together(nodes, part); slices.ContainsFunc(errs, func(err error) bool { return err != nil }) {
			t.fail("in another world: %v", errs)
		}
		broken = false
	}
	if !broken {
		var first []float32
		for rank, r := range trainers {
			_, shared := r.state()
			if first == nil {
				first = shared
			}
			if !equal(shared, first) {
				t.fail("rank %d has %v, and rank 0 %v", rank, shared, first)
			}
		}
	}
	t.together(nodes, func(rank int) {
		t.within(10*time.Second, fmt.Sprintf("rank %d: Close", rank), func() {
			if trainers[rank] == nil {
				return
			}
			if err := trainers[rank].Close(); err != nil && !broken {
				t.fail("rank %d: %v", rank, err)
			}
			_ = comm.CloseAll(world[rank], nil)
			_ = trainers[rank].Close()
		})
	})
	return all
}

// equal compares bits.
func equal(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

// reduction chooses a configuration that averages gradients.
func (p *play) reduction() sparse.Config {
	names := sparsity.Patterns()
	c := sparse.Config{Pattern: names[p.IntN(len(names))], Density: 0.1}
	if p.Chance(3) {
		c.Values = []string{"i8", "bf16"}[p.IntN(2)]
	}
	p.Event("%s %s", c.Pattern, c.Values)
	return c
}

// training plays a program.
func (p *play) training(size, steps int, pattern string, f func(ctx context.Context, rank int, c comm.Communicator) (trainer, error)) {
	t := &training{p, size, steps, p.Chance(2), pattern, f}
	t.run(t.run(nil))
}

// gradients is a rank that uses ddp.
type gradients struct {
	*ddp.Gradients
	p       *play
	tensors []*runtime.Tensor
	values  [][]float32
	order   []int // order in which gradients become ready

	weighted bool // gradients are weighted by numbers of samples
	plain    bool // steps are no transactions
}

// playDDP averages gradients that become ready in any order.
func playDDP(p *play) {
	size := 2 + p.IntN(3)
	cfg := ddp.Config{BucketBytes: []int{8, 100}[p.IntN(2)], Config: p.reduction(), DenseUpTo: []int{-1, 7}[p.IntN(2)]}
	if p.Chance(4) {
		cfg.ClipNorm = 100
	}
	cfg.Uneven = p.Chance(6)
	cfg.Weighted = sim.Mix(p.Seed, 1)%3 == 0
	shuffled := p.Chance(2)
	plain := cfg.Pattern == sparse.Dense && cfg.Values == "" && cfg.ClipNorm == 0
	p.training(size, 4, cfg.Pattern, func(ctx context.Context, rank int, c comm.Communicator) (trainer, error) {
		g, rt := &gradients{p: p, weighted: cfg.Weighted, plain: plain}, cpu.New()
		for i, n := range lengths {
			g.values = append(g.values, make([]float32, n))
			g.tensors, g.order = append(g.tensors, must(cpu.Wrap(rt, g.values[i]))), append(g.order, i)
		}
		if r := sim.Random(sim.Mix(p.Seed, uint64(rank))); shuffled {
			for i := range g.order {
				k := r.IntN(i + 1)
				g.order[i], g.order[k] = g.order[k], g.order[i]
			}
		}
		var err error
		g.Gradients, err = ddp.New(ctx, rt, c, g.tensors, cfg)
		if err != nil {
			return nil, err
		}
		return g, nil
	})
}

func (g *gradients) step(ctx context.Context, input [][]float32) (err error) {
	before, _ := g.state()
	was := make([][]float32, len(g.values))
	for i, x := range input {
		was[i] = slices.Clone(g.values[i])
		copy(g.values[i], x)
	}
	if g.weighted {
		samples := math.Float32bits(input[0][0]) % 3 // of the rank in this step
		if err := g.Weigh(float64(samples)); err != nil {
			return err
		}
	}
	for _, i := range g.order {
		if err = g.Ready(ctx, i, g.tensors[i]); err != nil {
			break
		}
		sim.Point()
	}
	if ended := g.Wait(ctx); err == nil {
		err = ended
	}
	if err == nil || g.plain {
		return err
	}
	for i, x := range input { // the inputs, and the values before
		if !equal(g.values[i], x) {
			g.p.fail("gradient %d of a step that failed is %v, and was %v: %v", i, g.values[i], x, err)
		}
		copy(g.values[i], was[i])
	}
	if after, _ := g.state(); !equal(before, after) {
		g.p.fail("a step that failed has changed residuals: %v, %v: %v", before, after, err)
	}
	return err
}

func (g *gradients) state() (own, shared []float32) {
	for _, v := range g.values {
		shared = append(shared, v...)
	}
	own = slices.Clone(shared)
	for _, r := range must(g.Residuals()) {
		own = append(own, must(cpu.Slice[float32](r))...)
	}
	return own, shared
}

// windows is a rank that uses an outer loop.
type windows struct {
	*outer.Loop
	p          *play
	values     [][]float32
	exchanging bool // in the steps between
	moved      bool // for a failed step
}

// playOuter averages parameters after windows of steps.
func playOuter(p *play) {
	size := 2 + p.IntN(3)
	cfg := outer.Config{Every: 2 + p.IntN(3), Reduce: ddp.Config{Config: p.reduction(), DenseUpTo: -1}, Fragments: 1 + p.IntN(2),
		Momentum: []float64{0, 0.5}[p.IntN(2)], Weighted: p.Chance(3)}
	cfg.Nesterov = cfg.Momentum > 0 && p.Chance(2)
	if p.Chance(2) {
		cfg.Delay, cfg.Mix = 1, []float64{0, 0.5}[p.IntN(2)]
	}
	if p.Chance(3) {
		cfg.Decay = 0.5
	}
	p.training(size, 9, cfg.Reduce.Pattern, func(ctx context.Context, rank int, c comm.Communicator) (trainer, error) {
		w := &windows{p: p, exchanging: cfg.Delay > 0}
		rt := cpu.New()
		var params []*runtime.Tensor
		for _, n := range lengths {
			w.values = append(w.values, make([]float32, n))
			params = append(params, must(cpu.Wrap(rt, w.values[len(w.values)-1])))
		}
		var err error
		w.Loop, err = outer.New(ctx, rt, c, params, cfg)
		if err != nil {
			return nil, err
		}
		return w, nil
	})
}

func (w *windows) step(ctx context.Context, input [][]float32) error {
	for i, x := range input {
		for k := 0; k < len(x) && !w.moved; k++ {
			w.values[i][k] += x[k]
		}
	}
	moved := slices.Concat(w.values...)
	err := w.Step(ctx)
	if w.moved = err != nil; err == nil {
		return nil
	}
	if now := slices.Concat(w.values...); !w.exchanging && !equal(now, moved) {
		w.p.fail("a step that failed has changed parameters: %v, expected %v: %v", now, moved, err)
	}
	return err
}

func (w *windows) state() (own, shared []float32) {
	hash := must(w.Hash(context.Background()))
	shared = []float32{float32(hash & 0xffffff), float32(hash >> 24 & 0xffffff), float32(hash >> 48)}
	own = append(slices.Concat(w.values...), shared...)
	if !w.exchanging { // Residuals waits for exchanges
		for _, r := range must(w.Residuals()) {
			own = append(own, must(cpu.Slice[float32](r))...)
		}
	}
	return own, shared
}
