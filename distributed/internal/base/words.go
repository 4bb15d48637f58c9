package base

// WordSize is the size of F32 values, I32 indices and lengths.
const WordSize = 4

// At returns the address of element i of an array of words.
func At(p uintptr, i int) uintptr {
	return p + uintptr(i)*WordSize
}

// Displacements turns lengths into displacements and returns their sum.
func Displacements(lengths, displs []int) int {
	sum := 0
	for r, n := range lengths {
		displs[r] = sum
		sum += n
	}
	return sum
}
