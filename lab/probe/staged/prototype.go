package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/segment"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Prototypes of an allreduce of two ranks by way of a segment that both have registered with the driver, once. A rank's
// device copies straight to it, piece by piece, and from it. Who adds up differs:
//
//   - processors: each rank its half of each piece, with some threads;
//   - devices, which copy what the other rank has to memory of their own first;
//   - devices, whose kernel reads the segment.

// way is who adds up.
type way int

const (
	byProcessors way = iota
	byCopies
	byReads
)

// driver are the calls of the driver that the runtime does not have, or has only for memory of its own.
type driver struct {
	Retain       dl.Func `sym:"cuDevicePrimaryCtxRetain"`
	SetCurrent   dl.Func `sym:"cuCtxSetCurrent"`
	HostRegister dl.Func `sym:"cuMemHostRegister_v2"`
	Unregister   dl.Func `sym:"cuMemHostUnregister"`
	DeviceSide   dl.Func `sym:"cuMemHostGetDevicePointer_v2"`
	CopyOut      dl.Func `sym:"cuMemcpyDtoHAsync_v2"`
	CopyIn       dl.Func `sym:"cuMemcpyHtoDAsync_v2"`
}

func check(f dl.Func, args ...uintptr) error {
	if status := f.Int(args...); status != 0 {
		return fmt.Errorf("%s: status %d", f.Name(), status)
	}
	return nil
}

// registered is what the two ranks share.
type registered struct {
	drv      driver        // calls that the runtime does not have
	gpu      *cuda.Runtime // of this rank
	rank     int           // 0 or 1
	bytes    int           // of a rank's data
	memory   []byte        // the segment: a page of counts, and the data of both ranks
	data     [2]uintptr    // of each rank
	onDevice [2]uintptr    // the same for kernels
	scratch  uintptr       // of the device
	x        uintptr       // of the device: what is reduced
	out      *cuda.Stream  // of copies to the segment
	in       *cuda.Stream  // of copies from it
	copied   []*cuda.Event // recorded behind each copy to the segment
	fetched  []*cuda.Event // recorded behind each copy to scratch
	rounds   uint64        // parts of all calls so far
}

const (
	page      = 4 << 10
	mostParts = 32
	lineBytes = 128
)

// count is how many pieces a rank has put into the segment (0) or reduced there (1), of all calls.
func (r *registered) count(rank, kind int) *atomic.Uint64 {
	return &hostmem.Slice[atomic.Uint64](hostmem.Addr(r.memory)+uintptr((2*rank+kind)*lineBytes), 1)[0]
}

func register(ctx context.Context, base comm.Communicator, gpu *cuda.Runtime, b *buffers) (r *registered, err error) {
	r = &registered{gpu: gpu, rank: base.Rank(), bytes: b.bytes, x: b.memory}
	library, err := dl.Open(cmp.Or(os.Getenv("TUTTI_CUDA_LIB"), "libcuda.so.1"))
	if err == nil {
		err = library.Bind(&r.drv)
	}
	if err != nil {
		return nil, err
	}
	cell := make([]uint64, 1)
	if err := check(r.drv.Retain, hostmem.Addr(cell), 0); err != nil {
		return nil, err
	}
	if err := check(r.drv.SetCurrent, uintptr(cell[0])); err != nil {
		return nil, err
	}
	if err := r.share(ctx, base); err != nil {
		return nil, err
	}
	const portable, mapped = 1, 2
	err = once(base, fmt.Sprintf("%d | register the segment of both ranks", b.bytes), func() error {
		return check(r.drv.HostRegister, hostmem.Addr(r.memory), uintptr(len(r.memory)), portable|mapped)
	})
	if err != nil {
		return nil, err
	}
	if err := check(r.drv.DeviceSide, hostmem.Addr(cell), hostmem.Addr(r.memory), 0); err != nil {
		return nil, err
	}
	for rank := range r.data {
		offset := uintptr(page + rank*b.bytes)
		r.data[rank] = hostmem.Addr(r.memory) + offset
		r.onDevice[rank] = uintptr(cell[0]) + offset
	}
	goruntime.KeepAlive(cell)
	if r.scratch, err = gpu.Allocate(b.bytes); err != nil {
		return nil, err
	}
	if r.out, err = gpu.CopyOutStream(); err != nil {
		return nil, err
	}
	if r.in, err = gpu.CopyInStream(); err != nil {
		return nil, err
	}
	for range mostParts {
		copied, err := gpu.NewEvent()
		if err != nil {
			return nil, err
		}
		fetched, err := gpu.NewEvent()
		if err != nil {
			return nil, err
		}
		r.copied = append(r.copied, copied)
		r.fetched = append(r.fetched, fetched)
	}
	return r, gpu.Synchronize(ctx)
}

// share has both ranks map one segment.
func (r *registered) share(ctx context.Context, base comm.Communicator) error {
	size := page + 2*r.bytes
	words := make([]int64, 3*base.WorldSize())
	offered := make([]int64, 3)
	if base.Rank() == 0 {
		server, memory, err := segment.Serve(size)
		if err != nil {
			return err
		}
		defer server.Close()
		r.memory = memory
		o := server.Offer()
		offered = []int64{int64(o.Machine), int64(o.Key[0]), int64(o.Key[1])}
	}
	if err := base.AllGather(hostmem.Addr(offered), hostmem.Addr(words), 3, dtype.I64); err != nil {
		return err
	}
	if err := base.Sync(ctx); err != nil {
		return err
	}
	goruntime.KeepAlive(offered)
	if base.Rank() != 0 {
		var err error
		o := segment.Offer{Machine: uint64(words[0]), Key: [2]uint64{uint64(words[1]), uint64(words[2])}}
		if r.memory, err = segment.Join(ctx, o, size); err != nil {
			return err
		}
	}
	return base.Barrier(ctx)
}

func (r *registered) close() error {
	err := check(r.drv.Unregister, hostmem.Addr(r.memory))
	segment.Unmap(r.memory)
	for i := range r.copied {
		err = errors.Join(err, r.copied[i].Close(), r.fetched[i].Close())
	}
	return errors.Join(err, r.gpu.Deallocate(r.scratch))
}

// part returns where a part of the data begins, and its length, in bytes.
func part(bytes, parts, i int) (from, n int) {
	const align = 512
	size := (bytes/parts + align - 1) &^ (align - 1)
	from = min(i*size, bytes)
	return from, min(size, bytes-from)
}

var errStuck = errors.New("the other rank does not go on")

// await polls until a condition holds.
func await(done func() (bool, error)) error {
	limit := time.Now().Add(10 * time.Second)
	for i := 0; ; i++ {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		if i%1024 == 1023 && time.Now().After(limit) {
			return errStuck
		}
		goruntime.Gosched()
	}
}

// allreduce adds up the data of both ranks, in parts.
func (r *registered) allreduce(w way, parts, threads int) error {
	if err := r.out.WaitFor(r.gpu.Stream()); err != nil {
		return err
	}
	for i := range parts {
		from, n := part(r.bytes, parts, i)
		err := check(r.drv.CopyOut, r.data[r.rank]+uintptr(from), r.x+uintptr(from), uintptr(n), r.out.Handle())
		if err := errors.Join(err, r.out.Record(r.copied[i])); err != nil {
			return err
		}
	}
	begun := r.rounds
	r.rounds += uint64(parts)
	published := 0 // parts of this rank
	reduced := 0   // parts that this rank has reduced, or given to its device
	taken := 0     // parts of which this rank has the other one's half
	last := 0
	if w == byProcessors {
		last = parts
	}
	err := await(func() (bool, error) {
		if published < parts {
			done, err := r.copied[published].Done()
			if err != nil {
				return false, err
			}
			if done {
				published++
				r.count(r.rank, 0).Store(begun + uint64(published))
			}
		}
		peerPublished := int(int64(r.count(1-r.rank, 0).Load() - begun))
		if reduced < min(peerPublished, published) {
			if err := r.reducePart(w, reduced, parts, threads); err != nil {
				return false, err
			}
			reduced++
			r.count(r.rank, 1).Store(begun + uint64(reduced))
		}
		if w == byProcessors && taken < reduced && taken < int(int64(r.count(1-r.rank, 1).Load()-begun)) {
			from, n := part(r.bytes, parts, taken)
			half := n / 2 &^ 63
			from, n = from+half*(1-r.rank), half+(n-2*half)*(1-r.rank)
			offset := uintptr(from)
			err := check(r.drv.CopyIn, r.x+offset, r.data[1-r.rank]+offset, uintptr(n), r.in.Handle())
			if err != nil {
				return false, err
			}
			taken++
		}
		return reduced == parts && taken == last, nil
	})
	if err != nil {
		return err
	}
	if err := r.gpu.Stream().WaitFor(r.in); err != nil {
		return err
	}
	return r.gpu.Synchronize(context.Background())
}

// reducePart adds up one part, which both ranks have put into the segment.
func (r *registered) reducePart(w way, i, parts, threads int) error {
	from, n := part(r.bytes, parts, i)
	offset := uintptr(from)
	operand := r.onDevice[1-r.rank] + offset
	switch w {
	case byProcessors:
		half := n / 2 &^ 63
		from, n = from+half*r.rank, half+(n-2*half)*r.rank
		offset = uintptr(from)
		addUp(r.data[r.rank]+offset, [2]uintptr{r.data[0] + offset, r.data[1] + offset}, n, threads)
		return check(r.drv.CopyIn, r.x+offset, r.data[r.rank]+offset, uintptr(n), r.in.Handle())
	case byCopies:
		err := check(r.drv.CopyIn, r.scratch+offset, r.data[1-r.rank]+offset, uintptr(n), r.in.Handle())
		err = errors.Join(err, r.in.Record(r.fetched[i]), r.gpu.Stream().Wait(r.fetched[i]))
		if err != nil {
			return err
		}
		operand = r.scratch + offset
	}
	return r.gpu.Kernels().Accumulate(kernel.Source{X: r.x + offset, N: n / 4, Grad: operand, DType: dtype.F32})
}

// addUp adds up bytes of floats with some threads.
func addUp(dst uintptr, srcs [2]uintptr, bytes, threads int) {
	var wg sync.WaitGroup
	for t := range threads {
		from, n := part(bytes, threads, t)
		add := func() {
			offset := uintptr(from)
			dsts := []uintptr{dst + offset}
			all := []uintptr{srcs[0] + offset, srcs[1] + offset}
			hostops.Reduce(dsts, all, n/4, dtype.F32, reductions.Sum, false)
		}
		if t == threads-1 {
			add()
			continue
		}
		wg.Go(add)
	}
	wg.Wait()
}

func measurePrototypes(ctx context.Context, base comm.Communicator, gpu *cuda.Runtime, b *buffers) error {
	if base.WorldSize() != 2 {
		return nil
	}
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	r, err := register(ctx, base, gpu, b)
	if err != nil {
		return err
	}
	block := make([]byte, 256<<10)
	slot := r.memory[page+r.rank*b.bytes:][:b.bytes]
	calls := []call{
		{"device to the segment", func() error { return gpu.CopyOut(slot, b.memory) }},
		{"segment to device", func() error { return gpu.CopyIn(b.memory, slot) }},
		{"segment to a block in the caches", func() error {
			for remaining := slot; len(remaining) > 0; remaining = remaining[copy(block, remaining):] {
			}
			return nil
		}},
		{"segment of the other rank to a block in the caches", func() error {
			remaining := r.memory[page+(1-r.rank)*b.bytes:][:b.bytes]
			for ; len(remaining) > 0; remaining = remaining[copy(block, remaining):] {
			}
			return nil
		}},
	}
	for _, p := range []struct {
		name    string
		way     way
		parts   []int
		threads int
	}{
		{"processors add up, 1 thread", byProcessors, []int{4, 8, 16, 32}, 1},
		{"processors add up, 2 threads", byProcessors, []int{8, 16}, 2},
		{"processors add up, 4 threads", byProcessors, []int{8, 16}, 4},
		{"devices add up copies", byCopies, []int{1, 4, 8, 16, 32}, 0},
		{"devices add up what they read", byReads, []int{1, 4, 8, 16}, 0},
	} {
		for _, parts := range p.parts {
			run := func() error { return r.allreduce(p.way, parts, p.threads) }
			name := fmt.Sprintf("%s, %d parts", p.name, parts)
			if err := r.check(ctx, base, run); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			calls = append(calls, call{name, run})
		}
	}
	err = measureAllOf(ctx, base, b.bytes, calls)
	return errors.Join(err, base.Barrier(ctx), r.close())
}

// check reports whether a way to add up does so.
func (r *registered) check(ctx context.Context, base comm.Communicator, run func() error) error {
	if err := base.Barrier(ctx); err != nil { // nobody reads what an earlier call has put into the segment
		return err
	}
	n := r.bytes / 4
	values := make([]float32, n)
	for i := range values {
		values[i] = float32((i%1009 + 1) * (r.rank + 1))
	}
	if err := r.gpu.CopyIn(r.x, hostmem.Bytes(values)); err != nil {
		return err
	}
	if err := run(); err != nil {
		return err
	}
	if err := r.gpu.CopyOut(hostmem.Bytes(values), r.x); err != nil {
		return err
	}
	for i, v := range values {
		if want := float32(3 * (i%1009 + 1)); v != want {
			return fmt.Errorf("element %d is %v, want %v", i, v, want)
		}
	}
	return nil
}
