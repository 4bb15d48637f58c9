package differ

//go:generate env GOWORK=off go run -C ../../../internal/simd/gen ./differ -out ../../../delta/internal/differ/avx2_amd64.s -stubs ../../../delta/internal/differ/avx2_amd64.go -pkg differ

import "github.com/tutti-go/tutti/internal/simd"

// listBlocks is List for the leading words that fill whole vectors.
func listBlocks(list []uint16, old, now []uint64, size int) (done, found int) {
	rounds := len(now) / 4
	if !simd.AVX2 || rounds == 0 {
		return 0, 0
	}
	switch size {
	case 1:
		found = differ1AVX2(&list[0], &old[0], &now[0], rounds)
	case 2:
		found = differ2AVX2(&list[0], &old[0], &now[0], rounds)
	case 4:
		found = differ4AVX2(&list[0], &old[0], &now[0], rounds)
	default:
		found = differ8AVX2(&list[0], &old[0], &now[0], rounds)
	}
	return 4 * rounds, found
}
