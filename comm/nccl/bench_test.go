package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
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

// BenchmarkAllReduce times float32 allreduces in place over all GPUs of this
// process, a goroutine each, submitted one by one or in a captured graph.
func BenchmarkAllReduce(b *testing.B) {
	runtimes := openGPUs(b)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes)
	require.NoError(b, err)
	ranks := float64(len(world))
	for _, bytes := range []int{8, 1 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20, 1 << 30} {
		for _, form := range []struct{ symmetric, graph bool }{{false, false}, {false, true}, {true, false}, {true, true}} {
			b.Run(fmt.Sprintf("ranks=%d/symmetric=%t/graph=%t/bytes=%d", len(world), form.symmetric, form.graph, bytes), func(b *testing.B) {
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
	g, err := p.c.Stream().Capture(func() error {
		for range perGraph {
			if err := reduce(); err != nil {
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

// BenchmarkSubmit is the host's cost of one AllReduce call on one GPU.
func BenchmarkSubmit(b *testing.B) {
	runtimes := openGPUs(b)
	ctx := context.Background()
	world, err := nccl.InProcess(ctx, runtimes[:1])
	require.NoError(b, err)
	c := world[0]
	p, err := newBench(ctx, c, 1024, false)
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		if err := c.AllReduce(p.buf, p.buf, 256, dtype.F32, comm.Sum); err != nil {
			b.Fatal(err)
		}
	}
	require.NoError(b, c.Sync(ctx))
	require.NoError(b, p.close())
	require.NoError(b, c.Close())
}
