package cublas

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	goruntime "runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func TestAMissingLibraryIsNamed(t *testing.T) {
	_, err := load("libtutti-absent-13.so", "libtutti-absent-12.so")
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	for _, part := range []string{"libtutti-absent-13.so", "libtutti-absent-12.so", "TUTTI_CUBLAS_LIB", "site-packages"} {
		assert.ErrorContains(t, err, part)
	}
}

func TestAnotherLibraryIsRefused(t *testing.T) {
	if goruntime.GOOS != "linux" {
		t.Skip("knows only the C library of Linux")
	}
	_, err := load("libc.so.6")
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	assert.ErrorContains(t, err, "cublasGetProperty")
}

func TestTheVariableReplacesTheNames(t *testing.T) {
	t.Setenv(libraryVariable, "")
	assert.Greater(t, len(candidates()), 1)
	t.Setenv(libraryVariable, "/opt/libcublas.so.13")
	assert.Equal(t, []string{"/opt/libcublas.so.13"}, candidates())
}

func TestErrorsAreTyped(t *testing.T) {
	for status, want := range map[int32]error{3: runtime.ErrOutOfMemory, 7: runtime.ErrArgument, 8: runtime.ErrUnsupported, 15: runtime.ErrUnsupported} {
		err := new(library).newError(dl.Func{}, "cuda:2", status)
		assert.ErrorIs(t, err, want)
		assert.NotErrorIs(t, err, runtime.ErrBroken)
		assert.ErrorContains(t, err, fmt.Sprintf("cuda:2: : failed (%d)", status))
	}
	assert.EqualError(t, new(library).newError(dl.Func{}, "cuda:2", 13), "cuda:2: : failed (13)")
}

// problem is a product with its operands on the host.
type problem struct {
	c, a, b Matrix
	dataA   []float32
	dataB   []float32
	seed    uint64
}

// shapes returns all kinds of products: square and not square, each factor plain and transposed, with gaps between
// rows.
func shapes() []problem {
	var all []problem
	for i, transposed := range [][2]bool{{false, false}, {false, true}, {true, false}, {true, true}} {
		for j, size := range [][3]int{{1, 1, 1}, {8, 8, 8}, {40, 24, 56}, {17, 33, 5}} {
			m, n, k := size[0], size[1], size[2]
			p := problem{
				c:    Matrix{Addr: 1, Rows: m, Columns: n, Stride: n + j},
				a:    Matrix{Addr: 1, Rows: m, Columns: k, Stride: k + 8*j, Transposed: transposed[0]},
				b:    Matrix{Addr: 1, Rows: k, Columns: n, Transposed: transposed[1]},
				seed: uint64(10*i + j),
			}
			for _, f := range []*Matrix{&p.a, &p.b} {
				if f.Transposed {
					f.Rows, f.Columns = f.Columns, f.Rows
					f.Stride = f.Columns + 8
				}
			}
			rng := rand.New(rand.NewPCG(p.seed, 0))
			p.dataA, p.dataB = random(rng, p.a), random(rng, p.b)
			all = append(all, p)
		}
	}
	return all
}

// random makes the elements of a matrix, exact in bfloat16.
func random(rng *rand.Rand, m Matrix) []float32 {
	x := make([]float32, m.Rows*m.stride())
	for i := range x {
		x[i] = float32(rng.IntN(255)-127) / 64
	}
	return x
}

// reference returns the product in float64, by the definition, and the sum of magnitudes for each element.
func (p problem) reference() (product, magnitude []float64) {
	at := func(m Matrix, x []float32, i, j int) float64 {
		if m.Transposed {
			i, j = j, i
		}
		return float64(x[i*m.stride()+j])
	}
	k := p.a.Columns
	if p.a.Transposed {
		k = p.a.Rows
	}
	for i := range p.c.Rows {
		for j := range p.c.Columns {
			sum, abs := 0.0, 0.0
			for l := range k {
				v := at(p.a, p.dataA, i, l) * at(p.b, p.dataB, l, j)
				sum += v
				abs += math.Abs(v)
			}
			product, magnitude = append(product, sum), append(magnitude, abs)
		}
	}
	return product, magnitude
}

// TestTheOrderOfFactors evaluates the call of BLAS by BLAS's own definition (column-major) and compares the result
// with the row-major product.
func TestTheOrderOfFactors(t *testing.T) {
	for _, p := range shapes() {
		p.a.Addr, p.b.Addr, p.c.Addr = 'a', 'b', 'c'
		g := newGEMM(p.c, p.a, p.b)
		data := map[uintptr][]float32{'a': p.dataA, 'b': p.dataB}
		at := func(o operand, i, j int) float64 {
			if o.transpose {
				i, j = j, i
			}
			return float64(data[o.addr][i+j*o.leading])
		}
		assert.EqualValues(t, 'c', g.c.addr)
		got := make([]float64, p.c.Rows*p.c.stride())
		for i := range g.m {
			for j := range g.n {
				for l := range g.k {
					got[i+j*g.c.leading] += at(g.a, i, l) * at(g.b, l, j)
				}
			}
		}
		want, magnitude := p.reference()
		for i := range p.c.Rows {
			for j := range p.c.Columns {
				w := want[i*p.c.Columns+j]
				require.InDelta(t, w, got[i*p.c.stride()+j], 1e-12*magnitude[i*p.c.Columns+j], "seed %d", p.seed)
			}
		}
	}
}

// openGPU opens GPU 0 and a handle. It skips the test if either is missing.
func openGPU(t *testing.T) (*cuda.Runtime, *Handle) {
	t.Helper()
	if _, err := cuda.Count(); errors.Is(err, runtime.ErrUnavailable) {
		t.Skipf("needs an NVIDIA GPU and its driver: %v", err)
	}
	version, name, err := Version()
	if errors.Is(err, runtime.ErrUnavailable) {
		t.Skipf("needs cuBLAS: %v", err)
	}
	require.NoError(t, err)
	t.Logf("cuBLAS %s (%s)", version, name)
	rt, err := cuda.Open(0)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	h, err := Open(rt)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, h.Close())
		assert.NoError(t, h.Close(), "again")
	})
	return rt, h
}

// place copies elements to the device as bfloat16.
func place(t *testing.T, rt *cuda.Runtime, x []float32) uintptr {
	t.Helper()
	raw := make([]byte, dtype.BF16.Size()*len(x))
	require.NoError(t, dtype.FromFloat32(raw, dtype.BF16, x))
	p, err := rt.Allocate(len(raw))
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, rt.Deallocate(p)) })
	require.NoError(t, rt.CopyIn(p, raw))
	return p
}

func TestMultiply(t *testing.T) {
	rt, h := openGPU(t)
	for _, multiprocessors := range []int{0, rt.Info().Multiprocessors / 2} {
		require.NoError(t, h.SetMultiprocessors(multiprocessors))
		for _, p := range shapes() {
			const untouched = 77
			got := make([]float32, p.c.Rows*p.c.stride())
			for i := range got {
				got[i] = untouched
			}
			p.a.Addr, p.b.Addr, p.c.Addr = place(t, rt, p.dataA), place(t, rt, p.dataB), place(t, rt, got)
			require.NoError(t, h.Multiply(p.c, p.a, p.b))
			raw := make([]byte, dtype.BF16.Size()*len(got))
			require.NoError(t, rt.CopyOut(raw, p.c.Addr))
			require.NoError(t, dtype.ToFloat32(got, raw, dtype.BF16))
			want, magnitude := p.reference()
			for i := range p.c.Rows {
				for j := range p.c.stride() {
					x := float64(got[i*p.c.stride()+j])
					if j >= p.c.Columns {
						require.EqualValues(t, untouched, x, "between the rows, seed %d", p.seed)
						continue
					}
					w := want[i*p.c.Columns+j]
					// Half a unit in the last place of bfloat16's eight bits, plus the rounding of the sum.
					bound := math.Abs(w)/256 + magnitude[i*p.c.Columns+j]*1e-5
					require.InDelta(t, w, x, bound, "element %d %d of %+v, seed %d", i, j, p.c, p.seed)
				}
			}
		}
	}
	require.NoError(t, h.SetMultiprocessors(0))
}

func TestMultiplyDoesNotAllocate(t *testing.T) {
	rt, h := openGPU(t)
	x := place(t, rt, make([]float32, 64*64))
	y := place(t, rt, make([]float32, 64*64))
	a, c := Matrix{Addr: x, Rows: 64, Columns: 64}, Matrix{Addr: y, Rows: 64, Columns: 64}
	assert.Zero(t, testing.AllocsPerRun(200, func() {
		if err := h.Multiply(c, a, a); err != nil {
			t.Fatal(err)
		}
	}))
	require.NoError(t, rt.Synchronize(context.Background()))
}
