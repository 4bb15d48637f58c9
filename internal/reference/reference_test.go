package reference

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

func TestTile(t *testing.T) {
	block := []byte("abcdefg")
	for offset := range 10 {
		for n := range 40 {
			got := Tile(block, offset, n)
			for i, b := range got {
				require.Equal(t, block[(offset+i)%len(block)], b, "offset %d, %d bytes, byte %d", offset, n, i)
			}
			require.True(t, tiles(got, block, offset), "offset %d, %d bytes", offset, n)
			for i := range got {
				got[i]++
				require.False(t, tiles(got, block, offset), "offset %d, %d bytes, byte %d is wrong", offset, n, i)
				got[i]--
			}
		}
	}
}

// Inputs are chosen so that results differ between operations, whatever the
// number of ranks: otherwise the matrix could not tell them apart.
func TestReferencesDiffer(t *testing.T) {
	for _, dt := range dtype.All() {
		for _, size := range []int{2, 3, 8, 32} {
			for _, a := range reductions.All() {
				for _, b := range reductions.All() {
					if a == b || !a.Defined(dt) || !b.Defined(dt) || dt == dtype.Bool {
						continue
					}
					right := New(dt, a, size)
					var wrong []byte // what b makes of the inputs for a
					ref := &Result{dt: dt}
					inputs := make([][]byte, size)
					for r := range inputs {
						inputs[r] = Input(dt, a, r, size)
					}
					if dt.IsFloat() {
						ref.floats(b, inputs)
						wrong = Encode(dt, ref.value...)
					} else {
						ref.ints(b, inputs)
						wrong = ref.exact
					}
					n, err := right.Check(wrong, 0)
					assert.Error(t, err, "%v of %v on %d ranks passes for %v", b, dt, size, a)
					assert.Positive(t, n)
				}
			}
		}
	}
}

// A sum rounded after each addition is within the tolerance, and in the range of every type, on many ranks too.
func TestRoundedSumsAreRight(t *testing.T) {
	for _, dt := range dtype.All() {
		for _, op := range []reductions.Op{reductions.Sum, reductions.Max} {
			for _, size := range []int{1, 3, 100} {
				if !dt.IsFloat() {
					continue
				}
				sum := Input(dt, op, 0, size)
				for rank := 1; rank < size; rank++ {
					values := decode(dt, sum)
					for i, x := range decode(dt, Input(dt, op, rank, size)) {
						values[i] = reduceFloats(op, values[i], x)
					}
					sum = Encode(dt, values...)
				}
				long := append(Tile(sum, 0, 3*len(sum)), sum[:5*dt.Size()]...)
				wrong, err := New(dt, op, size).Check(long, 0)
				require.NoError(t, err, "%v of %v on %d ranks", op, dt, size)
				require.Zero(t, wrong)
				long[len(long)-dt.Size()] ^= 0xff
				wrong, err = New(dt, op, size).Check(long, 0)
				require.ErrorContains(t, err, "element 3031 is")
				require.Equal(t, 1, wrong)
			}
		}
	}
}
