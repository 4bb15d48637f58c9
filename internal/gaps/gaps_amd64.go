package gaps

//go:generate env GOWORK=off go run -C ../simd/gen ./gaps -out ../../gaps/bmi2_amd64.s -stubs ../../gaps/bmi2_amd64.go -pkg gaps

import "github.com/tutti-go/tutti/internal/simd"

// The functions of this file handle a leading part, and return its length; 0 without AVX2.

// scan stores the gaps before all indices but the first.
func scan(gaps []uint32, idx []int32) (done int, sum uint64, or uint32) {
	rounds := (len(idx) - 1) / 8
	if !simd.AVX2 || rounds == 0 {
		return 0, 0, 0
	}
	var sums [8]uint64
	or = scanAVX2(&gaps[0], &idx[0], rounds, &sums)
	for _, s := range sums {
		sum += s
	}
	return 8 * rounds, sum, or
}

// sumSome sums quotients like sumThree, if all are below 2^25.
func sumSome(gaps []uint32, k uint) (done int, sums [3]int) {
	if !simd.AVX2 || len(gaps) < 8 {
		return 0, sums
	}
	var parts [24]uint32
	sumsAVX2(&gaps[0], len(gaps)/8, k, &parts)
	for i, s := range parts {
		sums[i/8] += int(s)
	}
	return len(gaps) &^ 7, sums
}

// putFast writes low bits, or quotients up to 27, of an even number of gaps, if dst has room for 8 bytes after its
// end.
func putFast(dst []byte, gaps []uint32, k uint, high bool) bool {
	if !simd.AVX2 || cap(dst)-len(dst) < 8 || len(gaps)%2 != 0 || k > 28 {
		return false
	}
	if high {
		highBMI2(&dst[:1][0], &gaps[0], len(gaps)/2, k)
	} else {
		lowBMI2(&dst[:1][0], &gaps[0], len(gaps)/2, k)
	}
	return true
}

// decodeFast decodes the whole block, if there are enough ones in high.
func decodeFast(idx []int32, low, high []byte, k uint, next int32) bool {
	return simd.AVX2 && len(idx) > 0 && k <= 25 && decodeAVX2(idx, low, high, k, next)
}
