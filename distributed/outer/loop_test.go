package outer_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// model is a rank's parameters, in Go memory.
type model struct {
	values  [][]float32
	tensors []*runtime.Tensor
}

var lengths = []int{300, 7, 1200, 40}

const total = 300 + 7 + 1200 + 40

// startValues are parameters of about 1, multiples of 2^-10: the same on all ranks.
func startValues() []float32 {
	rng := rand.New(rand.NewPCG(1, 2))
	all := make([]float32, total)
	for i := range all {
		all[i] = 1 + float32(rng.IntN(2048))/1024
	}
	return all
}

func newModel(t testing.TB, rt *cpu.Runtime) *model {
	m, rest := &model{}, startValues()
	for _, n := range lengths {
		x, err := cpu.Wrap(rt, rest[:n:n])
		require.NoError(t, err)
		m.values, m.tensors, rest = append(m.values, rest[:n:n]), append(m.tensors, x), rest[n:]
	}
	return m
}

// gradient is the gradient of a step on a rank, multiples of 2^-6 of magnitude up to 1/4.
func gradient(step, rank, parameter int) []float32 {
	rng := rand.New(rand.NewPCG(uint64(step), uint64(rank*100+parameter)))
	g := make([]float32, lengths[parameter])
	for i := range g {
		g[i] = float32(rng.IntN(33)-16) / 64
	}
	return g
}

// sgd makes a step of an inner optimizer of rate 1/4.
func (m *model) sgd(step, rank int) {
	for p, v := range m.values {
		for i, g := range gradient(step, rank, p) {
			v[i] -= g / 4
		}
	}
}

func (m *model) flat() []float32 { return slices.Concat(m.values...) }

// train makes steps on a world, and returns each rank's parameters and the hash of the common ones.
func train(t *testing.T, ranks, steps int, cfg outer.Config) (all [][]float32, hashes []uint64) {
	all, hashes = make([][]float32, ranks), make([]uint64, ranks)
	require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		m := newModel(t, rt)
		l, err := outer.New(ctx, rt, c, m.tensors, cfg)
		if err != nil {
			return err
		}
		defer l.Close()
		for step := range steps {
			m.sgd(step, c.Rank())
			if err := l.Step(ctx); err != nil {
				return err
			}
		}
		all[c.Rank()] = m.flat()
		hashes[c.Rank()], err = l.Hash(ctx)
		return err
	}))
	return all, hashes
}

// TestDiLoCoOneStep is of Douillard et al., "DiLoCo", 2023: windows of one step with plain SGD, here
// with an outer rate of 1 and no compression, are data-parallel training, bit for bit, where no sum is rounded.
func TestDiLoCoOneStep(t *testing.T) {
	const ranks, steps = 4, 20
	want := newModel(t, cpu.New())
	for step := range steps {
		for p, v := range want.values {
			sum := make([]float32, len(v))
			for rank := range ranks {
				for i, g := range gradient(step, rank, p) {
					sum[i] += g
				}
			}
			for i := range v {
				v[i] -= sum[i] / ranks / 4
			}
		}
	}
	all, hashes := train(t, ranks, steps, outer.Config{Every: 1})
	for rank := range ranks {
		assert.Equal(t, want.flat(), all[rank])
		assert.Equal(t, hashes[0], hashes[rank])
	}
}

// reference is the published algorithm in float64, with dense averages: windows of H steps,
// fragments that are sent in turn, arrive some steps later and are mixed. alive is how many
// ranks a fragment is averaged over that is sent after a step. A rank may be a host, whose ranks average
// their gradients in each step.
func reference(ranks, perHost, steps int, cfg outer.Config, cuts []int, alive func(step int) int) [][]float64 {
	start := startValues()
	n := len(start)
	common, velocity, own := make([]float64, n), make([]float64, n), make([][]float64, ranks)
	for i, x := range start {
		common[i] = float64(x)
	}
	for rank := range own {
		own[rank] = slices.Clone(common)
	}
	type flight struct {
		at   int
		from int
		mean []float64
	}
	var flying []flight
	mix := cfg.Mix
	switch {
	case mix == outer.NoMix:
		mix = 0
	case mix == 0 && cfg.Delay > 0:
		mix = 0.5
	}
	land := func(now int) {
		for len(flying) > 0 && flying[0].at <= now {
			f := flying[0]
			flying = flying[1:]
			for j, mean := range f.mean {
				i := f.from + j
				velocity[i] = cfg.Momentum*velocity[i] + mean
				move := velocity[i]
				if cfg.Nesterov {
					move = mean + cfg.Momentum*velocity[i]
				}
				common[i] -= cfg.LearningRate * move
				for rank := range own {
					own[rank][i] = mix*own[rank][i] + (1-mix)*common[i]
				}
			}
		}
	}
	F := len(cuts) - 1
	begin := 0
	for step := 1; step <= steps; step++ {
		for rank := range own {
			at := 0
			for p := range lengths {
				for r := range perHost {
					for i, g := range gradient(step-1, rank*perHost+r, p) {
						own[rank][at+i] -= float64(g) / 4 / float64(perHost)
					}
				}
				at += lengths[p]
			}
		}
		land(step)
		for f := range F {
			if step == begin+(f+1)*cfg.Every/F {
				mean := make([]float64, cuts[f+1]-cuts[f])
				for j := range mean {
					for rank := range alive(step) {
						mean[j] += (common[cuts[f]+j] - own[rank][cuts[f]+j]) / float64(alive(step))
					}
				}
				flying = append(flying, flight{step + cfg.Delay, cuts[f], mean})
				land(step)
			}
		}
		if step == begin+cfg.Every {
			begin = step
		}
	}
	return own
}

// TestDiLoCoModel is of Douillard et al., "DiLoCo", 2023, with the fragments and delays of "Streaming
// DiLoCo", 2025: all options make what a float64 model of the algorithm makes.
func TestDiLoCoModel(t *testing.T) {
	const ranks, steps = 3, 41
	for i, c := range []struct {
		cfg  outer.Config
		cuts []int
	}{
		{outer.Config{Every: 5, LearningRate: 0.7}, []int{0, total}},
		{outer.Config{Every: 5, LearningRate: 0.7, Momentum: 0.9}, []int{0, total}},
		{outer.Config{Every: 5, LearningRate: 0.7, Momentum: 0.9, Nesterov: true}, []int{0, total}},
		{outer.Config{Every: 6, LearningRate: 0.5, Delay: 4}, []int{0, total}},
		{outer.Config{Every: 6, LearningRate: 0.5, Delay: 4, Mix: outer.NoMix}, []int{0, total}},
		{outer.Config{Every: 5, LearningRate: 0.5, Mix: outer.NoMix}, []int{0, total}},
		{outer.Config{Every: 5, LearningRate: 0.5, Mix: 0.25}, []int{0, total}},
		{outer.Config{Every: 6, LearningRate: 0.5, Delay: 2, Mix: 0.5}, []int{0, total}},
		{outer.Config{Every: 7, LearningRate: 0.7, Momentum: 0.5, Nesterov: true, Fragments: 2, Delay: 3, Mix: 0.25}, []int{0, total / 2, total}},
		{outer.Config{Every: 8, LearningRate: 1, Fragments: 4}, []int{0, total / 4, total / 2, 3 * total / 4, total}},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			want := reference(ranks, 1, steps, c.cfg, c.cuts, func(int) int { return ranks })
			all, hashes := train(t, ranks, steps, c.cfg)
			for rank := range ranks {
				got := make([]float64, total)
				for i, x := range all[rank] {
					got[i] = float64(x)
				}
				assert.InDeltaSlice(t, want[rank], got, 1e-4)
				assert.Equal(t, hashes[0], hashes[rank])
			}
		})
	}
}

// TestSparseLoCoErrorFeedback is of Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
// against a float64 model: the k largest entries of residual and delta are averaged, and Decay times the other ones is
// the residual of the next round.
func TestSparseLoCoErrorFeedback(t *testing.T) {
	const ranks, rounds, k = 3, 12, 155
	draw := func(round, rank int) []float64 { // what a window changes: no two have the same magnitude
		rng := rand.New(rand.NewPCG(uint64(round), uint64(rank)))
		all := make([]float64, total)
		for i := range all {
			all[i] = float64(float32(rng.NormFloat64() / 64))
		}
		return all
	}
	for _, decay := range []float64{1, 0.95, 0.5} {
		t.Run(fmt.Sprint(decay), func(t *testing.T) {
			cfg := outer.Config{Every: 1, LearningRate: 0.7, Decay: decay,
				Reduce: ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: float64(k) / total}, DenseUpTo: -1}}
			all := make([][]float32, ranks)
			require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				rt := cpu.New()
				m := newModel(t, rt)
				l, err := outer.New(ctx, rt, c, m.tensors, cfg)
				if err != nil {
					return err
				}
				defer l.Close()
				for round := range rounds {
					at, moved := 0, draw(round, c.Rank())
					for _, v := range m.values {
						for i := range v {
							v[i] += float32(moved[at+i])
						}
						at += len(v)
					}
					if err := l.Step(ctx); err != nil {
						return err
					}
				}
				all[c.Rank()] = m.flat()
				return nil
			}))

			common, residuals := make([]float64, total), make([][]float64, ranks)
			for i, x := range startValues() {
				common[i] = float64(x)
			}
			for rank := range residuals {
				residuals[rank] = make([]float64, total)
			}
			for round := range rounds {
				mean := make([]float64, total)
				for rank, residual := range residuals {
					order := make([]int, total)
					for i, moved := range draw(round, rank) {
						order[i] = i
						residual[i] -= moved
					}
					slices.SortFunc(order, func(a, b int) int { return cmp.Compare(math.Abs(residual[b]), math.Abs(residual[a])) })
					for _, i := range order[:k] {
						mean[i] += residual[i] / ranks
						residual[i] = 0
					}
					for i := range residual {
						residual[i] *= decay
					}
				}
				for i := range common {
					common[i] -= 0.7 * mean[i]
				}
			}
			for rank := range ranks {
				got := make([]float64, total)
				for i, x := range all[rank] {
					got[i] = float64(x)
				}
				assert.InDeltaSlice(t, common, got, 1e-5)
			}
		})
	}
}

// Ranks of a host average their gradients in each step, and hosts their parameters in each window, by shares of
// them: what two hosts of two ranks do by the algorithm, with the same bits on all ranks.
func TestHosts(t *testing.T) {
	const hosts, perHost, steps = 2, 2, 41
	arrange := func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
		return distributed.NewMesh(ctx, c, distributed.Dim{Name: "host", Size: -1}, distributed.Dim{Name: "rank", Size: perHost})
	}
	for _, cfg := range []outer.Config{
		{Every: 5, LearningRate: 0.7, Momentum: 0.9, Nesterov: true},
		{Every: 7, LearningRate: 0.7, Fragments: 2, Delay: 3, Mix: 0.25, Weighted: true},
		{Every: 4, LearningRate: 1, Delay: 2, Reduce: ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1}},
	} {
		cuts := []int{0, total}
		if cfg.Fragments == 2 {
			cuts = []int{0, total / 2, total}
		}
		want := reference(hosts, perHost, steps, cfg, cuts, func(int) int { return hosts })
		cfg.Reduce.Mesh = arrange
		hashes := make([]uint64, hosts*perHost)
		require.NoError(t, local.Run(t.Context(), hosts*perHost, func(ctx context.Context, c comm.Communicator) error {
			m := newModel(t, cpu.New())
			rt := m.tensors[0].Runtime()
			mesh, err := arrange(ctx, c)
			require.NoError(t, err)
			host, err := mesh.Comm("rank")
			require.NoError(t, err)
			sync, err := ddp.New(ctx, rt, host, m.tensors, ddp.Config{})
			require.NoError(t, err)
			l, err := outer.New(ctx, rt, c, m.tensors, cfg)
			require.NoError(t, err)
			for step := range steps {
				var gradients []*runtime.Tensor
				for p := range lengths {
					g, err := runtime.FromSlice(rt, gradient(step, c.Rank(), p))
					require.NoError(t, err)
					gradients = append(gradients, g)
				}
				require.NoError(t, sync.ReduceAll(ctx, gradients))
				for p, v := range m.values {
					g, err := runtime.ToSlice[float32](gradients[p])
					require.NoError(t, err)
					for i := range v {
						v[i] -= g[i] / 4
					}
				}
				require.NoError(t, l.Step(ctx))
			}
			for i, x := range m.flat() {
				require.InDelta(t, want[c.Rank()/perHost][i], x, 1e-4, "rank %d, element %d", c.Rank(), i)
			}
			if s := l.Stats(); cfg.Momentum > 0 { // half a fragment to the other host, and as much from there
				assert.Equal(t, int64(s.Exchanges*(total+1)/2*4), s.SentBytes)
			}
			hashes[c.Rank()], err = l.Hash(ctx)
			return errors.Join(err, l.Close(), sync.Close(), mesh.Close())
		}))
		for _, h := range hashes {
			assert.Equal(t, hashes[0], h)
		}
	}
}

// A loop that is saved and made anew in the middle of windows, with fragments in flight too, makes the same bits.
func TestResumedWindows(t *testing.T) {
	const ranks, steps = 3, 60
	cfg := outer.Config{Every: 7, LearningRate: 0.7, Momentum: 0.5, Nesterov: true, Fragments: 2, Delay: 2, Mix: 0.25, Weighted: true}
	want := reference(ranks, 1, steps, cfg, []int{0, total / 2, total}, func(int) int { return ranks })
	straight, hashes := train(t, ranks, steps, cfg)
	all := make([][]float32, ranks)
	require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
		m := newModel(t, cpu.New())
		l, err := outer.New(ctx, m.tensors[0].Runtime(), c, m.tensors, cfg)
		for step := 0; step < steps && err == nil; step++ {
			if step%3 == 2 || step == 14 || step == 28 { // the last two: where a window begins
				var state []byte
				state, err = l.State(ctx)
				require.NoError(t, errors.Join(err, l.Close()))
				l, err = outer.New(ctx, m.tensors[0].Runtime(), c, m.tensors, cfg)
				require.NoError(t, err)
				require.NoError(t, l.Restore(ctx, state))
			}
			m.sgd(step, c.Rank())
			err = l.Step(ctx)
		}
		require.NoError(t, err)
		assert.Equal(t, steps/cfg.Every, l.Stats().Rounds)
		hash, err := l.Hash(ctx)
		assert.Equal(t, hashes[c.Rank()], hash)
		all[c.Rank()] = m.flat()
		return errors.Join(err, l.Close())
	}))
	assert.Equal(t, straight, all)
	for rank := range ranks {
		for i, x := range all[rank] {
			require.InDelta(t, want[rank][i], x, 1e-4, "rank %d, element %d", rank, i)
		}
	}
}

// A rank that is lost in the middle of a window: the others make the round without it, over
// another communicator, and what they had learned in the window stays.
func TestALostRank(t *testing.T) {
	const ranks, steps, lost = 3, 24, 9
	for _, cfg := range []outer.Config{
		{Every: 6, LearningRate: 0.7, Momentum: 0.9, Nesterov: true},
		{Every: 6, LearningRate: 0.7, Delay: 2, Mix: 0.5},
		{Every: 5, LearningRate: 0.7, Momentum: 0.9, Delay: 2},
	} {
		want := reference(ranks, 1, steps, cfg, []int{0, total}, func(step int) int {
			if step > lost {
				return ranks - 1
			}
			return ranks
		})
		err := local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			rest, err := c.Split(ctx, c.Rank()/2, c.Rank())
			if err != nil {
				return err
			}
			rt := cpu.New()
			m := newModel(t, rt)
			l, err := outer.New(ctx, rt, c, m.tensors, cfg)
			if err != nil {
				return err
			}
			if c.Rank() == 0 {
				defer l.Close()
			}
			for step := range steps {
				m.sgd(step, c.Rank())
				if step == lost { // where the last round has ended everywhere
					require.NoError(t, c.Barrier(ctx))
				}
				if c.Rank() == 2 && step == lost {
					return errors.Join(l.Close(), c.Close())
				}
				err := l.Step(ctx)
				if errors.Is(err, comm.ErrPeerFailed) {
					if err = l.Rebind(ctx, rest); err == nil {
						err = l.Step(ctx)
					}
				}
				if err != nil {
					return err
				}
			}
			got := make([]float64, total)
			for i, x := range m.flat() {
				got[i] = float64(x)
			}
			assert.InDeltaSlice(t, want[c.Rank()], got, 1e-4, "rank %d", c.Rank())
			return nil
		})
		if err != nil {
			assert.ErrorIs(t, err, comm.ErrPeerFailed) // of the communicator that is left
		}
	}
}

// held has waits of a communicator, and of what is split from it, held up.
type held struct {
	comm.Communicator
	hold func()
}

func (h *held) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := h.Communicator.Split(ctx, color, key)
	return &held{c, h.hold}, err
}

func (h *held) Sync(ctx context.Context) error {
	h.hold()
	return h.Communicator.Sync(ctx)
}

// A rank that is lost at the end of a round, of whose end one of the others finds out only when the next round has failed on
// the other: where BeforeCommit votes they go on, and otherwise both find out that they cannot.
func TestALostRankAtTheEnd(t *testing.T) {
	const ranks, steps, lost = 3, 24, 10
	for _, cfg := range []outer.Config{
		{Every: 4, LearningRate: 0.7, Momentum: 0.9},
		{Every: 4, LearningRate: 0.7, Delay: 2},
	} {
		want := reference(ranks, 1, steps, cfg, []int{0, total}, func(step int) int {
			if step > lost {
				return ranks - 1
			}
			return ranks
		})
		for _, votes := range []bool{true, false} {
			failed, hashes := make(chan struct{}), make([]uint64, ranks)
			err := local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				rest, err := c.Split(ctx, c.Rank()/2, c.Rank())
				require.NoError(t, err)
				var second atomic.Bool // round, on rank 0
				hold := func() {
					if second.Load() {
						select {
						case <-failed:
						case <-ctx.Done():
						}
					}
				}
				m, over := newModel(t, cpu.New()), c
				if !votes {
					over = &held{c, hold}
				}
				l, err := outer.New(ctx, m.tensors[0].Runtime(), over, m.tensors, cfg)
				require.NoError(t, err)
				if votes {
					l.BeforeCommit(func(ctx context.Context) error {
						err := c.Barrier(ctx)
						hold()
						return err
					})
				}
				for step := range steps {
					m.sgd(step, c.Rank())
					if c.Rank() == 2 && step == lost {
						return errors.Join(l.Close(), c.Close())
					}
					if c.Rank() == 0 && step+1 == 2*cfg.Every {
						second.Store(true)
					}
					err := l.Step(ctx)
					if !errors.Is(err, comm.ErrPeerFailed) {
						require.NoError(t, err)
						continue
					}
					if c.Rank() == 1 {
						close(failed)
					}
					l.BeforeCommit(nil)
					require.NoError(t, l.Rebind(ctx, rest))
					if err = l.Step(ctx); !votes {
						assert.ErrorIs(t, err, comm.ErrMismatch)
						assert.ErrorContains(t, err, fmt.Sprintf("rank 0 has \"step %d,", 2*cfg.Every+cfg.Delay-1))
						assert.ErrorContains(t, err, fmt.Sprintf("rank 1 has \"step %d,", 3*cfg.Every+cfg.Delay-1))
						return l.Close()
					}
					require.NoError(t, err)
				}
				for i, x := range m.flat() {
					require.InDelta(t, want[c.Rank()][i], x, 1e-4, "rank %d, element %d", c.Rank(), i)
				}
				hashes[c.Rank()], err = l.Hash(ctx)
				return errors.Join(err, l.Close())
			})
			if err != nil {
				assert.ErrorIs(t, err, comm.ErrPeerFailed) // of the communicator that is left
			}
			assert.Equal(t, hashes[0], hashes[1])
		}
	}
}

// faulting has the communicator that is split from it fail.
type faulting struct {
	comm.Communicator
	made *standin.Faulty
}

func (f *faulting) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := f.Communicator.Split(ctx, color, key)
	f.made = standin.NewFaulty(c)
	return f.made, err
}

// A rank fails while its fragment is being sent: in the allreduce of weights, or of the fragment. The others name it
// when the fragment is to arrive, are unchanged, and go on without it.
func TestARankThatFailsWhileItSends(t *testing.T) {
	const ranks, steps, sends, lost = 3, 24, 12, 2
	for call, cfg := range []outer.Config{
		{Every: 6, LearningRate: 0.7, Momentum: 0.9, Delay: 3},
		{Every: 6, LearningRate: 0.7, Delay: 2, Mix: 0.5, Weighted: true},
		{Every: 6, LearningRate: 0.7, Delay: 2, Weighted: true}, // its third call: the weights take two
		{Every: 6, LearningRate: 0.7, Delay: 5, Reduce: ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1}},
	} {
		want := reference(ranks, 1, steps, cfg, []int{0, total}, func(step int) int {
			if step >= sends {
				return ranks - 1
			}
			return ranks
		})
		hashes := make([]uint64, ranks)
		err := local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			rest, err := c.Split(ctx, c.Rank()/lost, c.Rank())
			require.NoError(t, err)
			m := newModel(t, cpu.New())
			f := &faulting{Communicator: c}
			l, err := outer.New(ctx, m.tensors[0].Runtime(), f, m.tensors, cfg)
			require.NoError(t, err)
			for step := range steps {
				m.sgd(step, c.Rank())
				if step+1 == sends { // where the first fragment has arrived everywhere
					require.NoError(t, c.Barrier(ctx))
				}
				if step+1 == sends && c.Rank() == lost {
					f.made.At = f.made.Calls
					if call == 2 {
						f.made.At += 2
					}
				}
				before := m.flat()
				err := l.Step(ctx)
				if step+1 != sends+cfg.Delay {
					require.NoError(t, err)
					continue
				}
				if c.Rank() == lost {
					assert.ErrorIs(t, err, standin.ErrFault)
					return errors.Join(l.Close(), c.Close())
				}
				assert.ErrorIs(t, err, comm.ErrPeerFailed)
				assert.ErrorContains(t, err, "rank 2")
				assert.Equal(t, before, m.flat())
				require.NoError(t, l.Rebind(ctx, rest))
				require.NoError(t, l.Step(ctx))
			}
			for i, x := range m.flat() {
				require.InDelta(t, want[c.Rank()][i], x, 1e-4, "configuration %d, rank %d, element %d", call, c.Rank(), i)
			}
			hashes[c.Rank()], err = l.Hash(ctx)
			return errors.Join(err, l.Close())
		})
		if err != nil {
			assert.ErrorIs(t, err, comm.ErrPeerFailed) // of the communicator that is left
		}
		assert.Equal(t, hashes[0], hashes[1])
	}
}

// A rank that is lost while a fragment is in flight: the others average what they had sent
// again, by the weights of those that are left.
func TestALostRankInFlight(t *testing.T) {
	for _, weighted := range []bool{false, true} {
		err := local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
			rest, err := c.Split(ctx, c.Rank()/2, c.Rank())
			if err != nil {
				return err
			}
			rt := cpu.New()
			v := []float32{8}
			x, err := cpu.Wrap(rt, v)
			require.NoError(t, err)
			l, err := outer.New(ctx, rt, c, []*runtime.Tensor{x}, outer.Config{Every: 4, Delay: 2, Mix: outer.NoMix, Weighted: weighted})
			require.NoError(t, err)
			fails := errors.New("the exchange fails on the ranks that are left")
			l.BeforeCommit(func(context.Context) error { return fails })
			weights, moves := []float64{1, 3, 4}, []float32{1, 3, 5}
			for step := range 5 {
				require.NoError(t, l.Weigh(weights[c.Rank()]))
				if step < 4 {
					v[0] -= moves[c.Rank()]
				}
				require.NoError(t, l.Step(ctx))
			}
			if c.Rank() == 2 {
				_, err := l.State(ctx) // the exchange has ended everywhere
				assert.ErrorIs(t, err, fails)
				return errors.Join(l.Close(), c.Close())
			}
			assert.ErrorIs(t, l.Step(ctx), fails)
			l.BeforeCommit(nil)
			require.NoError(t, l.Rebind(ctx, rest))
			require.NoError(t, l.Step(ctx))
			want := 8 - 4*(1+3)/2.0
			if weighted {
				want = 8 - 4*(1*1+3*3)/4.0
			}
			assert.InDelta(t, want, v[0], 1e-5, "weighted: %v", weighted)
			return l.Close()
		})
		if err != nil {
			assert.ErrorIs(t, err, comm.ErrPeerFailed) // of the communicator that is left
		}
	}
}

// A Rebind while a fragment is in flight, which a peer may never send, is an error at once, and changes nothing. When the exchange
// has ended, or its communicator has aborted, the loop goes on, also after a Rebind to a communicator that failed.
func TestRebindInFlight(t *testing.T) {
	for _, lost := range []bool{false, true} {
		refused := make(chan error, 2)
		rest, err := local.New(2)
		require.NoError(t, err)
		err = local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
			ctx, cancel := context.WithTimeout(ctx, time.Minute) // ends a wait that should not be
			defer cancel()
			v, move := []float32{8}, float32(1+2*c.Rank())
			x, err := cpu.Wrap(cpu.New(), v)
			require.NoError(t, err)
			l, err := outer.New(ctx, x.Runtime(), c, []*runtime.Tensor{x}, outer.Config{Every: 4, Delay: 2, Mix: outer.NoMix})
			require.NoError(t, err)
			for step := range 9 {
				if step == 7 { // the first fragment has arrived everywhere
					require.NoError(t, c.Barrier(ctx))
				}
				if step == 7 && c.Rank() == 2 {
					for range 2 {
						select {
						case <-refused:
						case <-ctx.Done():
							return ctx.Err()
						}
					}
					if lost {
						return nil
					}
				}
				if step < 8 {
					v[0] -= move
				}
				require.NoError(t, l.Step(ctx))
			}
			if c.Rank() < 2 {
				err := l.Rebind(ctx, rest[c.Rank()])
				assert.ErrorIs(t, err, comm.ErrArgument)
				assert.ErrorContains(t, err, "fragment 0 is in flight")
				refused <- err
				require.NoError(t, rest[c.Rank()].Barrier(ctx)) // neither aborts before the other was refused
			}
			if lost {
				comm.AbortAll(c, comm.ErrPeerFailed)
			} else if _, err := l.State(ctx); err != nil || c.Rank() == 2 {
				return err
			}
			closed, err := local.New(1)
			require.NoError(t, err)
			require.NoError(t, closed[0].Close())
			require.ErrorIs(t, l.Rebind(ctx, closed[0]), comm.ErrClosed)
			require.NoError(t, l.Rebind(ctx, rest[c.Rank()]))
			require.NoError(t, l.Step(ctx))
			if lost {
				assert.Equal(t, float32(8-4*(1+3+5)/3-2*(1+3)/2), v[0])
			} else {
				assert.Equal(t, float32(8-4*(1+3+5)/3-2*(1+3+5)/3), v[0])
			}
			return l.Close()
		})
		if err != nil {
			assert.ErrorIs(t, err, comm.ErrPeerFailed) // of the communicator that is left
		}
	}
}

// Where the exchange of a fragment in flight has succeeded on one rank and failed on another
// when a third is lost, both find out: none waits for the other.
func TestRanksThatFailedDifferently(t *testing.T) {
	err := local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		ctx, cancel := context.WithTimeout(ctx, time.Minute) // ends a wait that should not be
		defer cancel()
		rest, err := c.Split(ctx, c.Rank()/2, c.Rank())
		if err != nil {
			return err
		}
		rt := cpu.New()
		m := newModel(t, rt)
		l, err := outer.New(ctx, rt, c, m.tensors, outer.Config{Every: 4, Delay: 2})
		require.NoError(t, err)
		l.BeforeCommit(func(context.Context) error {
			if c.Rank() == 1 {
				return comm.ErrPeerFailed
			}
			return nil
		})
		for step := range 5 {
			m.sgd(step, c.Rank())
			require.NoError(t, l.Step(ctx))
		}
		if c.Rank() == 2 {
			_, err := l.State(ctx)
			return errors.Join(err, l.Close(), c.Close())
		}
		if _, err := l.State(ctx); c.Rank() == 1 {
			require.ErrorIs(t, err, comm.ErrPeerFailed)
		} else {
			require.NoError(t, err)
		}
		require.NoError(t, l.Rebind(ctx, rest))
		l.BeforeCommit(nil)
		m.sgd(5, c.Rank())
		err = l.Step(ctx)
		assert.ErrorIs(t, err, comm.ErrMismatch, "rank %d", c.Rank())
		assert.ErrorContains(t, err, `rank 0 has "fragment 0, sent after step 4: landed", rank 1 has "fragment 0, sent after step 4: not averaged"`)
		return l.Close()
	})
	if err != nil {
		assert.ErrorIs(t, err, comm.ErrPeerFailed) // of the communicator that is left
	}
}

// Every pattern makes the same common parameters on all ranks, and moves them about as the
// dense average does.
func TestPatterns(t *testing.T) {
	const ranks, steps = 4, 24
	for _, pattern := range sparsity.Patterns() {
		t.Run(pattern, func(t *testing.T) {
			cfg := outer.Config{Every: 4, Decay: 0.95, Momentum: 0.5, Reduce: ddp.Config{Config: sparse.Config{Pattern: pattern, Density: 0.1}, DenseUpTo: -1}}
			for _, delay := range []int{0, 3} {
				cfg.Delay = delay
				all, hashes := train(t, ranks, steps, cfg)
				for rank := range ranks {
					assert.Equal(t, hashes[0], hashes[rank])
				}
				if delay == 0 {
					assert.Equal(t, all[0], all[ranks-1])
				}
			}
		})
	}
}

// A run that is saved and restored makes the bits of the straight one: also with averages that
// have not arrived, and the run goes on with other numbers of ranks.
func TestState(t *testing.T) {
	const ranks, steps = 3, 30
	cfg := outer.Config{Every: 6, LearningRate: 0.7, Momentum: 0.9, Nesterov: true, Decay: 0.9, Fragments: 2, Delay: 2, Mix: 0.25, Weighted: true,
		Reduce: ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.05}, DenseUpTo: -1}}
	want, hashes := train(t, ranks, steps, cfg)
	for _, at := range []int{3, 4, 5, 8, 12, 13} {
		states, parameters := make([][]byte, ranks), make([][]float32, ranks)
		part := func(size, from, to int) (all [][]float32, hash []uint64) {
			all, hash = make([][]float32, size), make([]uint64, size)
			require.NoError(t, local.Run(t.Context(), size, func(ctx context.Context, c comm.Communicator) error {
				rt := cpu.New()
				m := newModel(t, rt)
				l, err := outer.New(ctx, rt, c, m.tensors, cfg)
				if err != nil {
					return err
				}
				defer l.Close()
				if from > 0 {
					var mine [][]byte
					for _, rank := range sparse.RestoreRanks(ranks, size, c.Rank()) {
						mine = append(mine, states[rank])
					}
					if err := l.Restore(ctx, mine...); err != nil {
						return err
					}
					if c.Rank() < ranks {
						rest := parameters[c.Rank()]
						for _, v := range m.values {
							rest = rest[copy(v, rest):]
						}
					} else if err := l.Adopt(); err != nil {
						return err
					}
				}
				for step := from; step < to; step++ {
					m.sgd(step, c.Rank())
					if err := l.Step(ctx); err != nil {
						return err
					}
				}
				if from == 0 {
					parameters[c.Rank()] = m.flat()
					states[c.Rank()], err = l.State(ctx)
					return err
				}
				all[c.Rank()] = m.flat()
				hash[c.Rank()], err = l.Hash(ctx)
				return err
			}))
			return all, hash
		}
		part(ranks, 0, at)
		got, gotHashes := part(ranks, at, steps)
		assert.Equal(t, want, got, "saved after %d steps", at)
		assert.Equal(t, hashes, gotHashes)
		for _, size := range []int{1, 2, 5} {
			_, gotHashes := part(size, at, steps)
			for _, h := range gotHashes {
				assert.Equal(t, gotHashes[0], h)
			}
		}
	}
}

// A state of another loop changes nothing.
func TestWrongStates(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		m := newModel(t, rt)
		l, err := outer.New(ctx, rt, c, m.tensors, outer.Config{Every: 2})
		require.NoError(t, err)
		other, err := outer.New(ctx, rt, c, m.tensors[:3], outer.Config{Every: 2})
		require.NoError(t, err)
		state, err := l.State(ctx)
		require.NoError(t, err)
		before, err := l.Hash(ctx)
		require.NoError(t, err)
		rng := rand.New(rand.NewPCG(3, 4))
		for range 200 {
			damaged := slices.Clone(state)
			damaged[rng.IntN(len(damaged))] ^= 1 << rng.IntN(8)
			assert.Error(t, l.Restore(ctx, damaged[:rng.IntN(len(damaged)+1)]))
		}
		assert.ErrorIs(t, l.Restore(ctx), comm.ErrArgument)
		foreign, err := other.State(ctx)
		require.NoError(t, err)
		assert.ErrorIs(t, l.Restore(ctx, foreign), comm.ErrMismatch)
		require.NoError(t, l.Restore(ctx, state))
		after, err := l.Hash(ctx)
		assert.Equal(t, before, after)
		require.NoError(t, errors.Join(err, l.Close(), l.Close(), other.Close()))
		assert.ErrorIs(t, l.Step(ctx), comm.ErrClosed)
		return nil
	}))
}

// An outer gradient that is not finite on one rank is skipped by all ranks, which take the common parameters; the next
// round is as any other.
func TestNonFinite(t *testing.T) {
	for _, pattern := range []string{sparse.Dense, sparse.TopkA, sparse.Oktopk} {
		for _, delay := range []int{0, 1} {
			require.NoError(t, local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
				rt := cpu.New()
				m := newModel(t, rt)
				cfg := outer.Config{Every: 2, Momentum: 0.9, Delay: delay, Reduce: ddp.Config{Config: sparse.Config{Pattern: pattern, Density: 0.1}, DenseUpTo: -1}}
				l, err := outer.New(ctx, rt, c, m.tensors, cfg)
				if err != nil {
					return err
				}
				defer l.Close()
				before, err := l.Hash(ctx)
				require.NoError(t, err)
				for step := range 2 + delay {
					m.sgd(step, c.Rank())
					if c.Rank() == 1 && step == 1 {
						m.values[2][100] = float32(math.NaN())
					}
					require.NoError(t, l.Step(ctx))
				}
				after, err := l.Hash(ctx)
				require.NoError(t, err)
				assert.Equal(t, before, after)
				assert.Equal(t, 1, l.Stats().Skipped)
				assert.Equal(t, newModel(t, rt).flat(), m.flat())
				for step := range 4 {
					m.sgd(step, c.Rank())
					require.NoError(t, l.Step(ctx))
				}
				after, err = l.Hash(ctx)
				assert.NotEqual(t, before, after)
				assert.Equal(t, 1, l.Stats().Skipped)
				return err
			}))
		}
	}
}

// Ranks count with their steps, and with what Weigh says.
func TestWeights(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		v := []float32{8, 8, 8, 8}
		x, err := cpu.Wrap(rt, v)
		require.NoError(t, err)
		l, err := outer.New(ctx, rt, c, []*runtime.Tensor{x}, outer.Config{Every: 2, Weighted: true})
		require.NoError(t, err)
		defer l.Close()
		assert.ErrorIs(t, l.Weigh(-1), comm.ErrArgument)
		assert.ErrorIs(t, l.Weigh(math.NaN()), comm.ErrArgument)
		for range 2 { // rank 0 has no data, and rank 2 three times as much as rank 1
			require.NoError(t, l.Weigh([]float64{0, 1, 3}[c.Rank()]))
			v[0] -= float32(c.Rank())
			v[1] -= 1
			require.NoError(t, l.Step(ctx))
		}
		assert.Equal(t, []float32{8 - (2*1+4*3)/4.0, 6, 8, 8}, v)
		for range 2 { // nobody has any
			require.NoError(t, l.Weigh(0))
			v[0]++
			require.NoError(t, l.Step(ctx))
		}
		assert.Equal(t, []float32{8 - (2*1+4*3)/4.0, 6, 8, 8}, v)
		return nil
	}))
}

// Parameters of 16 bits keep what their rounding loses: many small moves add up in the common
// ones.
func TestHalfPrecision(t *testing.T) {
	for _, dt := range []dtype.DType{dtype.BF16, dtype.F16} {
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			rt := cpu.New()
			x, err := runtime.New(rt, dt, 64)
			require.NoError(t, err)
			require.NoError(t, x.Fill(1))
			l, err := outer.New(ctx, rt, c, []*runtime.Tensor{x}, outer.Config{Every: 1, LearningRate: 1.0 / 64})
			require.NoError(t, err)
			defer l.Close()
			p, err := x.Ptr()
			require.NoError(t, err)
			raw, values := make([]byte, x.Bytes()), make([]float32, 64)
			read := func() {
				require.NoError(t, rt.CopyOut(raw, p))
				require.NoError(t, dtype.ToFloat32(values, raw, dt))
			}
			for range 64 { // of 2^-6 each, times the rate: less than half of what 16 bits tell apart
				read()
				for i := range values {
					values[i] -= 1.0 / 64
				}
				require.NoError(t, dtype.FromFloat32(raw, dt, values))
				require.NoError(t, rt.CopyIn(p, raw))
				require.NoError(t, l.Step(ctx))
			}
			read()
			assert.InDelta(t, 1-64*1.0/64/64, values[0], 0.004)
			return nil
		}))
	}
}

// The parameters of a rank of weight 0 do not count, whatever they are, and become the common ones.
func TestWeightZeroOfNaN(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		x, err := runtime.New(rt, dtype.F32, 4)
		require.NoError(t, err)
		require.NoError(t, x.Fill(1))
		l, err := outer.New(ctx, rt, c, []*runtime.Tensor{x}, outer.Config{Every: 1, Weighted: true})
		require.NoError(t, err)
		require.NoError(t, errors.Join(x.Fill([]float64{3, math.NaN()}[c.Rank()]), l.Weigh([]float64{5, 0}[c.Rank()]), l.Step(ctx)))
		values, err := cpu.Slice[float32](x)
		require.NoError(t, err)
		assert.Equal(t, []float32{3, 3, 3, 3}, values)
		assert.Zero(t, l.Stats().Skipped)
		return errors.Join(l.Close(), x.Free())
	}))
}

// Configurations that make no sense, and ranks that have different ones.
func TestMisuse(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		m := newModel(t, rt)
		for _, cfg := range []outer.Config{
			{}, {Every: -1}, {Every: 3, Delay: 4}, {Every: 3, Delay: -1}, {Every: 3, Fragments: 4}, {Every: 3000, Fragments: total + 1}, {Every: 4, Fragments: 2, Delay: 3},
			{Every: 1, LearningRate: -1}, {Every: 1, LearningRate: math.Inf(1)}, {Every: 1, Momentum: 1}, {Every: 1, Mix: 1}, {Every: 1, Mix: -0.5}, {Every: 1, Mix: math.NaN()}, {Every: 1, Decay: 2},
			{Every: 2, Delay: 1, Reduce: ddp.Config{Config: sparse.Config{NonFinite: sparse.PassNonFinite}}},
			{Every: 2, Delay: 1, Reduce: ddp.Config{Config: sparse.Config{NoUndo: true}}},
			{Every: 1, Reduce: ddp.Config{Sum: true}}, {Every: 1, Reduce: ddp.Config{Weighted: true}},
			{Every: 1, Reduce: ddp.Config{Config: sparse.Config{Pattern: "nothing"}}},
		} {
			_, err := outer.New(ctx, rt, c, m.tensors, cfg)
			assert.ErrorIs(t, err, comm.ErrArgument, "%+v", cfg)
		}
		_, err := outer.New(ctx, rt, c, nil, outer.Config{Every: 1})
		assert.ErrorIs(t, err, comm.ErrArgument)
		_, err = outer.New(ctx, rt, c, append(m.tensors[:1:1], m.tensors[0]), outer.Config{Every: 1})
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorContains(t, err, "parameters 0 and 1")
		double, err := runtime.New(rt, dtype.F64, 3)
		require.NoError(t, err)
		_, err = outer.New(ctx, rt, c, []*runtime.Tensor{double}, outer.Config{Every: 1})
		assert.ErrorIs(t, err, comm.ErrUnsupported)

		l, err := outer.New(ctx, rt, c, m.tensors, outer.Config{Every: 1, LearningRate: 1 / float64(1+c.Rank())})
		require.NoError(t, err)
		defer l.Close()
		err = l.Step(ctx)
		assert.ErrorIs(t, err, comm.ErrMismatch)
		assert.ErrorContains(t, err, "rate 1")
		return nil
	}))
}

// elsewhere is a communicator that reaches no memory.
type elsewhere struct{ comm.Communicator }

func (elsewhere) CheckDevice(runtime.Device) error { return comm.ErrDevice }

// A Rebind to a communicator of another device changes nothing.
func TestRebindElsewhere(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		m := newModel(t, cpu.New())
		l, err := outer.New(ctx, m.tensors[0].Runtime(), c, m.tensors, outer.Config{Every: 2})
		require.NoError(t, err)
		require.NoError(t, l.Step(ctx))
		require.ErrorIs(t, l.Rebind(ctx, elsewhere{c}), comm.ErrDevice)
		require.NoError(t, l.Step(ctx))
		assert.Equal(t, 1, l.Stats().Rounds)
		return l.Close()
	}))
}

// TestCloseStuck: memory that the communicator may still write is freed by a later Close, once it no longer writes.
func TestCloseStuck(t *testing.T) {
	unordered := errors.New("order lost")
	standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
		params := standin.Gradients(t, s, 2)
		live := s.Stats().LiveBytes
		l, err := outer.New(ctx, s, c, params, outer.Config{Every: 1})
		require.NoError(t, err)
		require.NoError(t, l.Step(ctx))
		s.OrderFails = unordered
		require.ErrorIs(t, l.Step(ctx), unordered)
		s.OrderFails, s.SyncFails = nil, comm.ErrTimeout
		for range 2 {
			require.ErrorIs(t, l.Close(), comm.ErrTimeout)
			assert.GreaterOrEqual(t, s.Stats().LiveBytes, live+2*4*200, "the common parameters and the outer gradients")
		}
		s.SyncFails = nil
		for range 2 {
			require.NoError(t, l.Close())
			assert.Equal(t, live, s.Stats().LiveBytes)
		}
		standin.Free(t, params)
	})
}

// TestAJoiningRankHasMadeNoStep: by Weighted, a rank that joins in the middle of a window counts with its own steps.
func TestAJoiningRankHasMadeNoStep(t *testing.T) {
	states := make(chan []byte, 1)
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		alone, err := c.Split(ctx, c.Rank(), 0)
		require.NoError(t, err)
		values := []float32{8, 8, 8, 8}
		x, err := cpu.Wrap(cpu.New(), values)
		require.NoError(t, err)
		l, err := outer.New(ctx, x.Runtime(), alone, []*runtime.Tensor{x}, outer.Config{Every: 4, Weighted: true})
		require.NoError(t, err)
		if c.Rank() == 1 { // its own parameters are no one's
			require.NoError(t, x.Fill(5))
		}
		for range 3 * (1 - c.Rank()) {
			values[0]--
			require.NoError(t, l.Step(ctx))
		}
		require.NoError(t, l.Rebind(ctx, c))
		if c.Rank() == 0 {
			state, err := l.SharedState(ctx)
			require.NoError(t, err)
			states <- state
		} else {
			require.NoError(t, l.Restore(ctx, <-states))
			assert.Equal(t, []float32{8, 8, 8, 8}, values, "the common parameters, of the beginning of the window")
		}
		values[0]--
		require.NoError(t, l.Step(ctx))
		assert.InDelta(t, 8-(4*4+1*1)/5.0, values[0], 1e-6, "rank %d", c.Rank())
		return errors.Join(l.Close(), alone.Close())
	}))
}

// TestWindowsDiffer: ranks find out before their first exchange that their windows differ, also where a restored window has yet to end.
func TestWindowsDiffer(t *testing.T) {
	err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		x, err := cpu.Wrap(cpu.New(), []float32{8, 8})
		require.NoError(t, err)
		loop := func(every int) *outer.Loop {
			l, err := outer.New(ctx, x.Runtime(), c, []*runtime.Tensor{x}, outer.Config{Every: every})
			require.NoError(t, err)
			return l
		}
		l := loop(2)
		require.NoError(t, l.Step(ctx))
		state, err := l.State(ctx)
		require.NoError(t, errors.Join(err, l.Close()))
		l = loop(2 + c.Rank())
		require.NoError(t, l.Restore(ctx, state))
		err = l.Step(ctx)
		assert.ErrorIs(t, err, comm.ErrMismatch)
		return err
	})
	assert.ErrorContains(t, err, "windows of")
}

// TestResidualsInFlight: residuals are there when the exchange that writes them has ended.
func TestResidualsInFlight(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		values := make([]float32, 1000)
		x, err := cpu.Wrap(cpu.New(), values)
		require.NoError(t, err)
		cfg := outer.Config{Every: 4, Delay: 2, Reduce: ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}, DenseUpTo: -1}}
		l, err := outer.New(ctx, x.Runtime(), c, []*runtime.Tensor{x}, cfg)
		require.NoError(t, err)
		for step := range 12 {
			values[step]++
			require.NoError(t, l.Step(ctx))
			list, err := l.Residuals()
			require.NoError(t, err)
			assert.Len(t, list, 1)
		}
		return l.Close()
	}))
}

// With Reduce.Reproducible, the parameters do not depend on which rank has which data, over any number of rounds and
// fragments, while a chain of sums does.
func TestReproducibleRounds(t *testing.T) {
	const ranks, steps = 5, 12
	for _, reproducible := range []int{0, 8} {
		var first uint64
		differ := false
		for turn := range ranks {
			cfg := outer.Config{Every: 4, Fragments: 2, LearningRate: 0.7, Momentum: 0.9, Nesterov: true}
			cfg.Reduce.Reproducible = reproducible
			hashes := make([]uint64, ranks) // of the common parameters
			standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				m := newModel(t, rt)
				l, err := outer.New(ctx, rt, c, m.tensors, cfg)
				require.NoError(t, err)
				for step := range steps {
					for _, v := range m.values {
						for i, x := range standin.Normal(len(v), step, (c.Rank()+turn)%ranks) {
							v[i] -= x / 3
						}
					}
					require.NoError(t, l.Step(ctx))
				}
				hashes[c.Rank()], err = l.Hash(ctx)
				require.NoError(t, err)
				err = l.Close()
				standin.Free(t, m.tensors)
				return err
			})
			for _, h := range hashes {
				assert.Equal(t, hashes[0], h)
			}
			first = cmp.Or(first, hashes[0])
			differ = differ || first != hashes[0]
		}
		assert.Equal(t, reproducible == 0, differ, "Reproducible is %d", reproducible)
	}
}

// A limit of reproducible rounds applies to the norm of the average, for any number of ranks, in any order.
func TestReproducibleRoundsClip(t *testing.T) {
	const limit = 0.5
	for _, ranks := range []int{1, 2, 5} {
		var first uint64
		for turn := range ranks {
			standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				m := newModel(t, rt)
				cfg := outer.Config{Every: 1}
				cfg.Reduce.Reproducible = 8
				cfg.Reduce.ClipNorm = limit
				l, err := outer.New(ctx, rt, c, m.tensors, cfg)
				require.NoError(t, err)
				var before [][]float32
				for _, v := range m.values {
					before = append(before, slices.Clone(v))
					for i, x := range standin.Normal(len(v), 1, (c.Rank()+turn)%ranks) {
						v[i] -= 10 * x
					}
				}
				require.NoError(t, l.Step(ctx))
				square := 0.0
				for k, v := range m.values {
					for i, x := range v {
						square += float64(x-before[k][i]) * float64(x-before[k][i])
					}
				}
				assert.InEpsilon(t, limit, math.Sqrt(square), 1e-4, "%d ranks", ranks)
				hash, err := l.Hash(ctx)
				require.NoError(t, err)
				if c.Rank() == 0 {
					first = cmp.Or(first, hash)
					assert.Equal(t, first, hash, "%d ranks, turned by %d", ranks, turn)
				}
				err = l.Close()
				standin.Free(t, m.tensors)
				return err
			})
		}
	}
}

// The averages of reproducible rounds are those of the ranks, within rounding.
func TestReproducibleRoundsAverage(t *testing.T) {
	cfg := outer.Config{Every: 3, LearningRate: 0.5, Momentum: 0.5}
	want, _ := train(t, 3, 9, cfg)
	cfg.Reduce.Reproducible = 4
	got, _ := train(t, 3, 9, cfg)
	assert.InDeltaSlice(t, want[0], got[0], 1e-5)
}

// Weighted reproducible rounds are means over what all ranks have done, and weights are whole numbers.
func TestReproducibleRoundsWeighted(t *testing.T) {
	const ranks = 3
	work := [ranks]float64{4, 0, 1}
	for turn := range ranks {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			x, err := cpu.Wrap(rt, []float32{8, 8})
			require.NoError(t, err)
			values, err := cpu.Slice[float32](x)
			require.NoError(t, err)
			cfg := outer.Config{Every: 1, Weighted: true}
			cfg.Reduce.Reproducible = ranks
			l, err := outer.New(ctx, rt, c, []*runtime.Tensor{x}, cfg)
			require.NoError(t, err)
			assert.ErrorContains(t, l.Weigh(0.5), "want a whole number with Reduce.Reproducible")
			weight := work[(c.Rank()+turn)%ranks]
			for range 2 {
				before := values[0]
				values[0] -= float32(weight)
				if weight == 0 {
					values[0] = float32(math.NaN()) // which counts for nothing
				}
				require.NoError(t, errors.Join(l.Weigh(weight), l.Step(ctx)))
				want := float64(before) - (4*4+1*1)/5.0
				assert.InDelta(t, want, values[0], 1e-6, "rank %d", c.Rank())
			}
			return errors.Join(l.Close(), x.Free())
		})
	}
}
