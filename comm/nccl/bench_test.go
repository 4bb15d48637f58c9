package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// perGraph is how many collectives one captured graph holds.
const perGraph = 20

// bench is one rank's part of a benchmark.
type bench struct {
	c          *nccl.Comm
	rt         *cuda.Runtime
	buf        uintptr
	free       func(buf uintptr) error
	start, end *cuda.Event
}

func newBench(ctx context.Context, c *nccl.Comm, bytes int, symmetric bool) (*bench, error) {
	rt := c.Runtime()
	allocate, free := buffers(ctx, c, symmetric)
	p := &bench{c: c, rt: rt, free: free}
	var err, err1, err2 error
	p.buf, err = allocate(bytes)
	p.start, err1 = rt.NewTimingEvent()
	p.end, err2 = rt.NewTimingEvent()
	return p, errors.Join(err, err1, err2)
}

func (p *bench) close() error {
	return errors.Join(p.start.Close(), p.end.Close(), p.free(p.buf))
}

// time measures n calls of f on the GPU's clock.
func (p *bench) time(ctx context.Context, n int, f func() error) (time.Duration, error) {
	for range 5 {
		if err := f(); err != nil {
			return 0, err
		}
	}
	if err := p.c.Barrier(ctx); err != nil {
		return 0, err
	}
	if err := p.c.Stream().Record(p.start); err != nil {
		return 0, err
	}
	for range n {
		if err := f(); err != nil {
			return 0, err
		}
	}
	if err := p.c.Stream().Record(p.end); err != nil {
		return 0, err
	}
	if err := p.c.Sync(ctx); err != nil {
		return 0, err
	}
	return p.end.Since(p.start)
}

// benchWorld makes the communicators of this process: all GPUs, a goroutine
// each, or, started by a launcher, the one of this process. Then give the number
// of calls (-test.benchtime 200x): all processes must make the same.
func benchWorld(ctx context.Context, b *testing.B) []*nccl.Comm {
	j := gputest.Job(b)
	if j.WorldSize == 1 {
		world, err := nccl.InProcess(ctx, openGPUs(b))
		require.NoError(b, err)
		return world
	}
	rt := gputest.Own(b)
	b.Cleanup(func() { assert.NoError(b, rt.Close()) })
	c, err := nccl.FromEnv(ctx, rt)
	require.NoError(b, err)
	return []*nccl.Comm{c}
}

// BenchmarkAllReduce times float32 allreduces in place over all GPUs, submitted
// one by one or in a captured graph.
func BenchmarkAllReduce(b *testing.B) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	world := benchWorld(ctx, b)
	ranks := float64(world[0].WorldSize())
	for _, bytes := range []int{8, 512, 1 << 10, 2 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10,
		1 << 20, 2 << 20, 8 << 20, 32 << 20, 64 << 20, 1 << 30} {
		for _, form := range []struct{ symmetric, graph bool }{{false, false}, {false, true}, {true, false}, {true, true}} {
			b.Run(fmt.Sprintf("ranks=%v/symmetric=%t/graph=%t/bytes=%d", ranks, form.symmetric, form.graph, bytes), func(b *testing.B) {
				var mu sync.Mutex
				var longest time.Duration
				n := b.N
				err := each(world, func(c *nccl.Comm) error {
					p, err := newBench(ctx, c, bytes, form.symmetric)
					if err != nil {
						return err
					}
					d, err := p.allReduces(ctx, n, bytes/4, form.graph)
					mu.Lock()
					longest = max(longest, d)
					mu.Unlock()
					return errors.Join(err, p.close())
				})
				require.NoError(b, err)
				us := float64(longest.Nanoseconds()) / 1e3 / float64(n)
				b.ReportMetric(us, "us/allreduce")
				b.ReportMetric(float64(bytes)/us/1e3*2*(ranks-1)/ranks, "GB/s-busbw")
				b.ReportMetric(0, "ns/op") // the host's time says nothing here
			})
		}
	}
	require.NoError(b, each(world, (*nccl.Comm).Close))
}

// allReduces returns the time of n allreduces.
func (p *bench) allReduces(ctx context.Context, n, count int, graph bool) (time.Duration, error) {
	reduce := func() error { return p.c.AllReduce(p.buf, p.buf, count, dtype.F32, comm.Sum) }
	if !graph {
		return p.time(ctx, n, reduce)
	}
	return p.captured(ctx, n, reduce)
}

// captured returns the time of a call of f, of n graphs that have perGraph each.
func (p *bench) captured(ctx context.Context, n int, f func() error) (time.Duration, error) {
	g, err := p.c.Stream().Capture(func() error {
		for range perGraph {
			if err := f(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	d, err := p.time(ctx, n, func() error { return g.Launch(p.c.Stream()) })
	return d / perGraph, errors.Join(err, g.Close())
}

// BenchmarkWindows prints what collectives take on windows and on plain buffers, captured, and marks those for which the
// table chooses the one that takes at least 5 % longer. It runs once: -test.benchtime 1x.
func BenchmarkWindows(b *testing.B) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	world := benchWorld(ctx, b)
	ranks := world[0].WorldSize()
	fmt.Println("| operation | bytes | windows µs | plain µs | table | |\n| --- | ---: | ---: | ---: | --- | --- |")
	for _, op := range []comm.Op{comm.OpAllReduce, comm.OpAllGather, comm.OpReduceScatter} {
		for bytes := 256; bytes <= 64<<20; bytes *= 4 {
			times := make([][2]time.Duration, len(world))
			require.NoError(b, each(world, func(c *nccl.Comm) (err error) {
				times[slices.Index(world, c)], err = timeWindows(ctx, c, op, bytes)
				return err
			}))
			var windows, plain time.Duration
			for _, t := range times {
				windows = max(windows, t[0])
				plain = max(plain, t[1])
			}
			chosen, slow := "plain", float64(plain) > 1.05*float64(windows)
			if nccl.HasWindowRow(world[0], op, bytes) {
				chosen, slow = "windows", float64(windows) > 1.05*float64(plain)
			}
			mark := map[bool]string{true: "SLOW"}[slow]
			fmt.Printf("| %v of %d | %d | %.2f | %.2f | %s | %s |\n", op, ranks, bytes,
				float64(windows.Nanoseconds())/1e3, float64(plain.Nanoseconds())/1e3, chosen, mark)
		}
	}
	require.NoError(b, each(world, (*nccl.Comm).Close))
}

// timeWindows times an operation in place whose larger buffer has some size, on a window and on plain memory.
func timeWindows(ctx context.Context, c *nccl.Comm, op comm.Op, bytes int) (times [2]time.Duration, err error) {
	count := bytes / 4 / c.WorldSize()
	for i, symmetric := range []bool{true, false} {
		p, err := newBench(ctx, c, bytes, symmetric)
		if err != nil {
			return times, err
		}
		piece := p.buf + uintptr(4*count*c.Rank())
		var x comm.Call
		switch op {
		case comm.OpAllReduce:
			x = comm.AllReduceCall(p.buf, p.buf, bytes/4, dtype.F32, comm.Sum)
		case comm.OpAllGather:
			x = comm.AllGatherCall(piece, p.buf, count, dtype.F32)
		default:
			x = comm.ReduceScatterCall(p.buf, piece, count, dtype.F32, comm.Sum)
		}
		restore := nccl.ForceWindows(c, symmetric)
		times[i], err = p.captured(ctx, 20, func() error { return x.Make(c) })
		restore()
		if err := errors.Join(err, p.close()); err != nil {
			return times, err
		}
	}
	return times, nil
}

// BenchmarkSubmit is the host's cost of one AllReduce call of 1 KiB: on one GPU,
// where NCCL has nothing to launch, and on all.
func BenchmarkSubmit(b *testing.B) {
	ctx := context.Background()
	b.Run("ranks=1", func(b *testing.B) {
		if gputest.Job(b).WorldSize > 1 {
			b.Skip("a process of a job has more ranks")
		}
		world, err := nccl.InProcess(ctx, openGPUs(b)[:1])
		require.NoError(b, err)
		require.NoError(b, submits(ctx, b, world[0], false))
		require.NoError(b, world[0].Close())
	})
	b.Run("all", func(b *testing.B) {
		world := benchWorld(ctx, b)
		for _, symmetric := range []bool{false, true} {
			b.Run(fmt.Sprintf("symmetric=%t", symmetric), func(b *testing.B) {
				require.NoError(b, each(world, func(c *nccl.Comm) error { return submits(ctx, b, c, symmetric) }))
			})
		}
		require.NoError(b, each(world, (*nccl.Comm).Close))
	})
}

// submits submits in batches, so that the queue of the GPU does not fill up, and
// reports the median time that a call of them takes rank 0.
func submits(ctx context.Context, b *testing.B, c *nccl.Comm, symmetric bool) error {
	const batch = 32
	p, err := newBench(ctx, c, 1024, symmetric)
	if err != nil {
		return err
	}
	var times []time.Duration
	for done := 0; done < b.N; done += batch {
		start := time.Now()
		for range batch {
			err = errors.Join(err, c.AllReduce(p.buf, p.buf, 256, dtype.F32, comm.Sum))
		}
		times = append(times, time.Since(start)/batch)
		err = errors.Join(err, c.Sync(ctx))
	}
	if c.Rank() == 0 {
		slices.Sort(times)
		b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "ns/submit")
		b.ReportMetric(0, "ns/op")
	}
	return errors.Join(err, p.close())
}
