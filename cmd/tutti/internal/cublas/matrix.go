package cublas

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/runtime"
)

// Matrix is a matrix of bfloat16 elements in device memory, in row-major order:
// element (i, j) lies i*Stride + j elements behind the first.
type Matrix struct {
	Addr          uintptr
	Rows, Columns int // as it is stored
	// Stride is how many elements a row is from the next; 0 means Columns.
	Stride int
	// Transposed makes a factor count as its transpose.
	Transposed bool
}

// shape is that of the matrix as a factor.
func (m Matrix) shape() (rows, columns int) {
	if m.Transposed {
		return m.Columns, m.Rows
	}
	return m.Rows, m.Columns
}

// stride is the distance of two rows, in elements.
func (m Matrix) stride() int {
	if m.Stride == 0 {
		return m.Columns
	}
	return m.Stride
}

// check names what no matrix can have. The library counts in 32 bits.
func (m Matrix) check(name string) error {
	switch {
	case m.Addr == 0:
		return argument("%s is at a nil pointer", name)
	case m.Rows < 1 || m.Columns < 1:
		return argument("%s has %d rows and %d columns, want at least 1", name, m.Rows, m.Columns)
	case m.stride() < m.Columns:
		return argument("%s has rows of %d elements, %d apart", name, m.Columns, m.Stride)
	case m.Rows > math.MaxInt32 || m.stride() > math.MaxInt32:
		return argument("%s has %d rows, %d apart; cuBLAS counts up to %d", name, m.Rows, m.stride(), math.MaxInt32)
	}
	return nil
}

// operand is a factor as BLAS sees it: column-major, with the distance between
// columns as leading dimension.
type operand struct {
	addr      uintptr
	transpose bool
	leading   int
}

// gemm is a product as BLAS sees it: an m×n matrix, the sum over k.
type gemm struct {
	m, n, k int
	a, b, c operand
}

// newGEMM turns the row-major product c = a·b into a column-major one.
//
// BLAS reads a row-major matrix as its transpose, with the same leading
// dimension. So it is asked for cᵀ = bᵀ·aᵀ: the factors change places, and each
// is transposed for BLAS exactly if it is for us.
func newGEMM(c, a, b Matrix) (gemm, error) {
	for _, m := range []struct {
		name string
		Matrix
	}{{"the product", c}, {"the left factor", a}, {"the right factor", b}} {
		if err := m.check(m.name); err != nil {
			return gemm{}, err
		}
	}
	if c.Transposed {
		return gemm{}, argument("the product is transposed")
	}
	aRows, aColumns := a.shape()
	bRows, bColumns := b.shape()
	if aRows != c.Rows || aColumns != bRows || bColumns != c.Columns {
		return gemm{}, fmt.Errorf("cublas: %w: (%d×%d)·(%d×%d) is no %d×%d matrix", runtime.ErrShape,
			aRows, aColumns, bRows, bColumns, c.Rows, c.Columns)
	}
	return gemm{
		m: c.Columns, n: c.Rows, k: aColumns,
		a: operand{b.Addr, b.Transposed, b.stride()},
		b: operand{a.Addr, a.Transposed, a.stride()},
		c: operand{c.Addr, false, c.stride()},
	}, nil
}

func argument(format string, args ...any) error {
	return fmt.Errorf("cublas: %w: %s", runtime.ErrArgument, fmt.Sprintf(format, args...))
}
