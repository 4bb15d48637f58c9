package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// hosts arranges ranks in hosts with this number of ranks each.
func hosts(perHost int) func(context.Context, comm.Communicator) (*distributed.Mesh, error) {
	return func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
		return distributed.NewMesh(ctx, c, distributed.Dim{Name: "host", Size: -1}, distributed.Dim{Name: "rank", Size: perHost})
	}
}

// assertNear expects sums that differ by rounding alone.
func assertNear(t *testing.T, want, got []float64, format string, args ...any) {
	if len(want) != len(got) {
		assert.Len(t, got, len(want))
		return
	}
	for i := range want {
		if !(math.Abs(want[i]-got[i]) <= 1e-5) {
			assert.InDelta(t, want[i], got[i], 1e-5, "element %d: %s", i, fmt.Sprintf(format, args...))
			return
		}
	}
}

// TestMesh: sparse and dense buckets, with padding, have the same bits on all ranks in each step, and nothing
// gets lost: after some steps without gradients, results add up to the averages that went in. Streams are those of
// three and four ranks, or with TUTTI_EXTENDED set of all. With -short there are four ranks.
func TestMesh(t *testing.T) {
	const steps, rest = 3, 40
	for _, k := range []struct {
		ranks int
		sizes []int // the first is hosts'
	}{{1, []int{1, 1}}, {2, []int{1, 2}}, {3, []int{3, 1}}, {4, []int{2, 2}}, {6, []int{2, 3}}, {8, []int{2, 2, 2}}} {
		if testing.Short() && k.ranks != 4 {
			continue
		}
		for i, pattern := range []string{sparse.Dense, sparse.TopkA, sparse.Gtopk, sparse.Oktopk, sparse.Auto} {
			if k.ranks > 4 && i%2 != k.ranks/2%2 && !standin.Extended {
				continue // the other one of both large worlds has it
			}
			for _, device := range []string{"host", "streams", "side streams"} {
				few := k.ranks != 4 && (k.ranks != 3 || device == "side streams")
				if few && device != "host" && !standin.Extended {
					continue
				}
				label := fmt.Sprintf("%+v, %s, %s", k, pattern, device)
				results := make([][]uint64, k.ranks)
				standin.World(t, k.ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
					memory, of := runtime.Runtime(rt), func(c comm.Communicator) comm.Communicator { return c }
					switch device {
					case "streams":
						memory, of = standin.NewOnStream(rt), func(c comm.Communicator) comm.Communicator { return standin.NewOrdered(ctx, c) }
					case "side streams":
						memory, of = standin.NewForking(rt), func(c comm.Communicator) comm.Communicator { return standin.NewByEvents(ctx, c) }
					}
					mesh := func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
						var dims []distributed.Dim
						for i, size := range k.sizes {
							dims = append(dims, distributed.Dim{Name: fmt.Sprint(i), Size: size})
						}
						m, err := distributed.NewMesh(ctx, c, dims...)
						if err != nil {
							return nil, err
						}
						var names []string
						var comms []comm.Communicator
						for _, d := range m.Dims() {
							sub, err := m.Comm(d.Name)
							if err != nil {
								return nil, err
							}
							names = append(names, d.Name)
							comms = append(comms, of(sub))
						}
						return distributed.JoinMesh(names, comms)
					}
					m, err := newModel(ctx, memory, of(c), ddp.Config{Config: sparse.Config{Pattern: pattern, Density: 0.2}, Mesh: mesh})
					require.NoError(t, err)
					var in, out [][]float64
					for i := range m.params {
						in, out = append(in, make([]float64, m.params[i].Len())), append(out, make([]float64, m.params[i].Len()))
					}
					for step := range steps + rest {
						if step < steps {
							require.NoError(t, m.load(step))
						} else {
							for _, p := range m.params {
								require.NoError(t, p.Fill(0))
							}
						}
						require.NoError(t, m.sync.ReduceAll(ctx, m.params), label)
						results[c.Rank()] = append(results[c.Rank()], standin.Digest(m.bits()))
						for i, p := range m.params {
							x, err := runtime.ToSlice[float32](p)
							require.NoError(t, err)
							for j, v := range x {
								out[i][j] += float64(v)
							}
							for r := 0; r < k.ranks && step < steps; r++ {
								for j, v := range standin.Normal(p.Len(), r, step, i) {
									in[i][j] += float64(v) / float64(k.ranks)
								}
							}
						}
					}
					for i := range in {
						assertNear(t, in[i], out[i], "%s, gradient %d", label, i)
					}
					stats, err := m.sync.Stats(ctx)
					require.NoError(t, err)
					assert.Equal(t, k.sizes[0] > 1, stats.SentBytes > 0, label)
					return m.close()
				})
				for _, r := range results {
					assert.Equal(t, results[0], r, label)
				}
			}
		}
	}
}

// TestMeshLosesAHost: the ranks of the hosts that are left go on, and nothing of what they put in gets lost.
func TestMeshLosesAHost(t *testing.T) {
	const n, ranks, left, rest = 601, 6, 4, 60
	others, err := local.New(left)
	require.NoError(t, err)
	standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		x, err := runtime.FromSlice(rt, make([]float32, n), n)
		require.NoError(t, err)
		g, err := ddp.New(ctx, rt, c, []*runtime.Tensor{x}, ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.2}, DenseUpTo: -1, Mesh: hosts(2)})
		require.NoError(t, err)
		require.NoError(t, g.ReduceAll(ctx, []*runtime.Tensor{x}))
		if c.Rank() < left {
			defer others[c.Rank()].Close()
			require.NoError(t, g.Rebind(ctx, others[c.Rank()]))
			require.NoError(t, runtime.CopyIn(x, standin.Normal(n, c.Rank())))
			sum := make([]float64, n)
			for range rest {
				require.NoError(t, g.ReduceAll(ctx, []*runtime.Tensor{x}))
				values, err := runtime.ToSlice[float32](x)
				require.NoError(t, errors.Join(err, x.Fill(0)))
				for i, v := range values {
					sum[i] += float64(v)
				}
			}
			want := make([]float64, n)
			for r := range left {
				for i, v := range standin.Normal(n, r) {
					want[i] += float64(v) / left
				}
			}
			assertNear(t, want, sum, "what was put in")
		}
		return errors.Join(g.Close(), x.Free())
	})
}

// Along a mesh, a bucket has the bits of a reduce-scatter within a host, a sparse step between the ranks with the same
// share, and an allgather.
func TestMeshHasTheBitsOfShares(t *testing.T) {
	const n, steps, perHost = 600, 5, 2
	for _, pattern := range sparsity.Patterns() {
		standin.World(t, 4, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			mesh, err := hosts(perHost)(ctx, c)
			require.NoError(t, err)
			within, err := mesh.Comm("rank")
			require.NoError(t, err)
			between, err := mesh.Comm("host")
			require.NoError(t, err)
			cfg := sparse.Config{Pattern: pattern, Density: 0.1, NonFinite: sparse.PassNonFinite, Momentum: 0.5}
			s, err := sparse.New(rt, between, n/perHost, cfg)
			require.NoError(t, err)
			share, err := runtime.New(rt, dtype.F32, n/perHost)
			require.NoError(t, err)
			var x [2]*runtime.Tensor
			for i := range x {
				x[i], err = runtime.New(rt, dtype.F32, n)
				require.NoError(t, err)
			}
			g, err := ddp.New(ctx, rt, c, x[:1], ddp.Config{Config: cfg, DenseUpTo: -1, Mesh: hosts(perHost)})
			require.NoError(t, err)
			for step := range steps {
				for _, gradient := range x {
					require.NoError(t, runtime.CopyIn(gradient, standin.Normal(n, c.Rank(), step)))
				}
				require.NoError(t, g.ReduceAll(ctx, x[:1]))
				require.NoError(t, distributed.ReduceScatter(ctx, within, share, x[1], comm.Avg))
				require.NoError(t, s.AllReduce(ctx, share))
				require.NoError(t, distributed.AllGather(ctx, within, x[1], share))
				assert.Equal(t, standin.Bits(x[1]), standin.Bits(x[0]), "%s, step %d", pattern, step)
			}
			return errors.Join(g.Close(), s.Close(), mesh.Close(), share.Free(), x[0].Free(), x[1].Free())
		})
	}
}

// A step that is skipped, as a gradient on one rank is not finite, leaves all as it was on all hosts: the steps
// around it have the bits of a run without it. So have those after a state is restored, and after the
// ranks have moved to another communicator.
func TestMeshAroundASkippedStep(t *testing.T) {
	const ranks, steps, bad = 4, 6, 2
	for _, cfg := range []ddp.Config{
		{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1, Momentum: 0.9}},
		{Config: sparse.Config{Pattern: sparse.Gtopk, Density: 0.1, ClipNorm: 1, ClipGlobal: true}},
		{Reducer: newAlternating, Config: sparse.Config{NonFinite: sparse.SkipNonFinite}},
	} {
		cfg.Mesh = hosts(2)
		run := func(with bool) [][]uint64 {
			all := make([][]uint64, ranks)
			others, err := local.New(ranks)
			require.NoError(t, err)
			standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				m, err := newModel(ctx, rt, c, cfg)
				require.NoError(t, err)
				defer others[c.Rank()].Close()
				for step := range steps {
					if step == bad && !with {
						continue
					}
					require.NoError(t, m.load(step))
					if step == bad && c.Rank() == 3 {
						require.NoError(t, m.params[0].Fill(math.NaN()))
					}
					if step == 4 && with {
						state, err := m.sync.State(ctx)
						require.NoError(t, errors.Join(err, m.close()))
						m, err = newModel(ctx, rt, c, cfg)
						require.NoError(t, errors.Join(err, m.sync.Restore(ctx, state), m.load(step)))
					}
					if step == 5 && with {
						require.NoError(t, m.sync.Rebind(ctx, others[c.Rank()]))
					}
					require.NoError(t, m.sync.ReduceAll(ctx, m.params))
					stats, err := m.sync.Stats(ctx)
					require.NoError(t, err)
					require.Equal(t, step == bad, stats.Skipped, "step %d", step)
					if step != bad {
						all[c.Rank()] = append(all[c.Rank()], standin.Digest(m.bits()))
					}
				}
				return m.close()
			})
			return all
		}
		assert.Equal(t, run(false), run(true), "%+v", cfg.Config)
	}
}

// alternating is a Reducer that averages every other entry of a bucket, and keeps the rest.
type alternating struct{ residual *runtime.Tensor }

func newAlternating(b ddp.Bucket) (ddp.Reducer, error) {
	residual, err := runtime.FromSlice(b.Tensor.Runtime(), make([]float32, b.Tensor.Len()), b.Tensor.Len())
	return &alternating{residual}, err
}

func (a *alternating) Memory() ddp.Memory { return ddp.Memory{Residual: []*runtime.Tensor{a.residual}} }

func (a *alternating) Reduce(ctx context.Context, b ddp.Bucket) error {
	x, err := cpu.Slice[float32](b.Tensor)
	residual, wrong := cpu.Slice[float32](a.residual)
	if err := errors.Join(err, wrong); err != nil {
		return err
	}
	for i := range x {
		x[i] += residual[i]
		if residual[i] = 0; (i+b.Step)%2 == 1 {
			residual[i], x[i] = x[i], 0
		}
	}
	return distributed.AllReduce(ctx, b.Comm, b.Tensor, comm.Avg)
}

// TestResiduals: those of a program's reducer can be had, and those of shares cannot.
func TestResiduals(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		x, err := runtime.FromSlice(rt, []float32{1, 2, 3, 4}, 4)
		require.NoError(t, err)
		all := []*runtime.Tensor{x}
		own, err := ddp.New(ctx, rt, c, all, ddp.Config{DenseUpTo: -1, Reducer: newAlternating})
		require.NoError(t, err)
		require.NoError(t, own.ReduceAll(ctx, all))
		list, err := own.Residuals()
		require.NoError(t, err)
		require.Len(t, list, 1)
		values, err := runtime.ToSlice[float32](list[0])
		require.NoError(t, err)
		assert.Equal(t, []float32{0, 2, 0, 4}, values)
		dense, err := ddp.New(ctx, rt, c, all, ddp.Config{Mesh: hosts(2)})
		require.NoError(t, err)
		list, err = dense.Residuals()
		assert.Empty(t, list)
		assert.NoError(t, err)
		shares, err := ddp.New(ctx, rt, c, all, ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.2}, DenseUpTo: -1, Mesh: hosts(2)})
		require.NoError(t, err)
		_, err = shares.Residuals()
		assert.ErrorIs(t, err, comm.ErrUnsupported)
		return errors.Join(own.Close(), dense.Close(), shares.Close(), x.Free())
	})
}

// TestMeshAndShardsAllocate: steps along a mesh, and those of shards with their norm and gathered parameters,
// allocate nothing. So does a selection of a program's own.
func TestMeshAndShardsAllocate(t *testing.T) {
	const rounds, steps = 10, 20
	for _, cfg := range []ddp.Config{
		{Mesh: hosts(1)}, {Mesh: hosts(2), Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}}, {Shard: true},
		{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1, Selector: first{}}},
	} {
		perStep := math.Inf(1)
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, cfg)
			require.NoError(t, err)
			var shards *ddp.Shards
			var tensors []*runtime.Tensor
			if cfg.Shard {
				shards, err = m.sync.Shards()
				require.NoError(t, err)
				tensors = tensorsOf(shards)
			}
			step := func() {
				if err == nil {
					err = m.sync.ReduceAll(ctx, m.params)
				}
				if err == nil && cfg.Shard {
					_, err = shards.Norm(ctx)
				}
				if err == nil && cfg.Shard {
					err = shards.Gather(ctx, m.params, tensors)
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
			return errors.Join(err, m.close())
		})
		assert.Zero(t, perStep, "allocations per step, %+v", cfg)
	}
}

// first is a [sparse.Selector] of the first entries.
type first struct{}

func (first) String() string { return "first" }

func (first) Select(_ int, sum, indices, values *runtime.Tensor) error {
	from, wrong := cpu.Slice[float32](sum)
	numbers, failed := cpu.Slice[int32](indices)
	entries, err := cpu.Slice[float32](values)
	for i := range numbers {
		numbers[i] = int32(i)
		entries[i] = from[i]
	}
	if wrong != nil || failed != nil {
		return errors.Join(wrong, failed)
	}
	return err
}

func TestMeshMisuse(t *testing.T) {
	standin.World(t, 4, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		m, err := newModel(ctx, rt, c, ddp.Config{Mesh: hosts(2)})
		require.NoError(t, err)
		for _, cfg := range []ddp.Config{{Mesh: hosts(2), Sum: true}, {Mesh: hosts(2), Shard: true}, {Mesh: hosts(3)},
			{Mesh: func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
				half, err := c.Split(ctx, c.Rank()%2, 0)
				if err != nil {
					return nil, err
				}
				return distributed.JoinMesh([]string{"half"}, []comm.Communicator{half})
			}}, {Mesh: func(_ context.Context, c comm.Communicator) (*distributed.Mesh, error) {
				return distributed.JoinMesh([]string{"host", "gpu"}, []comm.Communicator{c})
			}}} {
			_, err := ddp.New(ctx, rt, c, m.params, cfg)
			assert.ErrorIs(t, err, comm.ErrArgument)
		}
		return m.close()
	})
	others, err := local.New(3)
	require.NoError(t, err)
	standin.World(t, 4, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		perHost := 2
		m, err := newModel(ctx, rt, c, ddp.Config{Mesh: func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
			return hosts(perHost)(ctx, c)
		}})
		require.NoError(t, errors.Join(err, m.load(0), m.sync.ReduceAll(ctx, m.params)))
		if c.Rank() < 3 {
			defer others[c.Rank()].Close()
			perHost = 3
			assert.ErrorIs(t, m.sync.Rebind(ctx, others[c.Rank()]), comm.ErrUnsupported)
		}
		return m.close()
	})
}
