package crc

//go:generate env GOWORK=off go run -C ../../../internal/simd/gen ./crc -out ../../../delta/internal/crc/clmul_amd64.s -stubs ../../../delta/internal/crc/clmul_amd64.go -pkg crc

import (
	"golang.org/x/sys/cpu"

	"github.com/tutti-go/tutti/internal/simd"
)

var multiplies = cpu.X86.HasPCLMULQDQ && cpu.X86.HasSSE42

func change(idx []int32, bits []byte, size, bytes int) (sum uint32, ok bool) {
	if !simd.AVX2 || !multiplies {
		return 0, false
	}
	t := tables()
	switch size {
	case 1:
		sum = change1CLMUL(&idx[0], &bits[0], len(idx), bytes-1, &t.powers, t.step)
	case 2:
		sum = change2CLMUL(&idx[0], &bits[0], len(idx), bytes-1, &t.powers, t.step)
	case 4:
		sum = change4CLMUL(&idx[0], &bits[0], len(idx), bytes-1, &t.powers, t.step)
	default:
		sum = change8CLMUL(&idx[0], &bits[0], len(idx), bytes-1, &t.powers, t.step)
	}
	return sum, true
}
