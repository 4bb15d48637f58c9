package f32

//go:generate env GOWORK=off go run -C ../../../../internal/simd/gen ./select -out ../../../runtime/cpu/internal/f32/avx2_amd64.s -stubs ../../../runtime/cpu/internal/f32/avx2_amd64.go -pkg f32

import (
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/simd"
)

// selectChunk is the number of elements that one call of a kernel handles, which bounds the time that the garbage
// collector waits. It is a multiple of all block sizes.
const selectChunk = simd.Chunk / 4

// addTile is the number of elements that addSelectAVX2 has in the cache at a time.
const addTile = 512

func selectBlocks(x []float32, base int32, lo, width uint32, idx []int32, val []float32, take bool) (done, found int) {
	if !simd.AVX2 {
		return 0, 0
	}
	for {
		chunk := x[done:min(len(x), done+selectChunk)]
		d, f := selectAVX2(chunk, base+int32(done), lo, width, idx[found:], val[found:], take)
		done += d
		found += f
		if d < selectChunk { // the end of x or of the room
			return done, found
		}
	}
}

// addSelectBlocks continues to add where selectBlocks would stop for lack of room: all elements before added have
// their gradient, and those before done are selected from.
func addSelectBlocks(x, from, grad []float32, factor float32, base int32, lo, width uint32,
	idx []int32, val []float32, take bool, access Access) (added, done, found int) {
	if !simd.AVX2 {
		return 0, 0, 0
	}
	var memory [addTile]float32
	var tile *[addTile]float32
	if access == Streaming && hostmem.Addr(x)%32 == 0 {
		tile = &memory
	}
	for {
		to := min(len(x), added+selectChunk)
		a, d, f := addSelectAVX2(x[added:to], from[added:to], grad[added:to], factor,
			base+int32(added), lo, width, idx[found:], val[found:], take, access == Ahead, tile)
		if done == added {
			done += d
			found += f
		}
		added += a
		if done < added { // no room is left: only add from now on
			idx = idx[:found]
			val = val[:found]
		}
		if a < selectChunk { // the end of x
			return added, done, found
		}
	}
}

func countBlocks(x []float32, lo, width uint32) (done, found int) {
	if !simd.AVX2 {
		return 0, 0
	}
	for {
		d, f := countAVX2(x[done:min(len(x), done+selectChunk)], lo, width)
		done += d
		found += f
		if d < selectChunk {
			return done, found
		}
	}
}

func scaleBlocks(dst, src []float32, s float32) (done int) {
	if !simd.AVX2 {
		return 0
	}
	for {
		d := scaleAVX2(dst[done:], src[done:min(len(src), done+selectChunk)], s)
		done += d
		if d < selectChunk {
			return done
		}
	}
}

func sumBlocks(x []float32, acc *[lanes]float64) (done int) {
	if !simd.AVX2 {
		return 0
	}
	return sumAVX2(x, acc)
}

func squareBlocks(x []float32, center float64, acc *[lanes]float64) (done int) {
	if !simd.AVX2 {
		return 0
	}
	return squareAVX2(x, center, acc)
}
