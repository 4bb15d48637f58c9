package cublas

// Matrix is a matrix of bfloat16 elements in device memory, in row-major order: element (i, j) is i*Stride + j
// elements after the first.
type Matrix struct {
	Addr          uintptr // of the first element
	Rows, Columns int     // as stored
	// Stride is the distance between rows in elements; 0 means Columns.
	Stride int
	// Transposed makes a factor count as its transpose.
	Transposed bool
}

// stride is the distance between rows in elements.
func (m Matrix) stride() int {
	if m.Stride == 0 {
		return m.Columns
	}
	return m.Stride
}

// operand is a factor in BLAS's terms: column-major, with the distance between columns as leading dimension.
type operand struct {
	addr      uintptr // of the first element
	transpose bool    // it counts as its transpose
	leading   int     // in elements
}

// gemm is a product in BLAS's terms: an m×n matrix, summed over k.
type gemm struct {
	m int     // rows of c
	n int     // columns of c
	k int     // columns of a, rows of b
	a operand // m×k after transposition
	b operand // k×n after transposition
	c operand // the result
}

// newGEMM turns the row-major product c = a·b into a column-major one.
//
// BLAS reads a row-major matrix as its transpose with the same leading dimension. So the call computes cᵀ = bᵀ·aᵀ:
// the factors are swapped, and each is transposed for BLAS exactly if it is transposed here.
func newGEMM(c, a, b Matrix) gemm {
	inner := a.Columns
	if a.Transposed {
		inner = a.Rows
	}
	return gemm{
		m: c.Columns,
		n: c.Rows,
		k: inner,
		a: operand{b.Addr, b.Transposed, b.stride()},
		b: operand{a.Addr, a.Transposed, a.stride()},
		c: operand{c.Addr, false, c.stride()},
	}
}
