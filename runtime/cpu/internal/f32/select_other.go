//go:build !amd64

package f32

// Without vector kernels no element is handled in blocks: the functions of select.go handle all of them one by one.

func selectBlocks([]float32, int32, uint32, uint32, []int32, []float32, bool) (done, found int) {
	return 0, 0
}

func addSelectBlocks(x, from, grad []float32, factor float32, base int32, lo, width uint32,
	idx []int32, val []float32, take bool, access Access) (added, done, found int) {
	return 0, 0, 0
}

func countBlocks([]float32, uint32, uint32) (done, found int) {
	return 0, 0
}

func sumBlocks([]float32, *[lanes]float64) (done int) {
	return 0
}

func squareBlocks([]float32, float64, *[lanes]float64) (done int) {
	return 0
}

func scaleBlocks(dst, src []float32, s float32) (done int) {
	return 0
}
