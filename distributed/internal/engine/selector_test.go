package engine_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// randomK selects one of each of k equal parts, at random.
type randomK struct{ seed uint64 }

func (r randomK) String() string { return fmt.Sprintf("random-k with seed %d", r.seed) }

func (r randomK) Select(step int, sum, indices, values *runtime.Tensor) error {
	from, wrong := cpu.Slice[float32](sum)
	numbers, failed := cpu.Slice[int32](indices)
	entries, err := cpu.Slice[float32](values)
	r.draw(step, from, numbers, entries)
	return errors.Join(wrong, failed, err)
}

func (r randomK) draw(step int, from []float32, indices []int32, values []float32) {
	random := rand.New(rand.NewPCG(r.seed, uint64(step)))
	for i := range indices {
		first, end := i*len(from)/len(indices), (i+1)*len(from)/len(indices)
		indices[i] = int32(first + random.IntN(end-first))
		values[i] = from[indices[i]]
	}
}

// Random entries are selected instead of the largest ones, and combined as by gtopk.
func ExampleSelector() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		s, err := engine.New(rt, c, 8, engine.Config{Pattern: sparsity.Gtopk, Density: 0.25, Selector: randomK{seed: 1}})
		if err != nil {
			return err
		}
		defer s.Close()
		gradient, err := cpu.Wrap(rt, []float32{1, 2, 3, 4, 5, 6, 7, 8})
		if err != nil {
			return err
		}
		defer gradient.Free()
		if err := s.AllReduce(ctx, gradient); err != nil {
			return err
		}
		if c.Rank() == 0 {
			fmt.Println(runtime.ToSlice[float32](gradient))
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// [0 0 0 4 0 0 7 0] <nil>
}

// onHostMemory is a [engine.Selector] for runtimes with streams on the CPU.
type onHostMemory struct{ randomK }

func (o onHostMemory) Select(step int, sum, indices, values *runtime.Tensor) error {
	from := hostmem.Slice[float32](standin.Pointer(sum), sum.Len())
	numbers := hostmem.Slice[int32](standin.Pointer(indices), indices.Len())
	entries := hostmem.Slice[float32](standin.Pointer(values), values.Len())
	o.draw(step, from, numbers, entries)
	return nil
}

// TestSelectorSuite runs the suite with a Selector: with TUTTI_EXTENDED set all of it, otherwise most of it with 3 ranks,
// and little with others. Where the library selects, gaussiank and its kin differ from other patterns: here, codecs and
// large tensors are left to these.
func TestSelectorSuite(t *testing.T) {
	some := distributedtest.Cases(func(ranks int, name string) bool {
		pattern, kind, _ := strings.Cut(name, "/")
		long := kind == "Values" || kind == "Large"
		common := ranks == 3 && !(long && strings.HasPrefix(pattern, sparsity.Gaussiank))
		return standin.Extended || common || slices.Contains([]string{"Conservation", "Schedule", "Entries"}, kind)
	})
	t.Run("host", func(t *testing.T) { distributedtest.RunSelector(t, standin.Backend(t, 1, 3), randomK{1}, some) })
	rt := standin.NewOnStream(cpu.New())
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	t.Run("streams", func(t *testing.T) {
		distributedtest.RunSelector(t, commtest.Backend{Sizes: []int{2},
			Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
				return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
					return body(ctx, commtest.Rank{Comm: standin.NewOrdered(ctx, c), Runtime: rt})
				})
			}}, onHostMemory{randomK{1}}, some)
	})
}

// failingSelector is a Selector that fails in a step, once, after it has written.
type failingSelector struct {
	randomK
	armed bool
}

func (f *failingSelector) Select(step int, sum, indices, values *runtime.Tensor) error {
	err := f.randomK.Select(step, sum, indices, values)
	if f.armed {
		f.armed = false
		return standin.ErrFault
	}
	return err
}

// byMagnitude selects as topkA does.
type byMagnitude struct{}

func (byMagnitude) String() string { return "largest" }

func (byMagnitude) Select(_ int, sum, indices, values *runtime.Tensor) error {
	from, wrong := cpu.Slice[float32](sum)
	numbers, failed := cpu.Slice[int32](indices)
	entries, err := cpu.Slice[float32](values)
	order := make([]int32, len(from))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortStableFunc(order, func(a, b int32) int {
		return cmp.Compare(math.Abs(float64(from[b])), math.Abs(float64(from[a])))
	})
	copy(numbers, order)
	slices.Sort(numbers)
	for i, at := range numbers {
		entries[i] = from[at]
	}
	return errors.Join(wrong, failed, err)
}

// A program's selection has the bits of a pattern that selects the same: the residual, momentum, states and rolled
// back steps are the library's.
func TestSelectorHasTheBitsOfItsPattern(t *testing.T) {
	const ranks, n, steps = 3, 500, 6
	for _, pattern := range []string{sparsity.TopkA, sparsity.TopkA2, sparsity.Gtopk} { // exact ones
		run := func(selector engine.Selector) [][]uint64 {
			all := make([][]uint64, ranks)
			cfg := engine.Config{Pattern: pattern, Density: 0.1, Momentum: 0.9, Selector: selector}
			standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				u, err := standin.NewTrainee(rt, c, cfg, n)
				for step := 0; err == nil && step < steps; step++ {
					g := u.Gradient(step)
					if step == 2 && c.Rank() == 1 {
						g[n-1] = float32(math.Inf(1))
					}
					if step == 4 {
						state, failed := u.S.State(ctx)
						require.NoError(t, errors.Join(failed, u.Close()))
						u, err = standin.NewTrainee(rt, c, cfg, n)
						require.NoError(t, errors.Join(err, u.S.Restore(ctx, state)))
					}
					err = errors.Join(runtime.CopyIn(u.T, g), u.S.AllReduce(ctx, u.T))
					all[c.Rank()] = append(all[c.Rank()], standin.Digest(standin.Bits(u.T), u.State()))
				}
				return errors.Join(err, u.Close())
			})
			return all
		}
		assert.Equal(t, run(nil), run(byMagnitude{}), pattern)
	}
}

// A Selector that fails has its step rolled back, and it is made again with the same entries; one of
// other settings is a mismatch between ranks, and in a state.
func TestSelectorFailsAndDiffers(t *testing.T) {
	const n = 500
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f := &failingSelector{randomK: randomK{1}}
		cfg := engine.Config{Pattern: sparsity.Oktopk, Density: 0.1, Selector: f}
		u, err := standin.NewTrainee(rt, c, cfg, n)
		require.NoError(t, errors.Join(err, u.Step(ctx, 0), u.Load(1)))
		given, before := standin.Bits(u.T), u.State()
		state, err := u.S.State(ctx)
		require.NoError(t, err)
		f.armed = true
		assert.ErrorIs(t, u.S.AllReduce(ctx, u.T), standin.ErrFault)
		standin.SameBits(t, given, standin.Bits(u.T))
		standin.SameBits(t, before, u.State())
		require.NoError(t, u.S.AllReduce(ctx, u.T))
		stats, err := u.S.Stats(ctx)
		assert.NoError(t, err)
		assert.Equal(t, 50, stats.SelectedLocal)
		assert.Zero(t, stats.Threshold)

		cfg.Selector = randomK{2}
		other, err := standin.NewTrainee(rt, c, cfg, n)
		require.NoError(t, err)
		assert.ErrorIs(t, other.S.Restore(ctx, state), comm.ErrMismatch)
		cfg.Selector = randomK{uint64(c.Rank())}
		apart, err := standin.NewTrainee(rt, c, cfg, n)
		require.NoError(t, err)
		assert.ErrorContains(t, apart.Step(ctx, 0), "Selector random-k with seed")
		cfg.Pattern = sparsity.Dense
		_, err = engine.New(rt, c, n, cfg)
		assert.ErrorIs(t, err, comm.ErrArgument)
		return errors.Join(u.Close(), other.Close(), apart.Close())
	})
}
