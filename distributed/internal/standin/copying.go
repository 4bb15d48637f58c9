package standin

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Copying is a rank's runtime with streams and asynchronous copies, whose kernels fail on demand. A copy is made as
// late as possible, to show writes to its source that come too early.
type Copying struct {
	waitedFor
	stumbling *Stumbling
	Rng       *rand.Rand // decides whether a copy is complete when queried; nil: it is
}

// NewHostCopy implements [kernel.AsyncCopier].
func (r Copying) NewHostCopy(bytes int) (kernel.HostCopy, error) {
	return &lateCopy{copying: r, data: make([]byte, bytes)}, nil
}

// Kernels returns kernels that can fail.
func (r Copying) Kernels() kernel.Kernels { return r.stumbling }

// Fill implements [runtime.Runtime].
func (r Copying) Fill(dst uintptr, count int, dt dtype.DType, value float64) error {
	return r.stumbling.do("fill", func() error {
		return r.waitedFor.Fill(dst, count, dt, value)
	})
}

// Copy implements [runtime.Runtime].
func (r Copying) Copy(dst, src uintptr, bytes int) error {
	return r.stumbling.do("copy", func() error { return r.waitedFor.Copy(dst, src, bytes) })
}

// NewCopying returns a runtime that counts its waits in w and fails by fails.
func NewCopying(rt *cpu.Runtime, w *Waits, fails *Stumbling, rng *rand.Rand) Copying {
	return Copying{NewWaitedFor(rt, w), fails, rng}
}

type lateCopy struct {
	copying Copying
	src     []kernel.Span // posted and not read
	data    []byte
}

func (n *lateCopy) Post(spans []kernel.Span) error {
	if err := n.copying.stumbling.due("post"); err != nil {
		return err
	}
	n.src = slices.Clone(spans)
	return nil
}

func (n *lateCopy) Ready() (bool, error) {
	return n.src == nil || n.copying.Rng == nil || n.copying.Rng.IntN(2) == 0, nil
}

func (n *lateCopy) Read(ctx context.Context) ([]byte, error) {
	if err := n.copying.stumbling.due("read"); err != nil {
		return nil, err
	}
	for data := n.data; len(n.src) > 0; n.src = n.src[1:] {
		s := n.src[0]
		if err := n.copying.Runtime.CopyOut(data[:s.Bytes], s.Ptr); err != nil {
			return nil, err
		}
		data = data[s.Bytes:]
	}
	n.src = nil
	return n.data, ctx.Err()
}

func (n *lateCopy) Close() error {
	return n.copying.stumbling.due("close")
}

// Stumbling are kernels of which a call fails, or one of the runtime.
type Stumbling struct {
	kernel.Kernels
	Call string // the failing call
	In   int    // number of calls until the failure; 0: none
}

// ErrKernel is the error of a kernel that fails on demand.
var ErrKernel = errors.New("this call is to fail")

func (f *Stumbling) due(call string) error {
	if f.In == 0 || call != f.Call {
		return nil
	}
	f.In--
	if f.In == 0 {
		return ErrKernel
	}
	return nil
}

// do makes a call, unless it should fail.
func (f *Stumbling) do(call string, make func() error) error {
	if err := f.due(call); err != nil {
		return err
	}
	return make()
}

// Restore implements [kernel.Kernels].
func (f *Stumbling) Restore(dst kernel.Array, l, taken kernel.Entries) error {
	return errors.Join(f.due(""), f.Kernels.Restore(dst, l, taken))
}

// Merge implements [kernel.Kernels].
func (f *Stumbling) Merge(dst uintptr, dt dtype.DType, n int, lists []kernel.Entries, scale float32, faults,
	residual uintptr, back kernel.Restoration) error {
	return f.do("merge", func() error {
		return errors.Join(f.due(""), f.Kernels.Merge(dst, dt, n, lists, scale, faults, residual, back))
	})
}

// TopK implements [kernel.Kernels].
func (f *Stumbling) TopK(src kernel.Source, k int, dst kernel.Entries, threshold uintptr) error {
	return f.do("select", func() error {
		return f.Kernels.TopK(src, k, dst, threshold)
	})
}

// TopKChunks implements [kernel.Kernels].
func (f *Stumbling) TopKChunks(src kernel.Source, k, chunk int, dst kernel.Entries) error {
	return f.do("select", func() error {
		return f.Kernels.TopKChunks(src, k, chunk, dst)
	})
}

// SelectNear implements [kernel.Kernels].
func (f *Stumbling) SelectNear(src kernel.Source, k int, state uintptr, o kernel.Acceptance, dst kernel.Entries,
	used uintptr) error {
	return f.do("select", func() error {
		return f.Kernels.SelectNear(src, k, state, o, dst, used)
	})
}

// Fit implements [kernel.Kernels].
func (f *Stumbling) Fit(src kernel.Source, z float64, threshold uintptr) error {
	return f.do("select", func() error { return f.Kernels.Fit(src, z, threshold) })
}

// CopyPieces implements [kernel.Kernels].
func (f *Stumbling) CopyPieces(pieces []kernel.Piece) error {
	return f.do("pieces", func() error { return f.Kernels.CopyPieces(pieces) })
}

// CopyIf implements [kernel.Kernels].
func (f *Stumbling) CopyIf(copies []kernel.Copy, flags uintptr, m int) error {
	return f.do("copy if", func() error { return f.Kernels.CopyIf(copies, flags, m) })
}
