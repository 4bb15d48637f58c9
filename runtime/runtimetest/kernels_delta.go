package runtimetest

import (
	"hash/crc32"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

func testDelta(d *device) {
	for _, dt := range dtype.All() {
		switch dt.Size() {
		case 1:
			testDeltaOf[uint8](d, dt)
		case 2:
			testDeltaOf[uint16](d, dt)
		case 4:
			testDeltaOf[uint32](d, dt)
		default:
			testDeltaOf[uint64](d, dt)
		}
	}
}

// testDeltaOf changes arrays of any bits, in few or many places, and compares the list with one made element by element.
func testDeltaOf[T uint8 | uint16 | uint32 | uint64](d *device, dt dtype.DType) {
	bits := 8 * dt.Size()
	position := func(v T) int64 { // in the order of the type: of a float by sign and magnitude
		v64 := int64(v) << (64 - bits) >> (64 - bits)
		if dt.IsFloat() && v64 < 0 {
			return -1 - int64(uint64(v)&^(1<<(bits-1)))
		}
		return v64
	}
	checksums := func(x []T) (sums []uint32) {
		for part := range slices.Chunk(x, runtime.DeltaBlock) {
			sums = append(sums, crc32.Checksum(hostmem.Bytes(part), crc32.MakeTable(crc32.Castagnoli)))
		}
		return sums
	}
	lengths := []int{0, 1, 2, 7, 100, 4096, 20_000, 50_001}
	if dt == dtype.BF16 || dt == dtype.U8 {
		lengths = append(lengths, 2*runtime.DeltaBlock+9)
	}
	for i, n := range lengths {
		for j, share := range []float64{0, 0.01, 0.3, 1} {
			if !extended && n >= 20_000 && (i+j+int(dt))%2 == 0 {
				continue // one of the next type has it
			}
			if n > runtime.DeltaBlock && testing.Short() && j < 2 {
				continue // whose few changes the shorter arrays have
			}
			d.each(func(d *device) {
				old, now := make([]T, n), make([]T, n)
				if n > runtime.DeltaBlock {
					share /= 100
				}
				var idx []int32
				var diffs []T
				zeros := d.rng.IntN(4) == 0
				for i := range old {
					if old[i] = T(d.rng.Uint64()) << d.rng.IntN(bits); zeros {
						old[i] = 0
					}
					if now[i] = old[i]; d.rng.Float64() < share {
						now[i] ^= T(1+d.rng.IntN(255)) << d.rng.IntN(bits-7)
						idx, diffs = append(idx, int32(i)), append(diffs, T(uint64(position(now[i])-position(old[i]))))
					}
				}
				from, to := place(d, old), place(d, now)
				room := len(idx) + []int{0, 3, -len(idx) / 3}[d.rng.IntN(3)]
				l := runtime.Changes{Idx: place(d, make([]int32, room)), Diff: place(d, make([]T, room)), N: room,
					Len: place(d, []int32{-1}), Sums: place(d, checksums(old))}
				compared, base := l, from
				if zeros {
					base = 0
				}
				sums := d.rng.IntN(4) > 0
				if !sums {
					compared.Sums = 0
				}
				require.NoError(d, d.Diff(base, to, dt, n, compared))
				require.EqualValues(d, len(idx), readOne[int32](d, l.Len), "length, seed %d", Seed)
				listed := min(room, len(idx))
				require.True(d, slices.Equal(idx[:listed], read[int32](d, l.Idx, room)[:listed]), "positions, seed %d", Seed)
				require.True(d, slices.Equal(diffs[:listed], read[T](d, l.Diff, room)[:listed]), "differences, seed %d", Seed)
				require.True(d, !sums || slices.Equal(checksums(now), read[uint32](d, l.Sums, len(checksums(now)))), "checksums, seed %d", Seed)

				// There and back, with positions that are in no array behind the last one.
				l = runtime.Changes{Idx: place(d, append(idx, int32(n), math.MaxInt32, -1)), Diff: place(d, append(diffs, 1, 1, 1)), N: len(idx) + 3,
					Sums: place(d, checksums(old))}
				if d.rng.IntN(2) == 0 {
					l.N, l.Len = l.N+2, place(d, []int32{int32(l.N)})
					l.Idx, l.Diff = place(d, append(read[int32](d, l.Idx, l.N-2), 0, 0)), place(d, append(read[T](d, l.Diff, l.N-2), 1, 1))
				}
				for _, back := range []bool{false, true} {
					want := now
					if back {
						want = old
					}
					require.NoError(d, d.Patch(from, dt, n, l, back))
					require.True(d, slices.Equal(want, read[T](d, from, n)), "elements, back: %v, seed %d", back, Seed)
					require.True(d, slices.Equal(checksums(want), read[uint32](d, l.Sums, len(checksums(want)))), "checksums, back: %v, seed %d", back, Seed)
				}
			}, "%v, %d, %v", dt, n, share)
		}
	}
}

func testDeltaArguments(d *device) {
	p := place(d, make([]uint64, 8))
	l := runtime.Changes{Idx: p, Diff: p, N: 4, Len: p, Sums: p}
	noIdx, noDiff, noLen := l, l, l
	noIdx.Idx, noDiff.Diff, noLen.Len = 0, 0, 0
	failures := []error{d.Diff(p, 0, dtype.F32, 4, l), d.Diff(p, p, 0, 4, l), d.Diff(p, p, dtype.F32, 4, noIdx), d.Diff(p, p, dtype.F32, 4, noDiff),
		d.Diff(p, p, dtype.F32, 4, noLen), d.Patch(0, dtype.F32, 4, l, false), d.Patch(p, 255, 4, l, false), d.Patch(p, dtype.F32, 4, noIdx, false), d.Patch(p, dtype.F32, 4, noDiff, false)}
	for _, n := range []int{-1, math.MaxInt32 + 1} {
		far := l
		far.N = n
		failures = append(failures, d.Diff(p, p, dtype.F32, n, l), d.Diff(p, p, dtype.F32, 4, far), d.Patch(p, dtype.F32, n, l, true), d.Patch(p, dtype.F32, 4, far, true))
	}
	for i, err := range failures {
		require.ErrorIs(d, err, runtime.ErrArgument, "call %d", i)
	}
	d.synchronize()
}
