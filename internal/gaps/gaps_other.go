//go:build !amd64

package gaps

func scan([]uint32, []int32) (done int, sum uint64, or uint32) {
	return
}

func sumSome([]uint32, uint) (done int, sums [3]int) {
	return
}

func putFast([]byte, []uint32, uint, bool) bool {
	return false
}

func decodeFast([]int32, []byte, []byte, uint, int32) bool {
	return false
}
