package dl

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// libc names the C library of the systems that the tests know.
func libc(t testing.TB) *Library {
	t.Helper()
	name, ok := map[string]string{
		"linux":   "libc.so.6",
		"darwin":  "/usr/lib/libSystem.B.dylib",
		"windows": "msvcrt.dll",
	}[runtime.GOOS]
	if !ok {
		t.Skipf("no known C library on %s", runtime.GOOS)
	}
	lib, err := Open("libtutti-absent-1.so", name)
	require.NoError(t, err)
	assert.Equal(t, name, lib.Name(), "the first candidate that opens is taken")
	return lib
}

// function finds a function of the C library.
func function(t testing.TB, symbol string) Func {
	t.Helper()
	address, ok := libc(t).Lookup(symbol)
	require.True(t, ok)
	return Func{address, symbol}
}

func TestOpenListsEveryCandidate(t *testing.T) {
	_, err := Open("libtutti-absent-1.so", "libtutti-absent-2.so")
	require.Error(t, err)
	assert.ErrorContains(t, err, "libtutti-absent-1.so")
	assert.ErrorContains(t, err, "libtutti-absent-2.so")

	_, err = Open()
	require.Error(t, err)
}

func TestOpenSaysReasonsOnce(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the texts of glibc's loader")
	}
	const absent = "cannot open shared object file: No such file or directory"
	_, err := Open("libtutti-absent-1.so", "libtutti-absent-2.so")
	require.EqualError(t, err, "tried libtutti-absent-1.so, libtutti-absent-2.so ("+absent+")")

	text := filepath.Join(t.TempDir(), "text.so")
	require.NoError(t, os.WriteFile(text, []byte("no library"), 0o600))
	_, err = Open("libtutti-absent-1.so", text)
	require.EqualError(t, err, "tried libtutti-absent-1.so ("+absent+"), "+text+" (file too short)")
}

// The loader's reason belongs to a thread, and goroutines move between threads.
func TestOpenGivesTheReasonToEveryGoroutine(t *testing.T) {
	var wg sync.WaitGroup
	var without atomic.Int32
	for range 16 {
		wg.Go(func() {
			for i := range 200 {
				name := fmt.Sprintf("libtutti-absent-%d.so", i)
				if _, err := Open(name); err == nil || strings.HasSuffix(err.Error(), "()") {
					without.Add(1)
				}
				runtime.Gosched()
			}
		})
	}
	wg.Wait()
	assert.Zero(t, without.Load(), "errors without a reason")
}

func TestBind(t *testing.T) {
	lib := libc(t)
	var table struct {
		Abs     Func `sym:"abs"`
		Missing Func `sym:"tutti_absent_symbol,optional"`
		Data    Data `sym:"abs"`
		Other   int
	}
	require.NoError(t, lib.Bind(&table))
	assert.EqualValues(t, 7, table.Abs.Int(^uintptr(6)))
	assert.True(t, table.Abs.Found())
	assert.False(t, table.Missing.Found())
	address, ok := lib.Lookup("abs")
	assert.True(t, ok)
	assert.Equal(t, Func{address, "abs"}, table.Abs)
	assert.EqualValues(t, address, table.Data)
}

func TestNamesAreThoseOfTheDocumentation(t *testing.T) {
	for symbol, name := range map[string]string{
		"cuMemFree_v2": "cuMemFree", "cuMemFree": "cuMemFree", "f_v12": "f", "f_v": "f_v", "f_v2x": "f_v2x", "f_vector": "f_vector",
	} {
		assert.Equal(t, name, unversioned(symbol), symbol)
	}
	var table struct {
		Missing Func `sym:"tutti_absent_symbol_v2,optional"`
	}
	require.NoError(t, libc(t).Bind(&table))
	assert.Equal(t, "tutti_absent_symbol", table.Missing.Name())
}

func TestBindNamesMissingSymbols(t *testing.T) {
	var table struct {
		Abs Func `sym:"abs"`
		A   Func `sym:"tutti_absent_a"`
		B   Data `sym:"tutti_absent_b"`
	}
	err := libc(t).Bind(&table)
	require.Error(t, err)
	assert.ErrorContains(t, err, " lacks tutti_absent_a, tutti_absent_b")
	assert.NotContains(t, err.Error(), "more")

	var long struct {
		A Func `sym:"tutti_absent_a"`
		B Func `sym:"tutti_absent_b"`
		C Func `sym:"tutti_absent_c"`
		D Func `sym:"tutti_absent_d"`
		E Func `sym:"tutti_absent_e"`
	}
	err = libc(t).Bind(&long)
	require.Error(t, err)
	assert.ErrorContains(t, err, " lacks tutti_absent_a, tutti_absent_b, tutti_absent_c and 2 more")
}

func TestBindRefusesOtherTables(t *testing.T) {
	lib := libc(t)
	assert.Error(t, lib.Bind(struct{}{}))
	var wrong struct {
		Abs string `sym:"abs"`
	}
	assert.Error(t, lib.Bind(&wrong))
	var number struct {
		Abs uintptr `sym:"abs"`
	}
	assert.Error(t, lib.Bind(&number))
	var hidden struct {
		abs Func `sym:"abs"`
	}
	assert.Error(t, lib.Bind(&hidden))
	assert.False(t, hidden.abs.Found())
}

func TestCallAllocatesNothing(t *testing.T) {
	abs := function(t, "abs")
	assert.Zero(t, testing.AllocsPerRun(1000, func() { abs.Int(^uintptr(6)) }))
	assert.Zero(t, testing.AllocsPerRun(1000, func() { abs.Call(^uintptr(6)) }))
}

// TestArguments passes arguments in registers and on the stack, and reads the
// text that C made of them.
func TestArguments(t *testing.T) {
	if runtime.GOOS == "windows" || runtime.GOOS == "darwin" && runtime.GOARCH == "arm64" {
		t.Skip("snprintf takes its arguments in another way here")
	}
	snprintf := function(t, "snprintf")
	for name, f := range map[string]struct {
		most int // arguments
		call func(Func, []uintptr) int32
	}{
		"int":  {maxIntArgs, func(f Func, a []uintptr) int32 { return f.Int(a...) }},
		"call": {maxArgs, func(f Func, a []uintptr) int32 { return int32(f.Call(a...)) }},
	} {
		t.Run(name, func(t *testing.T) {
			numbers := f.most - 3 // behind the buffer, its length and the format
			format := []byte(strings.Repeat("%d ", numbers) + "\x00")
			out := make([]byte, 128)
			args := []uintptr{hostmem.Addr(out), uintptr(len(out)), hostmem.Addr(format)}
			var want string
			for i := range numbers {
				value := i + 1
				if i == 1 {
					value = -2
				}
				args = append(args, uintptr(value))
				want += fmt.Sprint(value, " ")
			}
			n := f.call(snprintf, args)
			require.EqualValues(t, len(want), n)
			assert.Equal(t, want, string(out[:n]))
			runtime.KeepAlive(format)

			assert.Panics(t, func() { f.call(snprintf, append(args, 0)) }, "more arguments than there is room for")
		})
	}
}

// TestConcurrentCalls calls C from many goroutines while the garbage collector
// moves their stacks.
func TestConcurrentCalls(t *testing.T) {
	abs := function(t, "abs")
	var wg sync.WaitGroup
	var wrong atomic.Int32
	for g := range 8 {
		wg.Go(func() {
			for i := range 2000 {
				if deep(i%50, func() int32 { return abs.Int(uintptr(int32(-g - i))) }) != int32(g+i) {
					wrong.Add(1)
				}
			}
		})
	}
	for range 5 {
		runtime.GC()
	}
	wg.Wait()
	assert.Zero(t, wrong.Load())
}

// deep calls f below n more frames of stack.
func deep(n int, f func() int32) int32 {
	if n == 0 {
		return f()
	}
	var room [256]byte
	room[n] = byte(n)
	return deep(n-1, f) + int32(room[n]) - int32(n)
}

func BenchmarkCall(b *testing.B) {
	abs := function(b, "abs")
	b.Run("int", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			abs.Int(1, 2, 3, 4, 5, 6, 7)
		}
	})
	b.Run("call", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			abs.Call(1, 2, 3, 4, 5, 6, 7)
		}
	})
}

// A sequence makes its calls in order, repeats those that wait for a flag, and
// stops at the first that fails.
func TestSequence(t *testing.T) {
	flag := new(int32)
	var got []string
	step := Func{address: purego.NewCallback(func(what, at, code, a4, a5, a6, a7 uintptr) uintptr {
		got = append(got, fmt.Sprint(what, a4+a5+a6+a7))
		if int(at) == len(got) {
			*flag = -1
		}
		return code
	}), name: "step"}
	s := NewSequence()
	run := func() (int, int32) {
		got, *flag = nil, 0
		return s.Run()
	}
	wait := hostmem.Addr(unsafe.Slice(flag, 1))

	s.Add(step, 1, 0, 0, 1, 2, 3, 4)
	s.AddUntil(wait, 5, step, 2, 4, 0, 1, 1, 1, 1)
	s.Add(step, 3, 0, 0, 0, 0, 0, 9)
	require.Equal(t, 3, s.Len())
	done, code := run()
	assert.Equal(t, 3, done)
	assert.Zero(t, code)
	assert.Equal(t, []string{"1 10", "2 4", "2 4", "2 4", "3 9"}, got)
	assert.Zero(t, s.Len())

	s.AddUntil(wait, 3, step, 1, 0, 0, 0, 0, 0, 0)
	s.Add(step, 2, 0, 7, 0, 0, 0, 0)
	s.Add(step, 3, 0, 0, 0, 0, 0, 0)
	done, code = run()
	assert.Equal(t, 1, done)
	assert.EqualValues(t, 7, code)
	assert.Equal(t, step, s.Func(done))
	assert.Equal(t, []string{"1 0", "1 0", "1 0", "2 0"}, got, "no more often than asked")

	for !s.Full() {
		s.Add(step, 1, 0, 0, 0, 0, 0, 0)
	}
	done, code = run()
	assert.Equal(t, len(got), done)
	assert.Zero(t, code)
	done, code = run()
	assert.Zero(t, done)
	assert.Zero(t, code)
	runtime.KeepAlive(flag)
}

func BenchmarkSequence(b *testing.B) {
	abs, s := function(b, "abs"), NewSequence()
	b.ReportAllocs()
	for b.Loop() {
		for range 4 {
			s.Add(abs, 0, 2, 3, 4, 5, 6, 7)
		}
		s.Run()
	}
}
