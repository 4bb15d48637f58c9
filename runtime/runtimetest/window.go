package runtimetest

import (
	"fmt"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/internal/window"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

var windowTests = []test{
	{"copies", testWindowCopies},
	{"reduce", testWindowReduce},
	{"long reduction", testWindowLongReduction},
	{"order", testWindowOrder},
	{"arguments", testWindowArguments},
}

// window returns a window of this many bytes, and its memory. The end of the test closes it.
func (d *device) window(bytes int) (window.Window, []byte) {
	opener, ok := d.Runtime.(window.Opener)
	if !ok {
		d.Skip("the runtime is no window.Opener")
	}
	host := cpu.New()
	address, err := host.Allocate(bytes)
	require.NoError(d, err)
	memory := hostmem.Slice[byte](address, bytes)
	w, err := opener.OpenWindow(memory)
	require.NoError(d, err)
	d.Cleanup(func() {
		require.NoError(d, w.Close())
		require.NoError(d, w.Close(), "closed twice")
		require.NoError(d, host.Deallocate(address))
		require.NoError(d, host.Close())
	})
	return w, memory
}

// testWindowCopies copies parts of all alignments out and in again.
func testWindowCopies(d *device) {
	w, memory := d.window(10_000)
	for _, size := range []int{0, 1, 15, 4096, 5000} {
		from := d.rng.IntN(len(memory) - size + 1)
		data := d.randomBytes(size)
		src := d.upload(append([]byte{0}, data...)) + 1
		dst := d.upload(make([]byte, size+2))
		require.NoError(d, w.Begin())
		require.NoError(d, w.CopyOut(memory[from:][:size], src))
		require.NoError(d, w.Wait())
		require.Equal(d, data, append([]byte{}, memory[from:][:size]...), "%d bytes", size)
		require.NoError(d, w.CopyIn(dst+1, memory[from:][:size]))
		require.NoError(d, w.Wait())
		want := append(append([]byte{0}, data...), 0)
		require.Equal(d, want, d.download(dst, len(want)), "%d bytes", size)
	}
}

// testWindowReduce reduces operands of both memories, for all types and reductions, also in place, and where nothing is
// aligned.
func testWindowReduce(d *device) {
	const longest = 3*reference.Period + 5
	w, memory := d.window(window.MaxOperands * 8 * (longest + 1))
	for _, dt := range dtype.All() {
		for _, op := range reductions.All() {
			if !op.Defined(dt) {
				continue
			}
			for _, c := range []struct{ operands, n, skew int }{
				{2, longest, 0},
				{3, longest, 1},
				{2 + d.rng.IntN(window.MaxOperands-1), 1 + d.rng.IntN(300), d.rng.IntN(2)},
				{window.MaxOperands, 17, 0},
			} {
				name := fmt.Sprintf("%v of %d times %d %v, skew %d, seed %d", op, c.operands, c.n, dt, c.skew, Seed)
				d.checkWindowReduce(w, memory, dt, op, c.operands, c.n, c.skew, name)
			}
		}
	}
}

func (d *device) checkWindowReduce(
	w window.Window,
	memory []byte,
	dt dtype.DType,
	op reductions.Op,
	count, n, skew int,
	name string,
) {
	size := dt.Size()
	home := d.rng.IntN(count) // of the operand in the device's memory, where the result is
	stride := (n + skew + 1) * 8
	inputs := make([][]byte, count)
	operands := make([]uintptr, count)
	var dst uintptr
	for i := range inputs {
		inputs[i] = reference.Rough(dt, op, i, count)
		data := reference.Tile(inputs[i], 0, n*size)
		if i == home {
			dst = d.block((skew + n + 1) * size)
			defer func() { require.NoError(d, d.Deallocate(dst)) }()
			require.NoError(d, d.Fill(dst, (skew+n+1)*size, dtype.U8, 0))
			require.NoError(d, d.CopyIn(dst+uintptr(skew*size), data))
			operands[i] = dst + uintptr(skew*size)
			continue
		}
		place := memory[i*stride+skew*size:]
		copy(place, data)
		operands[i] = hostmem.Addr(place)
	}
	require.NoError(d, w.Begin(), name)
	require.NoError(d, w.Reduce(operands[home], operands, n, dt, op), name)
	require.NoError(d, w.Wait(), name)
	got := d.download(dst, (skew+n+1)*size)
	require.NoError(d, reference.NewOrdered(dt, op, inputs...).Check(got[skew*size:][:n*size], 0), name)
	outside := append(got[:skew*size:skew*size], got[(skew+n)*size:]...)
	require.Equal(d, make([]byte, (skew+1)*size), outside, "%s: written outside", name)
}

// testWindowLongReduction reduces more than a device may have room for at a time.
func testWindowLongReduction(d *device) {
	const n = 9<<20 + 33
	w, memory := d.window(3 * (n + 8) * 8)
	d.checkWindowReduce(w, memory, dtype.I8, reductions.Max, 3, n, 1, fmt.Sprint("seed ", Seed))
}

// testWindowOrder: work is behind the compute stream, copies out behind reductions, and these behind each other.
func testWindowOrder(d *device) {
	const n = 1 << 16
	w, memory := d.window(3 * 4 * n)
	part := func(i int) []byte { return memory[i*4*n:][:4*n] }
	x := d.allocate(4 * n)
	y := d.allocate(4 * n)
	z := d.allocate(4 * n)
	for i := range hostmem.Slice[float32](hostmem.Addr(memory), n) {
		hostmem.Slice[float32](hostmem.Addr(memory), n)[i] = 2
	}
	for round := range 20 {
		before := float64(1 + 2*round)
		require.NoError(d, d.Fill(x, n, dtype.F32, before))
		require.NoError(d, w.Begin())
		require.NoError(d, w.CopyOut(part(1), x))
		require.NoError(d, w.Wait())
		require.NoError(d, w.Reduce(x, []uintptr{x, hostmem.Addr(memory)}, n, dtype.F32, reductions.Sum))
		require.NoError(d, w.Reduce(y, []uintptr{x, hostmem.Addr(part(1))}, n, dtype.F32, reductions.Sum))
		require.NoError(d, w.CopyOut(part(2), y))
		require.NoError(d, w.CopyIn(z, part(1)))
		require.NoError(d, w.Wait())
		for name, got := range map[string][]byte{"behind reductions": part(2), "behind the copy": d.download(z, 4*n)} {
			want := float32(before)
			if name == "behind reductions" {
				want += want + 2
			}
			for _, v := range hostmem.Slice[float32](hostmem.Addr(got), n) {
				if v != want {
					require.Equal(d, want, v, "%s, round %d", name, round)
				}
			}
		}
	}
}

func testWindowArguments(d *device) {
	w, memory := d.window(1000)
	x := d.allocate(1000)
	elsewhere := make([]byte, 10)
	start := hostmem.Addr(memory)
	require.NoError(d, w.Reduce(x, []uintptr{x, start}, 0, dtype.F32, reductions.Sum))
	for name, err := range map[string]error{
		"other memory": w.CopyOut(elsewhere, x),
		"from other":   w.CopyIn(x, elsewhere),
		"no source":    w.CopyOut(memory[:4], 0),
		"one operand":  w.Reduce(x, []uintptr{x}, 1, dtype.F32, reductions.Sum),
		"too many":     w.Reduce(x, make([]uintptr, window.MaxOperands+1), 1, dtype.F32, reductions.Sum),
		"nil operand":  w.Reduce(x, []uintptr{x, 0}, 1, dtype.F32, reductions.Sum),
		"nil result":   w.Reduce(0, []uintptr{x, start}, 1, dtype.F32, reductions.Sum),
		"negative":     w.Reduce(x, []uintptr{x, start}, -1, dtype.F32, reductions.Sum),
		"undefined":    w.Reduce(x, []uintptr{x, start}, 1, dtype.I32, reductions.Avg),
	} {
		assert.ErrorIs(d, err, runtime.ErrArgument, name)
	}
	_, err := d.Runtime.(window.Opener).OpenWindow(nil)
	assert.ErrorIs(d, err, runtime.ErrArgument)
}
