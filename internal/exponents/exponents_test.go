package exponents

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const seed = 50

// kinds are elements of two and four bytes, by what they are like.
var kinds = map[string]func(r *rand.Rand) uint32{
	"normal":    func(r *rand.Rand) uint32 { return math.Float32bits(float32(r.NormFloat64() * 0.02)) },
	"random":    func(r *rand.Rand) uint32 { return r.Uint32() },
	"zeros":     func(*rand.Rand) uint32 { return 0 },
	"one sign":  func(r *rand.Rand) uint32 { return 0x8000_0000 * uint32(r.IntN(2)) },
	"NaNs":      func(r *rand.Rand) uint32 { return 0x7f80_0000 | r.Uint32()&0x80ff_ffff },
	"two":       func(r *rand.Rand) uint32 { return 0x3f80_0000 << uint(r.IntN(2)) },
	"geometric": func(r *rand.Rand) uint32 { return uint32(min(r.ExpFloat64()*1.45, 200)) << 23 },
	"skewed": func(r *rand.Rand) uint32 { // codes longer than the longest
		exponent := 0
		for r.IntN(8) > 0 && exponent < 255 {
			exponent++
		}
		return uint32(255-exponent)<<23 | r.Uint32()&0x807f_ffff
	},
}

// elements returns n elements of that size.
func elements(r *rand.Rand, n, size int, element func(r *rand.Rand) uint32) []byte {
	var data []byte
	for range n {
		if size == 2 {
			data = binary.LittleEndian.AppendUint16(data, uint16(element(r)>>16))
		} else {
			data = binary.LittleEndian.AppendUint32(data, element(r))
		}
	}
	return data
}

func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(seed, 0))
	for name, element := range kinds {
		for _, size := range []int{2, 4} {
			for _, n := range []int{0, 1, 2, 3, 4, 5, 7, 31, 100, 1001, 4096, 70_000, Chunk - 1, Chunk, Chunk + 1, 2*Chunk + 77} {
				data := elements(r, n, size, element)
				code := Append([]byte{1, 2}, data, size)
				require.Equal(t, []byte{1, 2}, code[:2])
				code = code[2:]
				require.LessOrEqual(t, len(code), Longest(len(data), size), "%s, %d of %d bytes, seed %d", name, n, size, seed)
				got := make([]byte, len(data))
				require.NoError(t, Decode(got, code, size), "%s, %d of %d bytes, seed %d", name, n, size, seed)
				require.True(t, bytes.Equal(data, got), "%s, %d of %d bytes, seed %d", name, n, size, seed)
			}
		}
	}
}

// TestEntropy compares lengths with the entropy of exponents.
func TestEntropy(t *testing.T) {
	r := rand.New(rand.NewPCG(seed, 1))
	for _, size := range []int{2, 4} {
		for _, name := range []string{"normal", "skewed"} {
			data := elements(r, Chunk, size, kinds[name])
			frequencies := map[byte]float64{}
			for i := 0; i < len(data); i += size {
				top := binary.LittleEndian.Uint16(data[i+size-2:])
				frequencies[byte(top>>7)]++
			}
			bits := float64(8 * Chunk * (size - 1))
			for _, n := range frequencies {
				bits += n * math.Log2(Chunk/n)
			}
			code := Append(nil, data, size)
			t.Logf("%s, %d bytes: %.4f of the elements", name, size, float64(len(code))/float64(len(data)))
			assert.Less(t, 8*float64(len(code))/bits, 1.01, "%s, %d bytes, seed %d", name, size, seed)
		}
	}
}

// reference decodes a chunk of elements of two bytes, bit by bit, as the package's documentation says.
func reference(t *testing.T, n int, code []byte) []byte {
	t.Helper()
	require.Equal(t, byte(1), code[0])
	others := code[1 : 1+n]
	code = code[n:]
	lowest := int(code[1])
	count := int(code[2]) - lowest + 1
	lengths := make([]int, count)
	for i := range lengths {
		lengths[i] = int(code[3+i/2] >> (4 * (i % 2)) & 15)
	}
	code = code[3+(count+1)/2:]
	type sequence struct{ bits, length int }
	exponentOf := map[sequence]byte{}
	next := 0
	for length := 1; length <= 11; length++ {
		for i, l := range lengths {
			if l == length {
				exponentOf[sequence{next, length}] = byte(lowest + i)
				next++
			}
		}
		next *= 2
	}
	q := (n + 3) / 4
	begin := 12
	var exponents []byte
	for i := range 4 {
		part := code[begin:]
		bit := 0
		for range min((i+1)*q, n) - min(i*q, n) {
			var s sequence
			for {
				s.bits = 2*s.bits + int(part[bit/8]>>(bit%8)&1)
				s.length++
				bit++
				require.LessOrEqual(t, s.length, 11)
				if exponent, ok := exponentOf[s]; ok {
					exponents = append(exponents, exponent)
					break
				}
			}
		}
		begin += (bit + 7) / 8
		if i < 3 {
			require.Equal(t, int(binary.LittleEndian.Uint32(code[4*i:])), (bit+7)/8)
		}
	}
	require.Len(t, code, begin)
	var data []byte
	for i, exponent := range exponents {
		x := uint16(exponent)<<8 | uint16(others[i])
		data = binary.LittleEndian.AppendUint16(data, x>>1|x<<15)
	}
	return data
}

func TestReference(t *testing.T) {
	r := rand.New(rand.NewPCG(seed, 2))
	for _, name := range []string{"normal", "skewed", "NaNs", "two", "geometric"} {
		for _, n := range []int{100, 1023, 10_001} {
			data := elements(r, n, 2, kinds[name])
			code := Append(nil, data, 2)
			if code[0] == kindCoded && code[n+1] != code[n+2] {
				require.Equal(t, data, reference(t, n, code), "%s, %d, seed %d", name, n, seed)
			}
		}
	}
}

// TestGolden: what is coded stays readable, and the code of elements the same.
func TestGolden(t *testing.T) {
	data := elements(rand.New(rand.NewPCG(1, 2)), 40, 2, kinds["normal"])
	code, err := hex.DecodeString(goldenCode)
	require.NoError(t, err)
	require.Equal(t, goldenCode, hex.EncodeToString(Append(nil, data, 2)))
	got := make([]byte, len(data))
	require.NoError(t, Decode(got, code, 2))
	require.Equal(t, data, got)
	for size, want := range map[int]uint32{2: golden2, 4: golden4} {
		long := elements(rand.New(rand.NewPCG(3, 4)), Chunk+5000, size, kinds["normal"])
		require.Equal(t, want, crc32.ChecksumIEEE(Append(nil, long, size)), "%d bytes", size)
	}
}

// TestDamaged: what no encoder wrote is refused, and of a code that is cut, or longer, nothing is taken.
func TestDamaged(t *testing.T) {
	r := rand.New(rand.NewPCG(seed, 3))
	data := elements(r, 1000, 2, kinds["normal"])
	code := Append(nil, data, 2)
	got := make([]byte, len(data))
	for n := range code {
		require.ErrorIs(t, Decode(got, code[:n], 2), ErrDamaged, "%d of %d bytes", n, len(code))
	}
	require.ErrorIs(t, Decode(got, append(slices.Clone(code), 0), 2), ErrDamaged)
	count := int(code[1002]) - int(code[1001]) + 1
	for i := range 2 + (count+1)/2 + headBytes {
		for bit := range 8 {
			damaged := slices.Clone(code)
			damaged[1001+i] ^= 1 << bit
			require.ErrorIs(t, Decode(got, damaged, 2), ErrDamaged, "bit %d of byte %d of the head, seed %d", bit, i, seed)
		}
	}
}

func FuzzDecode(f *testing.F) {
	r := rand.New(rand.NewPCG(seed, 4))
	for _, element := range kinds {
		f.Add(Append(nil, elements(r, 500, 2, element), 2), uint16(500), false)
		f.Add(Append(nil, elements(r, 77, 4, element), 4), uint16(77), true)
	}
	f.Fuzz(func(t *testing.T, code []byte, n uint16, wide bool) {
		size := 2
		if wide {
			size = 4
		}
		data := make([]byte, size*int(n))
		if Decode(data, code, size) != nil {
			return
		}
		again := make([]byte, len(data))
		require.NoError(t, Decode(again, Append(nil, data, size), size))
		require.Equal(t, data, again)
	})
}

func BenchmarkExponents(b *testing.B) {
	r := rand.New(rand.NewPCG(seed, 5))
	for _, size := range []int{2, 4} {
		data := elements(r, 4*Chunk, size, kinds["normal"])
		code := Append(nil, data, size)
		name := map[int]string{2: "bf16", 4: "f32"}[size]
		b.Run(name+"-append", func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				code = Append(code[:0], data, size)
			}
		})
		b.Run(name+"-decode", func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				if err := Decode(data, code, size); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

const (
	goldenCode = "01f086067107f93c1a3331f3222dda20ed8600f785a2474c3caee08818e0b32f4a556c5ff33cfe68" +
		"d0737a555523220400000004000000030000007b93ea0b77a1b4018a8c8e126f7e00"
	golden2 = 0xcd83157a
	golden4 = 0xc0e4be43
)
