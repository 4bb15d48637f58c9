package gorgonia_test

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tutti-go/tutti/adapters/gorgonia"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestDigits trains over goroutines, Open MPI and MPICH to the same bits.
func TestDigits(t *testing.T) {
	program := jobtest.Build(t, "./digits")
	for _, args := range [][]string{nil, {"-density", "0.1"}} {
		t.Run(strings.Join(args, "="), func(t *testing.T) { jobtest.SameEverywhere(t, program, args...) })
	}
}

// TestReadme checks that the example contains the code that the README adds to a program.
func TestReadme(t *testing.T) { jobtest.Readme(t, "README.md", "digits/main.go", 10) }

// regression is a linear model with a matrix and a scalar parameter.
type regression struct {
	graph      *G.ExprGraph
	x, y       *tensor.Dense
	parameters G.Nodes
	machine    G.VM
}

const inputs = 5

func newRegression(t testing.TB, batch int, start float64) *regression {
	g := G.NewGraph()
	r := &regression{graph: g,
		x: tensor.New(tensor.WithShape(batch, inputs), tensor.Of(tensor.Float64)),
		y: tensor.New(tensor.WithShape(batch, 1), tensor.Of(tensor.Float64))}
	w := G.NewMatrix(g, tensor.Float64, G.WithName("w"),
		G.WithValue(tensor.New(tensor.WithShape(inputs, 1), tensor.WithBacking([]float64{start, start, start, start, start}))))
	b := G.NewScalar(g, tensor.Float64, G.WithName("b"), G.WithValue(start))
	x, y := G.NewMatrix(g, tensor.Float64, G.WithName("x"), G.WithValue(r.x)), G.NewMatrix(g, tensor.Float64, G.WithName("y"), G.WithValue(r.y))
	off := G.Must(G.Sub(G.Must(G.Add(G.Must(G.Mul(x, w)), b)), y))
	loss := G.Must(G.Mean(G.Must(G.Square(off))))
	_, err := G.Grad(loss, w, b)
	require.NoError(t, err)
	r.parameters = G.Nodes{w, b}
	r.machine = G.NewTapeMachine(g, G.BindDualValues(w, b))
	return r
}

// train makes steps on the samples rank, rank+ranks, … of a sequence.
func (r *regression) train(t testing.TB, solver G.Solver, steps, rank, ranks int) []float64 {
	rng := rand.New(rand.NewPCG(1, 2))
	xs, ys := r.x.Data().([]float64), r.y.Data().([]float64)
	for range steps {
		for row := range ys {
			for other := range ranks {
				y := 0.5
				for i := range inputs {
					v := rng.NormFloat64()
					y += v * float64(i)
					if other == rank {
						xs[row*inputs+i] = v
					}
				}
				if other == rank {
					ys[row] = y
				}
			}
		}
		require.NoError(t, r.machine.RunAll())
		require.NoError(t, solver.Step(G.NodesToValueGrads(r.parameters)))
		r.machine.Reset()
	}
	return append(append([]float64{}, r.parameters[0].Value().Data().([]float64)...), r.parameters[1].Value().Data().(float64))
}

// TestSameTraining checks that two ranks compute the same as Gorgonia alone with batches twice as large, from rank
// 0's parameters, apart from rounding.
func TestSameTraining(t *testing.T) {
	for name, inner := range map[string]func() G.Solver{
		"vanilla": func() G.Solver { return G.NewVanillaSolver(G.WithLearnRate(0.1)) },
		"adam":    func() G.Solver { return G.NewAdamSolver(G.WithLearnRate(0.1)) },
	} {
		t.Run(name, func(t *testing.T) {
			want := newRegression(t, 16, 0).train(t, inner(), 100, 0, 1)
			got := make([][]float64, 2)
			require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
				r := newRegression(t, 8, float64(c.Rank()))
				solver, err := gorgonia.New(ctx, c, inner(), r.parameters, ddp.Config{})
				if err != nil {
					return err
				}
				got[c.Rank()] = r.train(t, solver, 100, c.Rank(), 2)
				return solver.Close()
			}))
			assert.Equal(t, got[0], got[1], "the same bits on all ranks")
			assert.InDeltaSlice(t, want, got[0], 1e-9)
			assert.InDeltaSlice(t, []float64{0, 1, 2, 3, 4, 0.5}, got[0], 0.2, "it has learned something")
		})
	}
}

// TestOuter checks that averaged windows of one step of plain descent equal the training with averaged gradients.
// Longer windows learn as well, with a momentum and fewer exchanges.
func TestOuter(t *testing.T) {
	train := func(t *testing.T, cfg *outer.Config, inner func() G.Solver, steps int) []float32 {
		got := make([][]float32, 2)
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			r := column{tensor.New(tensor.WithShape(8, 1), tensor.Of(tensor.Float32)), tensor.New(tensor.WithShape(8, 1), tensor.Of(tensor.Float32))}
			w, g := r.value.Data().([]float32), r.grad.Data().([]float32)
			w[3] = float32(c.Rank())
			nodes := G.Nodes{G.NewMatrix(G.NewGraph(), tensor.Float32, G.WithName("w"), G.WithShape(8, 1), G.WithValue(r.value))}
			var solver interface {
				G.Solver
				Close() error
			}
			var err error
			if cfg == nil {
				solver, err = gorgonia.New(ctx, c, inner(), nodes, ddp.Config{})
			} else {
				solver, err = gorgonia.NewOuter(ctx, c, inner(), nodes, *cfg)
			}
			if err != nil {
				return err
			}
			for step := range steps { // towards rank + 1, so towards 1.5 together
				for i := range w {
					g[i] = (w[i] - float32(c.Rank()+1)) * float32(1+(step+i)%2)
				}
				if err := solver.Step([]G.ValueGrad{r}); err != nil {
					return err
				}
			}
			got[c.Rank()] = slices.Clone(w)
			if o, ok := solver.(*gorgonia.Outer); ok {
				assert.Equal(t, steps/cfg.Every, o.Stats().Rounds)
			}
			return solver.Close()
		}))
		assert.Equal(t, got[0], got[1], "the same bits on all ranks")
		return got[0]
	}
	plain := func() G.Solver { return G.NewVanillaSolver(G.WithLearnRate(0.125)) }
	want := train(t, nil, plain, 5)
	assert.InDeltaSlice(t, want, train(t, &outer.Config{Every: 1}, plain, 5), 1e-6)
	for _, inner := range []func() G.Solver{plain, func() G.Solver { return G.NewAdamSolver(G.WithLearnRate(0.1)) }} {
		for _, w := range train(t, &outer.Config{Every: 10, LearningRate: 0.7, Momentum: 0.5, Nesterov: true}, inner, 100) {
			assert.InDelta(t, 1.5, w, 0.1)
		}
	}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		_, err := gorgonia.NewOuter(ctx, c, plain(), newRegression(t, 8, 0).parameters, outer.Config{Every: 2})
		assert.ErrorIs(t, err, runtime.ErrUnsupported, "of 64 bits")
		return nil
	}))
}

// column is a two-dimensional parameter, because short vectors are never sparse, with a gradient that the test sets.
type column struct{ value, grad *tensor.Dense }

func (v column) Value() G.Value         { return v.value }
func (v column) Grad() (G.Value, error) { return v.grad, nil }

// TestResume checks that a sparse training resumed from its parameters and states has the bits of an uninterrupted
// run, and does not without the states.
func TestResume(t *testing.T) {
	const ranks, n, before, steps = 2, 100, 4, 9
	// run makes the steps from one on, starting with parameters and the ranks' states.
	run := func(from, to int, parameters []float32, states [][]byte) (now []float32, saved [][]byte) {
		saved = make([][]byte, ranks)
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			v := column{tensor.New(tensor.WithShape(n, 1), tensor.WithBacking(slices.Clone(parameters))), tensor.New(tensor.WithShape(n, 1), tensor.Of(tensor.Float32))}
			w := G.NewMatrix(G.NewGraph(), tensor.Float32, G.WithName("w"), G.WithValue(v.value))
			solver, err := gorgonia.New(ctx, c, G.NewVanillaSolver(G.WithLearnRate(0.1)), G.Nodes{w},
				ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}})
			if err != nil {
				return err
			}
			defer solver.Close()
			if states != nil {
				if err := solver.Restore(states[c.Rank()]); err != nil {
					return err
				}
			}
			for step := from; step < to; step++ {
				rng := rand.New(rand.NewPCG(uint64(step), uint64(c.Rank())))
				for i := range n {
					v.grad.Data().([]float32)[i] = float32(rng.NormFloat64())
				}
				if err := solver.Step([]G.ValueGrad{v}); err != nil {
					return err
				}
			}
			stats, err := solver.Stats()
			assert.False(t, stats.Skipped)
			if c.Rank() == 0 {
				now = slices.Clone(v.value.Data().([]float32))
			}
			state, stateErr := solver.State()
			saved[c.Rank()] = state
			return errors.Join(err, stateErr)
		}))
		return now, saved
	}
	want, _ := run(0, steps, make([]float32, n), nil)
	half, states := run(0, before, make([]float32, n), nil)
	got, _ := run(before, steps, half, states)
	assert.Equal(t, want, got)
	got, _ = run(before, steps, half, nil)
	assert.NotEqual(t, want, got)
}

// TestWrap checks that the tensor shares the value's memory, and that a value with gaps is refused.
func TestWrap(t *testing.T) {
	rt := cpu.New()
	dense := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float32{1, 2, 3, 4, 5, 6}))
	scalar := tensor.New(tensor.FromScalar(float64(1)))
	for _, v := range []G.Value{dense, scalar, G.NewF32(1), G.NewF64(1)} {
		x, err := gorgonia.Wrap(rt, v)
		require.NoError(t, err)
		require.NoError(t, x.Fill(7))
		require.NoError(t, x.Free())
	}
	assert.Equal(t, []float32{7, 7, 7, 7, 7, 7}, dense.Data())
	assert.Equal(t, 7., scalar.Data())

	column, err := dense.Slice(nil, tensor.S(1))
	require.NoError(t, err)
	_, err = gorgonia.Wrap(rt, column.(*tensor.Dense))
	assert.ErrorIs(t, err, runtime.ErrNotContiguous)
	_, err = gorgonia.Wrap(rt, tensor.New(tensor.WithShape(1), tensor.WithBacking([]complex64{1})))
	assert.ErrorContains(t, err, "complex64")
	_, err = gorgonia.Wrap(rt, G.NewB(true))
	assert.ErrorIs(t, err, comm.ErrUnsupported)
	require.NoError(t, rt.Close())
}

// TestOtherParameters checks that a step with parameters other than New's is an error.
func TestOtherParameters(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		r := newRegression(t, 8, 0)
		solver, err := gorgonia.New(ctx, c, G.NewVanillaSolver(), r.parameters, ddp.Config{})
		require.NoError(t, err)
		require.NoError(t, r.machine.RunAll())
		assert.ErrorIs(t, solver.Step(G.NodesToValueGrads(r.parameters[:1])), comm.ErrArgument)
		return solver.Close()
	}))
}

// An error about a parameter whose type cannot be averaged as configured names it.
func TestErrorsNameParameters(t *testing.T) {
	g := G.NewGraph()
	named := func(name string, of tensor.Dtype) *G.Node {
		return G.NewMatrix(g, of, G.WithShape(3, 2), G.WithName(name), G.WithInit(G.Zeroes()))
	}
	parameters := G.Nodes{named("narrow", tensor.Float32), named("wide", tensor.Float64)}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		_, err := gorgonia.New(ctx, c, G.NewVanillaSolver(), parameters, ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.5}})
		assert.ErrorIs(t, err, comm.ErrUnsupported)
		assert.ErrorContains(t, err, "gorgonia: wide: ")
		_, err = gorgonia.NewOuter(ctx, c, G.NewVanillaSolver(), parameters, outer.Config{Every: 2})
		assert.ErrorIs(t, err, comm.ErrUnsupported)
		assert.ErrorContains(t, err, "gorgonia: wide: ")
		return nil
	}))
}

// BenchmarkStep measures a training step on one rank, with Gorgonia alone and with the adapter's solver.
func BenchmarkStep(b *testing.B) {
	const rows, columns = 64, 256
	for _, wrapped := range []bool{false, true} {
		b.Run(map[bool]string{false: "alone", true: "tutti"}[wrapped], func(b *testing.B) {
			g := G.NewGraph()
			values := func(r, c int) *tensor.Dense {
				return tensor.New(tensor.WithShape(r, c), tensor.WithBacking(tensor.Random(tensor.Float32, r*c)))
			}
			x := G.NewMatrix(g, tensor.Float32, G.WithName("x"), G.WithValue(values(rows, columns)))
			w1 := G.NewMatrix(g, tensor.Float32, G.WithName("w1"), G.WithValue(values(columns, columns)))
			w2 := G.NewMatrix(g, tensor.Float32, G.WithName("w2"), G.WithValue(values(columns, columns)))
			loss := G.Must(G.Mean(G.Must(G.Square(G.Must(G.Mul(G.Must(G.Rectify(G.Must(G.Mul(x, w1)))), w2))))))
			_, err := G.Grad(loss, w1, w2)
			require.NoError(b, err)
			parameters := G.Nodes{w1, w2}
			machine := G.NewTapeMachine(g, G.BindDualValues(parameters...))
			defer machine.Close()
			require.NoError(b, local.Run(b.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
				var solver G.Solver = G.NewAdamSolver(G.WithLearnRate(math.SmallestNonzeroFloat32))
				if wrapped {
					s, err := gorgonia.New(ctx, c, solver, parameters, ddp.Config{})
					if err != nil {
						return err
					}
					defer s.Close()
					solver = s
				}
				for b.Loop() {
					if err := machine.RunAll(); err != nil {
						return err
					}
					if err := solver.Step(G.NodesToValueGrads(parameters)); err != nil {
						return err
					}
					machine.Reset()
				}
				return nil
			}))
		})
	}
}
