package classes

//go:generate env GOWORK=off go run -C ../../../internal/simd/gen ./classes -out ../../../delta/internal/classes/avx2_amd64.s -stubs ../../../delta/internal/classes/avx2_amd64.go -pkg classes

import "github.com/tutti-go/tutti/internal/simd"

const (
	perRound = 32 // classes listed in a round
	maxSpan  = 32 // largest span of classes that is counted
)

// listFast is List for the leading elements, and returns their number.
func listFast(classes, data []byte, size int) (done int) {
	rounds := len(classes) / perRound
	if !simd.AVX2 || rounds == 0 {
		return 0
	}
	switch size {
	case 2:
		list2AVX2(&classes[0], &data[0], rounds)
	case 4:
		list4AVX2(&classes[0], &data[0], rounds)
	default:
		return 0
	}
	return perRound * rounds
}

// countFast counts the classes of a whole chunk, and returns the lowest class and the number of classes up to the
// highest, unless these are too many.
func countFast(part []uint8, counts []uint16) (lowest uint8, span int) {
	if !simd.AVX2 || len(part) != chunkLen {
		return 0, 0
	}
	first, span := countAVX2(&part[0], &counts[0])
	if span > maxSpan {
		return 0, 0
	}
	return uint8(first), span
}

// findFast is find for a whole chunk.
func findFast(part []uint8, class uint8, rank int) (position int, ok bool) {
	if !simd.AVX2 || len(part) != chunkLen {
		return 0, false
	}
	return findAVX2(&part[0], class, rank), true
}
