package delta

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	goruntime "runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/cc"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// standInVariable is set in processes that have a stand-in for the driver of CUDA, which is opened once a process.
const standInVariable = "TUTTI_TEST_STAND_IN"

// extended asks for what takes long.
var extended = os.Getenv("TUTTI_EXTENDED") != ""

// TestOnStandIn runs what needs a GPU on the stand-in for the driver, which has the kernels compiled for the host.
func TestOnStandIn(t *testing.T) {
	if os.Getenv(standInVariable) != "" {
		t.Skip("is in the process of the stand-in already")
	}
	asserts := fmt.Sprintf(`static_assert(delta_block == %d, "elements of a block");
static_assert(__builtin_offsetof(control, listed) <= %d, "diff uses more of the control");
static_assert(block_threads == %d, "threads");
`, blockLen, controlBytes, threads)
	object, err := cc.Build(t, "clang-16", "testdata/emulator.cpp", asserts, "-std=c++17", "-O2", "-fPIC", "-I../runtime/cuda/kernels",
		"-fno-exceptions", "-fno-rtti", "-Wno-unknown-pragmas", "-Wno-invalid-offsetof", "-c")
	require.NoError(t, err)
	driver, err := cc.Build(t, "cc", "../runtime/cuda/testdata/driver.c", "", "-O2", "-shared", "-fPIC", "-lpthread", object, "-lm")
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	short := "-test.short"
	if extended {
		short = "-test.short=false"
	}
	cmd := exec.Command(self, short, "-test.v", "-test.timeout=5m", "-test.run=^(TestKernels|TestDevice|TestGPU)/^GPU$")
	cmd.Env = append(os.Environ(), standInVariable+"=1", "TUTTI_CUDA_LIB="+driver, "FAKE_CUDA_MEMORY=2147483649")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, test := range []string{"TestKernels/GPU", "TestDevice/GPU", "TestGPUClosed"} {
		require.Contains(t, string(out), "--- PASS: "+test)
	}
}

// openings are runtimes whose memory kernels reach.
func openings() map[string]func(t testing.TB) runtime.Runtime {
	all := map[string]func(t testing.TB) runtime.Runtime{
		"host": func(testing.TB) runtime.Runtime { return cpu.New() },
	}
	if n, err := cuda.Count(); err == nil && n > 0 {
		all["GPU"] = func(t testing.TB) runtime.Runtime { return openCUDA(t) }
	}
	return all
}

func openCUDA(t testing.TB) *cuda.Runtime {
	t.Helper()
	rt, err := cuda.Open(0)
	require.NoError(t, err)
	return rt
}

// memory is the memory of a runtime in which tests put arrays.
type memory struct {
	testing.TB
	runtime.Runtime
	random *rand.Rand
}

// guardBytes are what arrays have before and behind them, which nobody may write.
const guardBytes = 64

// array is one, at an address that is aligned to its elements only.
type array struct {
	place
	memory
	base  uintptr
	bytes int // of the elements
}

// put uploads an array.
func put[T any](m memory, values []T, size int) array {
	m.Helper()
	shift := guardBytes + size*m.random.IntN(guardBytes/size)
	data := slices.Repeat([]byte{0xa5}, shift+len(values)*size+guardBytes)
	copy(data[shift:], hostmem.Bytes(values))
	base, err := m.Allocate(len(data))
	require.NoError(m, err)
	require.NoError(m, m.CopyIn(base, data))
	a := array{place{addr: base + uintptr(shift)}, m, base, len(values) * size}
	if rt, ok := m.Runtime.(*cuda.Runtime); ok {
		a.rt = rt
		a.gpu, err = openGPU(rt)
		require.NoError(m, err)
	} else {
		a.rt = host
	}
	return a
}

// values returns the elements, and checks that nothing was written around them.
func values[T any](a array) []T {
	a.Helper()
	shift := int(a.addr - a.base)
	data := make([]byte, shift+a.bytes+guardBytes)
	require.NoError(a, a.CopyOut(data, a.base))
	elements := data[shift : shift+a.bytes]
	for _, around := range [][]byte{data[:shift], data[shift+a.bytes:]} {
		require.Equal(a, bytes.Repeat([]byte{0xa5}, len(around)), around, "around an array of %d bytes", a.bytes)
	}
	return slices.Clone(view[T](elements))
}

func (a array) free() { _ = a.Deallocate(a.base) }

// TestKernels compares the lists that kernels make with lists made element by element, and applies them, and takes
// them back.
func TestKernels(t *testing.T) {
	for name, open := range openings() {
		t.Run(name, func(t *testing.T) {
			rt := open(t)
			for _, d := range dtype.All() {
				t.Run(d.String(), func(t *testing.T) {
					const seed = 21
					m := memory{t, rt, rand.New(rand.NewPCG(seed, uint64(d)))}
					switch d.Size() {
					case 1:
						testKernels[uint8](m, d)
					case 2:
						testKernels[uint16](m, d)
					case 4:
						testKernels[uint32](m, d)
					default:
						testKernels[uint64](m, d)
					}
				})
			}
			require.NoError(t, rt.Close()) // which finds leaks
		})
	}
}

func testKernels[T uint8 | uint16 | uint32 | uint64](m memory, d dtype.DType) {
	lengths := []int{1, 2, 7, 100, 4096, 20_000, 50_001}
	if d == dtype.BF16 || d == dtype.U8 {
		lengths = append(lengths, blockLen-9, blockLen)
	}
	for i, n := range lengths {
		for j, share := range []float64{0, 0.01, 0.3, 1} {
			if !extended && n >= 20_000 && (i+j+int(d))%2 == 0 {
				continue // one of the next type has it
			}
			if n > 1<<19 {
				share /= 100
			}
			if race.Enabled && n > 20_000 {
				continue
			}
			testChanges[T](m, d, n, share)
		}
	}
}

// position is the place of an element in the order of its type: of a float by sign and magnitude.
func position(v uint64, d dtype.DType) int64 {
	bits := 8 * d.Size()
	signed := int64(v) << (64 - bits) >> (64 - bits)
	if d.IsFloat() && signed < 0 {
		return -1 - int64(uint64(signed)&^(1<<(bits-1)))
	}
	return signed
}

func checksum[T any](x []T) uint32 {
	return crc32.Checksum(hostmem.Bytes(x), crc32.MakeTable(crc32.Castagnoli))
}

// testChanges changes that share of n elements of any bits.
func testChanges[T uint8 | uint16 | uint32 | uint64](m memory, d dtype.DType, n int, share float64) {
	bits := 8 * d.Size()
	old := make([]T, n)
	now := make([]T, n)
	var idx []int32
	var diffs []T
	zeros := m.random.IntN(4) == 0
	for i := range old {
		if !zeros {
			old[i] = T(m.random.Uint64()) << m.random.IntN(bits)
		}
		now[i] = old[i]
		if m.random.Float64() < share {
			now[i] ^= T(1+m.random.IntN(255)) << m.random.IntN(bits-7)
			idx = append(idx, int32(i))
			diffs = append(diffs, T(uint64(position(uint64(now[i]), d)-position(uint64(old[i]), d))))
		}
	}
	what := fmt.Sprintf("%v, %d elements, %v of them", d, n, share)
	from := put(m, old, d.Size())
	defer from.free()
	to := put(m, now, d.Size())
	defer to.free()
	base := from.place
	if zeros {
		base = place{}
	}

	// The list has room for all, for more, or for less.
	var c coder
	room := len(idx) + []int{0, 3, -len(idx) / 3}[m.random.IntN(3)]
	c.reserve(d, room)
	changed, sum, err := c.changes(base, to.place, d, n, checksum(old))
	require.NoError(m, err)
	require.Equal(m, len(idx), changed, what)
	require.Equal(m, checksum(now), sum, what)
	listed := min(room, len(idx))
	require.True(m, slices.Equal(idx[:listed], c.idx[:listed]), "positions of %s", what)
	require.True(m, slices.Equal(diffs[:listed], view[T](c.area[diffsAt(room):])[:listed]), "differences of %s", what)
	require.True(m, slices.Equal(now, values[T](to)), what)

	// There and back, with positions that are in no array behind the last one.
	idx = append(idx, int32(n), math.MaxInt32, -1)
	diffs = append(diffs, 1, 1, 1)
	c.reserve(d, len(idx)+m.random.IntN(4))
	copy(c.idx, idx)
	copy(view[T](c.area[diffsAt(len(c.idx)):]), diffs)
	sum, err = c.patch(from.place, d, n, len(idx), checksum(old), false)
	require.NoError(m, err)
	require.Equal(m, checksum(now), sum, what)
	require.True(m, slices.Equal(now, values[T](from)), what)
	copy(view[T](c.area[diffsAt(len(c.idx)):]), diffs)
	sum, err = c.patch(from.place, d, n, len(idx), checksum(now), true)
	require.NoError(m, err)
	require.Equal(m, checksum(old), sum, "%s, back", what)
	require.True(m, slices.Equal(old, values[T](from)), "%s, back", what)
}

// TestKernelsAllocate: in a steady state the kernels of the host allocate nothing.
func TestKernelsAllocate(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector allocates")
	}
	const seed = 22
	r := rand.New(rand.NewPCG(seed, 0))
	old, now := moved(r, 100_000, 0.01, lastPlace(r))
	var c coder
	before := hostPlace(old)
	after := hostPlace(now)
	compare := func() {
		_, err := c.compare(before, after, dtype.BF16, 100_000, 0)
		require.NoError(t, err)
	}
	patch := func() {
		_, err := c.patch(before, dtype.BF16, 100_000, len(c.idx), 0, true)
		require.NoError(t, err)
	}
	for name, call := range map[string]func(){"compare": compare, "patch": patch} {
		compare()
		least := math.Inf(1) // as the garbage collector may empty pools
		for range 5 {
			least = min(least, testing.AllocsPerRun(5, call))
		}
		require.Zero(t, least, name)
	}
}

// TestGPUClosed: kernels of a runtime that was closed are forgotten when those of another are loaded.
func TestGPUClosed(t *testing.T) {
	if n, err := cuda.Count(); err != nil || n == 0 {
		t.Skip("needs a GPU; see TestOnStandIn")
	}
	first := openCUDA(t)
	kernels, err := openGPU(first)
	require.NoError(t, err)
	again, err := openGPU(first)
	require.NoError(t, err)
	require.Same(t, kernels, again)
	require.NoError(t, first.Close())
	second := openCUDA(t)
	_, err = openGPU(second)
	require.NoError(t, err)
	require.NotContains(t, gpus.loaded, first)
	require.Contains(t, gpus.loaded, second)
	require.NoError(t, second.Close())
	_, err = loadGPU(second)
	require.ErrorIs(t, err, runtime.ErrClosed)
}

// TestGPUNotLoaded: kernels that could not be loaded leave nothing behind, and are loaded at the next call.
func TestGPUNotLoaded(t *testing.T) {
	if os.Getenv(standInVariable) == "" {
		t.Skip("needs the stand-in; see TestOnStandIn")
	}
	driver := openStandIn(t)
	const modules = 4
	rt := openCUDA(t)
	before := driver.Alive.Int(modules)
	for call := 1; call <= 8; call++ { // the one that fails
		driver.fail("cuModuleGetFunction", call)
		_, err := openGPU(rt)
		require.ErrorContains(t, err, "load kernels", "call %d", call)
		require.Equal(t, before, driver.Alive.Int(modules), "modules after call %d failed", call)
	}
	driver.fail("", 0)
	_, err := openGPU(rt)
	require.NoError(t, err)
	require.NoError(t, rt.Close())
}

// standIn is what the stand-in exports beside the driver's functions.
type standIn struct {
	Fail  dl.Func `sym:"fake_fail"`
	Alive dl.Func `sym:"fake_alive"`
}

func openStandIn(t *testing.T) *standIn {
	library, err := dl.Open(os.Getenv("TUTTI_CUDA_LIB"))
	require.NoError(t, err)
	driver := &standIn{}
	require.NoError(t, library.Bind(driver))
	return driver
}

// fail has the call of a function with that number fail; 0: none. It returns whether the call that was to fail
// before came.
func (s *standIn) fail(function string, call int) (came bool) {
	const invalid = 400
	name := append([]byte(function), 0)
	left := s.Fail.Int(hostmem.Addr(name), invalid, uintptr(-call))
	goruntime.KeepAlive(name)
	return int32(left) >= 0
}

// TestGPUFails: where a call of the driver fails, whose work may have been done, a subscriber shows the version
// before, bit for bit, or none, and gets the next one.
func TestGPUFails(t *testing.T) {
	if os.Getenv(standInVariable) == "" {
		t.Skip("needs the stand-in; see TestOnStandIn")
	}
	driver := openStandIn(t)
	const seed = 23
	r := rand.New(rand.NewPCG(seed, 0))
	old := newModel(r, "m")
	next := old.train(r, 0.1)
	p := NewPublisher(nil, nil)
	ctx := t.Context()
	require.NoError(t, p.Commit(ctx, 1, old))
	require.NoError(t, p.Commit(ctx, 2, next))
	var published, small, full bytes.Buffer
	_, err := p.log[len(p.log)-1].WriteTo(&published)
	require.NoError(t, err)
	require.NoError(t, p.WriteSince(ctx, &small, 1))
	require.NoError(t, p.WriteSince(ctx, &full, 0))
	rt := openCUDA(t)
	outcomes := map[string]int{}
	for _, message := range [][]byte{published.Bytes(), small.Bytes(), full.Bytes()} {
		for _, function := range []string{"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuLaunchKernel", "cuMemsetD8Async"} {
			for call, came := 1, true; came; call++ {
				tensors := old.upload(t, rt)
				s, err := NewSubscriber(ctx, rt, nil, Config{Tensors: tensors, Version: 1})
				require.NoError(t, err)
				driver.fail(function, call)
				_, err = s.Read(ctx, bytes.NewReader(message))
				came = driver.fail("", 0)
				require.Equal(t, came, err != nil, "%s %d, seed %d: %v", function, call, seed, err)
				switch err := s.checkShown(1, old); {
				case errors.Is(err, ErrNoVersion) && came:
					outcomes["none"]++
				case came:
					require.NoError(t, err, "%s %d, seed %d", function, call, seed)
					outcomes["old"]++
				}
				if came {
					_, err = s.Read(ctx, bytes.NewReader(full.Bytes()))
					require.NoError(t, err)
				}
				shows(t, s, 2, next)
				s.Close()
				for _, x := range tensors {
					require.NoError(t, x.Runtime().Free())
				}
			}
		}
	}
	t.Logf("%v", outcomes)
	require.NotZero(t, outcomes["old"])
	require.NotZero(t, outcomes["none"])
	require.NoError(t, rt.Close())
}

// TestGPUAlignment: elements at addresses that kernels cannot load them from are an error.
func TestGPUAlignment(t *testing.T) {
	if n, err := cuda.Count(); err != nil || n == 0 {
		t.Skip("needs a GPU; see TestOnStandIn")
	}
	rt := openCUDA(t)
	g, err := openGPU(rt)
	require.NoError(t, err)
	var c coder
	c.reserve(dtype.F32, 1)
	require.ErrorIs(t, g.diff(c.area, 1, 0, 1<<20+2, dtype.F32, 1), runtime.ErrArgument)
	require.ErrorIs(t, g.diff(c.area, 1, 1<<20+1, 1<<20, dtype.F32, 1), runtime.ErrArgument)
	require.ErrorIs(t, g.patch(c.area, 1, 1, 1<<20+3, dtype.BF16, 1, false), runtime.ErrArgument)
	require.NoError(t, rt.Close())
}

// BenchmarkKernels times the kernels with 1 GiB of bf16 on the GPU's own clock, in one launch each.
func BenchmarkKernels(b *testing.B) {
	if n, err := cuda.Count(); err != nil || n == 0 {
		b.Skip("needs a GPU")
	}
	const n, piece, seed = 1 << 29, 1 << 24, 47
	rt := openCUDA(b)
	r := rand.New(rand.NewPCG(seed, 0))
	g, err := openGPU(rt)
	require.NoError(b, err)
	allocate := func(bytes int) uintptr {
		p, err := rt.Allocate(bytes)
		require.NoError(b, err)
		b.Cleanup(func() { _ = rt.Deallocate(p) })
		return p
	}
	b.Cleanup(func() { _ = rt.Close() })
	const tiles = 2 * n / tileBytes
	old := uint64(allocate(2 * n))
	now := uint64(allocate(2 * n))
	idx := uint64(allocate(n))
	diffs := uint64(allocate(n))
	length := uint64(allocate(8))
	sums := uint64(allocate(4 * n / blockLen))
	scratch := allocate(controlBytes + 8*tiles)
	was := make([]uint16, piece)
	is := make([]uint16, piece)
	diff := func(sums uint64) error {
		if err := rt.Fill(scratch, controlBytes+8*tiles, dtype.U8, 0); err != nil {
			return err
		}
		return g.launch(g.diffs[1], tiles, diffsPerSM, uint64(scratch), uint64(scratch+controlBytes), old, now, n, signFlips(dtype.BF16),
			idx, diffs, n/5, length, sums)
	}
	back := uint64(1)
	patch := func(sums uint64) error {
		back = 1 - back
		return g.launch(g.patches[1], n/5/threads, patchesPerSM, old, n, signFlips(dtype.BF16), idx, diffs, n/5, length, sums, back)
	}
	for _, percent := range []float64{0, 1, 3, 10} {
		for i := range was {
			was[i] = uint16(r.Uint32())
			is[i] = was[i]
			if r.Float64()*100 < percent {
				is[i] ^= 1
			}
		}
		for at := uintptr(0); at < 2*n; at += 2 * piece {
			require.NoError(b, rt.CopyIn(uintptr(old)+at, hostmem.Bytes(was)))
			require.NoError(b, rt.CopyIn(uintptr(now)+at, hostmem.Bytes(is)))
		}
		for _, c := range []struct {
			name string
			call func() error
		}{
			{"diff", func() error { return diff(sums) }},
			{"diff without sums", func() error { return diff(0) }},
			{"patch", func() error { return patch(sums) }},
			{"patch without sums", func() error { return patch(0) }},
		} {
			b.Run(fmt.Sprintf("%v%%/%s", percent, c.name), func(b *testing.B) { deviceTime(b, rt, c.call) })
		}
	}
}

// deviceTime times a call on the device's own clock.
func deviceTime(b *testing.B, rt *cuda.Runtime, call func() error) {
	start, err := rt.NewTimingEvent()
	require.NoError(b, err)
	end, err := rt.NewTimingEvent()
	require.NoError(b, err)
	require.NoError(b, call())
	require.NoError(b, rt.Stream().Record(start))
	for b.Loop() {
		require.NoError(b, call())
	}
	require.NoError(b, rt.Stream().Record(end))
	require.NoError(b, end.Synchronize(b.Context()))
	var took time.Duration
	took, err = end.Since(start)
	require.NoError(b, err)
	b.ReportMetric(float64(took.Nanoseconds())/float64(b.N)/1e3, "device-us/op")
	require.NoError(b, start.Close())
	require.NoError(b, end.Close())
}
