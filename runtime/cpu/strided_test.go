package cpu

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/internal/strided"
)

// TestStridedElementsOfAnySize goes beyond the element sizes that every device
// has: here any number of bytes is an element.
func TestStridedElementsOfAnySize(t *testing.T) {
	const seed, rows, columns = 1, 37, 53
	rng := rand.New(rand.NewPCG(seed, 0))
	rt := newRuntime(t)
	for _, size := range []int{1, 3, 5, 8, 12, 16, 100} {
		src, dst := allocate(t, rt, rows*columns*size), allocate(t, rt, rows*columns*size)
		from, to := hostmem.Slice[byte](src, rows*columns*size), hostmem.Slice[byte](dst, rows*columns*size)
		for i := range from {
			from[i] = byte(rng.Uint32())
		}
		require.NoError(t, rt.CopyStrided(dst, []int{rows, 1}, src, []int{1, columns}, []int{columns, rows}, size))
		for r := range rows {
			for c := range columns {
				want := from[(r*columns+c)*size:][:size]
				require.Equal(t, want, to[(c*rows+r)*size:][:size], "seed %d: row %d, column %d, %d bytes", seed, r, c, size)
			}
		}
		free(t, rt, src)
		free(t, rt, dst)
	}
}

func TestBringNearest(t *testing.T) {
	far, near, last := strided.Axis{Size: 2, Dst: 12, Src: 1}, strided.Axis{Size: 3, Dst: 4, Src: 9}, strided.Axis{Size: 4, Dst: 1, Src: 2}
	all := []strided.Axis{far, near, last}
	bringNearest(all)
	assert.Equal(t, []strided.Axis{near, far, last}, all)

	last.Src = 1
	all = []strided.Axis{far, near, last}
	bringNearest(all)
	assert.Equal(t, []strided.Axis{far, near, last}, all, "the last axis is as near")
}

func TestStridedDoesNotAllocateGoMemory(t *testing.T) {
	rt := newRuntime(t)
	src, dst := allocate(t, rt, 1<<16), allocate(t, rt, 1<<16)
	shape, strides, transposed := []int{64, 64}, []int{64, 1}, []int{1, 64}
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		_ = rt.CopyStrided(dst, strides, src, transposed, shape, 4)
		_ = rt.Fill(dst, 1000, dtype.F32, 1)
		_ = rt.Copy(dst, src, 1000)
	}))
	free(t, rt, src)
	free(t, rt, dst)
}

func BenchmarkTranspose(b *testing.B) {
	rt := New()
	for _, n := range []int{1000, 4096} {
		for _, size := range []int{1, 2, 4, 8} {
			b.Run(fmt.Sprintf("%dx%d_of_%dB", n, n, size), func(b *testing.B) {
				src, _ := rt.Allocate(n * n * size)
				dst, _ := rt.Allocate(n * n * size)
				require.NoError(b, rt.Fill(src, n*n*size, dtype.U8, 1))
				b.SetBytes(int64(2 * n * n * size))
				b.ReportAllocs()
				for b.Loop() {
					require.NoError(b, rt.CopyStrided(dst, []int{n, 1}, src, []int{1, n}, []int{n, n}, size))
				}
				require.NoError(b, rt.Deallocate(src))
				require.NoError(b, rt.Deallocate(dst))
			})
		}
	}
	require.NoError(b, rt.Close())
}
