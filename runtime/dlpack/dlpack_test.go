package dlpack

import (
	"fmt"
	"os"
	"os/exec"
	goruntime "runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/cc"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// peer is testdata/peer.c, whose structs are a C compiler's.
type peer struct {
	Alive            dl.Func `sym:"peer_alive"`
	Produce          dl.Func `sym:"peer_produce"`
	ProduceVersioned dl.Func `sym:"peer_produce_versioned"`
	Drop             dl.Func `sym:"peer_drop"`
	Digits           dl.Func `sym:"peer_digits"`
	Type             dl.Func `sym:"peer_type"`
}

func (p *peer) produce(capsule string, strided uintptr) uintptr {
	if capsule == capsuleUnversioned {
		return p.Produce.Call(strided)
	}
	return p.ProduceVersioned.Call(strided, 0)
}

func openPeer(t *testing.T) *peer {
	t.Helper()
	library, err := cc.Build(t, "cc", "testdata/peer.c", "", "-O1", "-Wall", "-shared", "-fPIC", "-lpthread")
	require.NoError(t, err)
	lib, err := dl.Open(library)
	require.NoError(t, err)
	p := &peer{}
	require.NoError(t, lib.Bind(p))
	return p
}

var formats = []string{capsuleVersioned, capsuleUnversioned}

func versionedFlag(capsule string) uintptr {
	if capsule == capsuleVersioned {
		return 1
	}
	return 0
}

func openCPU(t *testing.T) *cpu.Runtime {
	rt := cpu.New()
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	return rt
}

// A library's tensor is a tensor here, and is its own again after Free.
func TestImport(t *testing.T) {
	p, rt := openPeer(t), openCPU(t)
	for _, f := range formats {
		for strided, want := range [][]int{{2, 3, 3, 1}, {3, 2, 1, 3}} {
			x, err := Import(rt, p.produce(f, uintptr(strided)), f)
			require.NoError(t, err, f)
			assert.Equal(t, dtype.F32, x.DType())
			assert.Equal(t, want, append(x.Shape(), x.Strides()...), f)
			first, err := x.Ptr()
			require.NoError(t, err)
			assert.Equal(t, []float32{0, 1, 2, 3, 4, 5}, hostmem.Slice[float32](first, 6))
			assert.EqualValues(t, 1, p.Alive.Call())
			require.NoError(t, x.Free())
			require.NoError(t, x.Free())
			assert.Zero(t, p.Alive.Call())
		}
	}
}

// A refused tensor stays the producer's.
func TestImportRefuses(t *testing.T) {
	p, rt := openPeer(t), openCPU(t)
	for change, want := range []error{1: runtime.ErrUnsupported, 2: runtime.ErrUnsupported, 3: runtime.ErrDevice, 4: runtime.ErrDevice,
		5: runtime.ErrDType, 6: runtime.ErrDType, 7: runtime.ErrArgument, 8: runtime.ErrArgument} {
		if want == nil {
			continue
		}
		m := p.ProduceVersioned.Call(0, uintptr(change))
		_, err := Import(rt, m, capsuleVersioned)
		assert.ErrorIs(t, err, want, "change %d", change)
		assert.EqualValues(t, 1, p.Alive.Call())
		p.Drop.Call(m, 1)
		assert.Zero(t, p.Alive.Call())
	}
	_, err := Import(rt, 0, capsuleUnversioned)
	assert.ErrorIs(t, err, runtime.ErrArgument)
	m := p.ProduceVersioned.Call(0, 0)
	_, err = Import(rt, m, "used_dltensor")
	assert.ErrorIs(t, err, runtime.ErrArgument)
	p.Drop.Call(m, 1)
}

// A library reads what is exported to it, and says on its own thread that it is done.
func TestExport(t *testing.T) {
	p, rt := openPeer(t), openCPU(t)
	x, err := cpu.Wrap(rt, []float32{1, 2, 3, 4, 5, 6}, 2, 3)
	require.NoError(t, err)
	transposed, err := x.Transpose(0, 1)
	require.NoError(t, err)
	for _, f := range formats {
		for _, c := range []struct {
			tensor *runtime.Tensor
			digits uintptr
		}{{x, 654321}, {transposed, 635241}} {
			var done atomic.Int32
			m, err := Export(c.tensor, 0, f, func() { done.Add(1) })
			require.NoError(t, err)
			goruntime.GC()
			assert.Equal(t, c.digits, p.Digits.Call(m, versionedFlag(f)))
			assert.Zero(t, done.Load())
			p.Drop.Call(m, versionedFlag(f))
			assert.EqualValues(t, 1, done.Load())
		}
		m, err := Export(x, 0, f, nil)
		require.NoError(t, err)
		p.Drop.Call(m, versionedFlag(f))
	}
	exports.Range(func(any, any) bool { t.Error("a struct is kept"); return false })
	require.NoError(t, x.Free())
	_, err = Export(x, 0, capsuleVersioned, nil)
	assert.ErrorIs(t, err, runtime.ErrFreed)
}

// Each element type has the code of dlpack.h, both ways.
func TestTypes(t *testing.T) {
	p, rt := openPeer(t), openCPU(t)
	for dt, want := range map[dtype.DType]string{
		dtype.I8: "00 08", dtype.I16: "00 16", dtype.I32: "00 32", dtype.I64: "00 64", dtype.U8: "01 08", dtype.U16: "01 16", dtype.U32: "01 32",
		dtype.U64: "01 64", dtype.F16: "02 16", dtype.F32: "02 32", dtype.F64: "02 64", dtype.BF16: "04 16", dtype.Bool: "06 08",
		dtype.FP8E4M3: "10 08", dtype.FP8E5M2: "12 08",
	} {
		for _, f := range formats {
			for _, shape := range [][]int{{}, {4}, {0, 3}} {
				x, err := runtime.New(rt, dt, shape...)
				require.NoError(t, err)
				m, err := Export(x, 0, f, nil)
				require.NoError(t, err)
				if f == capsuleVersioned {
					version := hostmem.Slice[uint32](m, 2)
					fp8 := dt == dtype.FP8E4M3 || dt == dtype.FP8E5M2
					assert.Equal(t, []uint32{1, map[bool]uint32{true: 1}[fp8]}, version, "%v", dt)
				}
				digits := fmt.Sprintf("%012d", p.Type.Call(m, versionedFlag(f)))
				assert.Equal(t, strings.ReplaceAll(want, " ", "")+"01"+"0100", digits[2:], "%v", dt)
				back, err := Import(rt, m, f)
				require.NoError(t, err)
				assert.Equal(t, x.String(), back.String())
				assert.Equal(t, x.Strides(), back.Strides())
				require.NoError(t, back.Free())
				require.NoError(t, x.Free())
			}
		}
	}
	assert.Len(t, types, len(dtype.All()))
}

// standInVariable is set in a process with the driver's stand-in.
const standInVariable = "TUTTI_TEST_STAND_IN"

// TestStreams runs TestStandInStreams with a driver that is none.
func TestStreams(t *testing.T) {
	driver, err := cc.Build(t, "cc", "../cuda/testdata/driver.c", "", "-O2", "-shared", "-fPIC", "-lpthread")
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "-test.run=^TestStandInStreams$", "-test.v", "-test.timeout=1m")
	cmd.Env = append(os.Environ(), standInVariable+"=1", "TUTTI_CUDA_LIB="+driver)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS")
}

func TestStandInStreams(t *testing.T) {
	if os.Getenv(standInVariable) == "" {
		t.Skip("needs the stand-in; see TestStreams")
	}
	var fake struct {
		Submitted dl.Func `sym:"fake_submitted"`
		Waited    dl.Func `sym:"fake_waited"`
	}
	lib, err := dl.Open(os.Getenv("TUTTI_CUDA_LIB"))
	require.NoError(t, err)
	require.NoError(t, lib.Bind(&fake))
	rt, err := cuda.Open(0)
	require.NoError(t, err)
	consumer, err := rt.NewStream(0)
	require.NoError(t, err)
	x, err := runtime.New(rt, dtype.F32, 4)
	require.NoError(t, err)
	p, err := x.Ptr()
	require.NoError(t, err)
	require.NoError(t, rt.Fill(p, 4, dtype.F32, 1))
	compute := rt.Stream()
	assert.Equal(t, compute.Handle(), Stream(rt))

	for _, stream := range []int{-1, int(compute.Handle())} { // nothing to order
		m, err := Export(x, stream, capsuleVersioned, nil)
		require.NoError(t, err)
		assert.Zero(t, fake.Waited.Call(consumer.Handle(), compute.Handle()))
		back, err := Import(rt, m, capsuleVersioned)
		require.NoError(t, err)
		require.NoError(t, back.Free())
	}
	var waited uintptr
	m, err := Export(x, int(consumer.Handle()), capsuleVersioned, func() { waited = fake.Waited.Call(compute.Handle(), consumer.Handle()) })
	require.NoError(t, err)
	assert.Equal(t, fake.Submitted.Call(compute.Handle()), fake.Waited.Call(consumer.Handle(), compute.Handle()), "the consumer sees what was written")
	y, err := Import(rt, m, capsuleVersioned)
	require.NoError(t, err)
	require.NoError(t, rt.CopyInAsync(consumer, p, make([]byte, 16)))
	require.NoError(t, y.Free())
	assert.Equal(t, fake.Submitted.Call(consumer.Handle()), waited, "what comes later waits for the consumer")
	for _, stream := range []int{0, 2} {
		_, err = Export(x, stream, capsuleVersioned, nil)
		assert.ErrorIs(t, err, runtime.ErrArgument)
	}
	_, err = Import(openCPU(t), hostmem.AddrOf(&versioned{major: major, array: array{device: deviceCUDA}}), capsuleVersioned)
	assert.ErrorIs(t, err, runtime.ErrDevice)
	require.NoError(t, x.Free())
	require.NoError(t, rt.Close())
}
