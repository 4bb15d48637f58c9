package sparse_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// meshOf makes a mesh whose dimensions are named "0", "1", ….
func meshOf(ctx context.Context, c comm.Communicator, sizes ...int) (*distributed.Mesh, error) {
	var dims []distributed.Dim
	for i, size := range sizes {
		dims = append(dims, distributed.Dim{Name: fmt.Sprint(i), Size: size})
	}
	return distributed.NewMesh(ctx, c, dims...)
}

// levelStep is what a step did on one rank.
type levelStep struct {
	gradient, result, residual []float32 // of the share, and what it was before
	before                     []float32
	from, to                   int
	stats                      sparse.Stats
}

// runLevels makes steps on every rank of a mesh and returns what they did, by step
// and rank.
func runLevels(t *testing.T, sizes []int, n, steps int, cfg sparse.Config, dims ...string) [][]levelStep {
	t.Helper()
	ranks := 1
	for _, size := range sizes {
		ranks *= size
	}
	all := make([][]levelStep, steps)
	for i := range all {
		all[i] = make([]levelStep, ranks)
	}
	b := standin.Backend(t, ranks)
	require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		mesh, err := meshOf(ctx, r.Comm, sizes...)
		if err != nil {
			return err
		}
		defer mesh.Close()
		l, err := sparse.NewHierarchical(r.Runtime, mesh, n, cfg, dims...)
		if err != nil {
			return err
		}
		tensor, err := runtime.New(r.Runtime, dtype.F32, n)
		if err != nil {
			return err
		}
		residual := func() ([]float32, error) {
			t, err := l.Residual()
			if errors.Is(err, comm.ErrUnsupported) {
				from, to := l.Share()
				return make([]float32, to-from), nil
			}
			if err != nil {
				return nil, err
			}
			return runtime.ToSlice[float32](t)
		}
		for step := range steps {
			s := levelStep{gradient: standin.Normal(n, r.Comm.Rank(), step)}
			s.from, s.to = l.Share()
			var errs [5]error
			s.before, errs[0] = residual()
			errs[1] = runtime.CopyIn(tensor, s.gradient)
			if err := errors.Join(errs[:]...); err != nil {
				return err
			}
			if err := l.AllReduce(ctx, tensor); err != nil {
				return err
			}
			s.result, errs[2] = runtime.ToSlice[float32](tensor)
			s.residual, errs[3] = residual()
			s.stats, errs[4] = l.Stats(ctx)
			if err := errors.Join(errs[:]...); err != nil {
				return err
			}
			all[step][r.Comm.Rank()] = s
		}
		return errors.Join(l.Close(), l.Close(), tensor.Free())
	}))
	return all
}

// checkLevels checks a step of ranks that average with each other: they have the
// same bits, the same share in equally many ranks, and nothing gets lost.
func checkLevels(t *testing.T, ranks []levelStep, hosts int) {
	t.Helper()
	n := len(ranks[0].gradient)
	in, out, size := make([]float64, n), make([]float64, n), make([]float64, n)
	perHost, owners := len(ranks)/hosts, make([]int, n)
	for _, r := range ranks {
		require.Equal(t, hostmem.Bytes(ranks[0].result), hostmem.Bytes(r.result), "the same bits on every rank")
		for i, g := range r.gradient {
			in[i] += float64(g) / float64(perHost)
			size[i] += math.Abs(float64(g)) / float64(perHost)
		}
		require.Len(t, r.residual, r.to-r.from)
		for i := range r.residual {
			owners[r.from+i]++
			in[r.from+i] += float64(r.before[i])
			size[r.from+i] += math.Abs(float64(r.before[i])) + math.Abs(float64(r.residual[i]))
			out[r.from+i] += float64(r.residual[i])
		}
	}
	for i := range n {
		out[i] += float64(hosts) * float64(ranks[0].result[i])
		if owners[i] != hosts {
			t.Fatalf("element %d is in the shares of %d ranks, want one per host", i, owners[i])
		}
		if tolerance := float64(4*len(ranks))*0x1p-24*size[i] + 1e-30; !(math.Abs(in[i]-out[i]) <= tolerance) {
			t.Fatalf("element %d: %v went in, and %v came out, tolerance %v", i, in[i], out[i], tolerance)
		}
	}
}

func TestLevels(t *testing.T) {
	for _, sizes := range [][]int{{1}, {3}, {1, 1}, {1, 4}, {4, 1}, {2, 2}, {2, 3}, {3, 2}, {2, 2, 2}, {2, 1, 3}, {1, 3, 2}} {
		for _, n := range []int{0, 1, 5, 1000, 2003} {
			for _, pattern := range sparse.Patterns() {
				t.Run(fmt.Sprintf("%v, n=%d, %s", sizes, n, pattern), func(t *testing.T) {
					cfg := sparse.Config{Pattern: pattern, Density: 0.05}
					for _, ranks := range runLevels(t, sizes, n, 3, cfg) {
						checkLevels(t, ranks, sizes[0])
					}
				})
			}
		}
	}
}

// What rounding loses between hosts is in the residual of the rank that rounded, whatever the pattern.
func TestLevelsOfRoundedValues(t *testing.T) {
	const n = 2003
	for _, sizes := range [][]int{{1, 2}, {2, 2}, {3, 2}, {2, 1, 2}} {
		for _, pattern := range sparse.Patterns() {
			for _, values := range sparse.Values() {
				if values == sparse.Bit && pattern != sparse.Dense {
					continue // meant for dense
				}
				t.Run(fmt.Sprintf("%v, %s, %s", sizes, pattern, values), func(t *testing.T) {
					for _, ranks := range runLevels(t, sizes, n, 3, sparse.Config{Pattern: pattern, Density: 0.05, Values: values}) {
						checkLevels(t, ranks, sizes[0])
					}
				})
			}
		}
	}
}

// A gradient may be that of a part of a mesh only, whose other dimensions cut the
// model.
func TestLevelsAlongSomeDimensions(t *testing.T) {
	const hosts, model, perHost, n = 2, 3, 2, 501
	for _, dims := range [][]string{{"0", "2"}, {"2", "0"}} { // the slow dimension can be any
		outer := map[string]int{"0": hosts, "2": perHost}[dims[0]]
		for _, ranks := range runLevels(t, []int{hosts, model, perHost}, n, 2, sparse.Config{Pattern: "oktopk", Density: 0.1}, dims...) {
			for m := range model {
				var group []levelStep
				for rank := range ranks {
					if rank/perHost%model == m {
						group = append(group, ranks[rank])
					}
				}
				require.Len(t, group, hosts*perHost)
				checkLevels(t, group, outer)
			}
		}
	}
}

// With everything sent, levels are a dense average.
func TestLevelsAtFullDensity(t *testing.T) {
	for _, pattern := range sparse.Patterns() {
		for _, ranks := range runLevels(t, []int{3, 2}, 100, 2, sparse.Config{Pattern: pattern, Density: 1}) {
			for i := range ranks[0].result {
				var want, size float64
				for _, r := range ranks {
					want += float64(r.gradient[i]) / float64(len(ranks))
					size += math.Abs(float64(r.gradient[i])) / float64(len(ranks))
				}
				require.InDelta(t, want, ranks[0].result[i], 16*0x1p-24*size, pattern)
			}
		}
	}
}

// Between hosts, levels send at most half of what the same pattern sends without
// them, and what they send within is what a dense reduction has to.
func TestLevelsSendLess(t *testing.T) {
	const hosts, perHost, n, density, steps = 2, 2, 20_000, 0.02, 4
	for _, pattern := range sparse.Patterns() {
		flat := measureVolume(t, sparse.Config{Pattern: pattern, Density: density}, hosts*perHost, n, steps, func(rank, step int) []float32 { return standin.Normal(n, rank, step) })
		var between float64
		for _, ranks := range runLevels(t, []int{hosts, perHost}, n, steps, sparse.Config{Pattern: pattern, Density: density}) {
			for rank, r := range ranks {
				between += float64(r.stats.SentElements) / (hosts * perHost * steps)
				assert.EqualValues(t, n, r.stats.InnerElements, "n/2 for the reduce-scatter and for the allgather")
				assert.EqualValues(t, 4*n, r.stats.InnerBytes)
				assert.Positive(t, r.stats.InnerTime)
				assert.Equal(t, n/perHost, r.stats.Elements, "rank %d", rank)
			}
		}
		assert.LessOrEqual(t, between, flat.mean/2, "%s, elements that a rank sends in a step", pattern)
		t.Logf("%s: a rank sends %.0f elements between hosts, %.0f without levels", pattern, between, flat.mean)
	}
}

// A run that is saved goes on with the same bits.
func TestLevelsResume(t *testing.T) {
	const n = 999
	cfg := sparse.Config{Pattern: "oktopk", Density: 0.05}
	b := standin.Backend(t, 4)
	require.NoError(t, b.Run(t.Context(), 4, func(ctx context.Context, r commtest.Rank) error {
		mesh, err := meshOf(ctx, r.Comm, 2, 2)
		if err != nil {
			return err
		}
		defer mesh.Close()
		var runs [2]*sparse.Hierarchical
		for i := range runs {
			if runs[i], err = sparse.NewHierarchical(r.Runtime, mesh, n, cfg); err != nil {
				return err
			}
			defer runs[i].Close()
		}
		step := func(l *sparse.Hierarchical, number int) ([]float32, error) {
			g, err := runtime.FromSlice(r.Runtime, standin.Normal(n, r.Comm.Rank(), number))
			if err != nil {
				return nil, err
			}
			defer g.Free()
			if err := l.AllReduce(ctx, g); err != nil {
				return nil, err
			}
			return runtime.ToSlice[float32](g)
		}
		for number := range 3 {
			if _, err := step(runs[0], number); err != nil {
				return err
			}
		}
		state, err := runs[0].State(ctx)
		if err != nil {
			return err
		}
		if err := runs[1].Restore(ctx, state); err != nil {
			return err
		}
		for number := 3; number < 5; number++ {
			first, err := step(runs[0], number)
			if err != nil {
				return err
			}
			second, err := step(runs[1], number)
			if err != nil {
				return err
			}
			assert.Equal(t, hostmem.Bytes(first), hostmem.Bytes(second))
		}
		return nil
	}))
}

// Half types are averaged within a host and between hosts, and rounded by both.
func TestLevelsOfHalfTypes(t *testing.T) {
	const n, ranks = 257, 4
	b := standin.Backend(t, ranks)
	for _, dt := range []dtype.DType{dtype.F16, dtype.BF16} {
		require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
			mesh, err := meshOf(ctx, r.Comm, 2, 2)
			if err != nil {
				return err
			}
			defer mesh.Close()
			l, err := sparse.NewHierarchical(r.Runtime, mesh, n, sparse.Config{Pattern: "topkA", Density: 1})
			if err != nil {
				return err
			}
			defer l.Close()
			tensor, err := runtime.New(r.Runtime, dt, n)
			if err != nil {
				return err
			}
			defer tensor.Free()
			// Quarters of small integers: every sum and average is exact.
			if err := tensor.Fill(float64(r.Comm.Rank() + 1)); err != nil {
				return err
			}
			if err := l.AllReduce(ctx, tensor); err != nil {
				return err
			}
			want, err := runtime.New(r.Runtime, dt, n)
			if err != nil {
				return err
			}
			defer want.Free()
			if err := want.Fill(2.5); err != nil {
				return err
			}
			got, has := make([]byte, tensor.Bytes()), make([]byte, tensor.Bytes())
			if err := errors.Join(r.Runtime.CopyOut(got, standin.Pointer(tensor)), r.Runtime.CopyOut(has, standin.Pointer(want))); err != nil {
				return err
			}
			assert.Equal(t, has, got, "%v", dt)
			return nil
		}))
	}
}

func TestLevelsMisuse(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		mesh, err := meshOf(ctx, c, 1, 1)
		if err != nil {
			return err
		}
		defer mesh.Close()
		cfg := sparse.Config{Pattern: "topkA", Density: 0.5}
		levels := func(n int, cfg sparse.Config, dims ...string) error {
			_, err := sparse.NewHierarchical(rt, mesh, n, cfg, dims...)
			return err
		}
		_, err = sparse.NewHierarchical(nil, mesh, 1, cfg)
		assert.ErrorIs(t, err, comm.ErrArgument)
		_, err = sparse.NewHierarchical(rt, nil, 1, cfg)
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorIs(t, levels(-1, cfg), comm.ErrArgument)
		assert.ErrorIs(t, levels(1, sparse.Config{Pattern: "topk"}), comm.ErrArgument)
		assert.ErrorContains(t, levels(1, cfg, "0", "host"), `no dimension "host"`)
		assert.ErrorContains(t, levels(1, cfg, "0", "0"), `dimension "0": invalid argument: named twice`)
		assert.ErrorIs(t, levels(1, sparse.Config{ClipNorm: 1}), comm.ErrUnsupported)
		assert.ErrorIs(t, levels(1, sparse.Config{NonFinite: sparse.SkipNonFinite}), comm.ErrUnsupported)
		_, err = sparse.NewHierarchical(withoutKernels{rt}, mesh, 1, cfg)
		assert.ErrorIs(t, err, runtime.ErrUnsupported)

		l, err := sparse.NewHierarchical(rt, mesh, 3, cfg)
		if err != nil {
			return err
		}
		tensor, err := runtime.FromSlice(rt, []float32{1, 2, 3, 4})
		if err != nil {
			return err
		}
		assert.ErrorIs(t, l.AllReduce(ctx, nil), comm.ErrArgument)
		assert.ErrorIs(t, l.AllReduce(ctx, tensor), runtime.ErrShape)
		three, err := tensor.Slice(0, 0, 3)
		if err != nil {
			return err
		}
		over, cancel := context.WithCancel(ctx)
		cancel()
		assert.ErrorIs(t, l.AllReduce(over, three), comm.ErrCanceled)
		assert.NoError(t, l.AllReduce(ctx, three), "what was refused does not stay")
		assert.NoError(t, errors.Join(l.Close(), l.Close()))
		assert.ErrorIs(t, l.AllReduce(ctx, three), comm.ErrClosed)
		return errors.Join(three.Free(), tensor.Free())
	})
}

// A peer that fails makes a step an error, and later ones too.
func TestLevelsPeerFailure(t *testing.T) {
	rt := cpu.New()
	left := errors.New("left")
	err := local.Run(t.Context(), 4, func(ctx context.Context, c comm.Communicator) error {
		mesh, err := meshOf(ctx, c, 2, 2)
		if err != nil {
			return err
		}
		if c.Rank() == 3 {
			return errors.Join(left, mesh.Close())
		}
		l, err := sparse.NewHierarchical(rt, mesh, 100, sparse.Config{Pattern: "gtopk", Density: 0.1})
		if err != nil {
			return err
		}
		g, err := runtime.FromSlice(rt, standin.Normal(100, 1))
		if err != nil {
			return err
		}
		first := l.AllReduce(ctx, g)
		assert.ErrorIs(t, first, comm.ErrPeerFailed, "rank %d", c.Rank())
		assert.ErrorIs(t, l.AllReduce(ctx, g), comm.ErrPeerFailed)
		return errors.Join(mesh.Close(), l.Close(), g.Free())
	})
	assert.ErrorIs(t, err, left)
}

// TestLevelsAllocations is TestAllocations for levels, with a rest.
func TestLevelsAllocations(t *testing.T) {
	const ranks, n, rounds, steps = 2, 2001, 10, 40
	perStep := math.Inf(1)
	standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		mesh, err := meshOf(ctx, c, 1, ranks)
		if err != nil {
			return err
		}
		l, err := sparse.NewHierarchical(rt, mesh, n, sparse.Config{Pattern: "topkA", Density: 0.02})
		if err != nil {
			return err
		}
		g, err := runtime.FromSlice(rt, standin.Normal(n, 5))
		if err != nil {
			return err
		}
		step := func() {
			if err == nil {
				err = l.AllReduce(ctx, g)
			}
		}
		for range rounds {
			if c.Rank() == 0 {
				perStep = min(perStep, testing.AllocsPerRun(steps, step))
				continue
			}
			for range steps + 1 { // AllocsPerRun adds one
				step()
			}
		}
		return errors.Join(err, l.Close(), mesh.Close(), g.Free())
	})
	assert.Zero(t, perStep, "allocations per step")
}

// A mesh of communicators of two kinds is that of one communicator that is split, and
// levels along it give the same bits.
func TestLevelsOfJoinedCommunicators(t *testing.T) {
	const hosts, perHost, n = 2, 3, 1003
	host := cpu.New()
	b := standin.Backend(t, hosts*perHost)
	require.NoError(t, b.Run(t.Context(), hosts*perHost, func(ctx context.Context, r commtest.Rank) error {
		split, err := meshOf(ctx, r.Comm, hosts, perHost)
		if err != nil {
			return err
		}
		within, err := r.Comm.Split(ctx, r.Comm.Rank()/perHost, r.Comm.Rank())
		if err != nil {
			return err
		}
		line, err := r.Comm.Split(ctx, r.Comm.Rank()%perHost, r.Comm.Rank())
		if err != nil {
			return err
		}
		between, err := staged.New(line, r.Runtime, host)
		if err != nil {
			return err
		}
		joined, err := distributed.JoinMesh(distributed.Line{Name: "0", Comm: between}, distributed.Line{Name: "1", Comm: within})
		if err != nil {
			return err
		}
		if _, err := distributed.JoinMesh(distributed.Line{Name: "0", Comm: within}, distributed.Line{Name: "0", Comm: within}); !errors.Is(err, comm.ErrArgument) {
			return fmt.Errorf("two dimensions of one name: %v", err)
		}
		var results [2][][]uint32
		for i, mesh := range []*distributed.Mesh{split, joined} {
			at, err := mesh.Coord("1")
			if err != nil || at != r.Comm.Rank()%perHost || mesh.Dims()[1].Size != perHost {
				return fmt.Errorf("rank %d is at %d of %v: %w", r.Comm.Rank(), at, mesh.Dims(), err)
			}
			l, err := sparse.NewHierarchical(r.Runtime, mesh, n, sparse.Config{Pattern: "oktopk", Density: 0.3})
			if err != nil {
				return err
			}
			for step := range 3 {
				tensor, err := runtime.FromSlice(r.Runtime, standin.Normal(n, r.Comm.Rank(), step))
				if err != nil {
					return err
				}
				if err := l.AllReduce(ctx, tensor); err != nil {
					return err
				}
				results[i] = append(results[i], standin.Bits(tensor))
				if err := tensor.Free(); err != nil {
					return err
				}
			}
			if err := errors.Join(l.Close(), mesh.Close()); err != nil {
				return err
			}
		}
		if !reflect.DeepEqual(results[0], results[1]) {
			return errors.New("other bits")
		}
		return nil
	}))
	assert.NoError(t, host.Close())
}
