package compare

import (
	"context"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/measure"
)

// An allreduce between goroutines takes at least as long as two steps. Two ranks must exchange a message, which is a
// cache line each way, and all ranks read their buffers once and write the results once. The floor is the longer of
// the two, each measured separately.

const (
	floorRounds = 7
	roundTime   = 20 * time.Millisecond
	streamFrom  = 24 << 20 // total bytes written from which stores bypass the caches
)

// floor is the turn of the subject that makes only these steps.
func (c Config) floor(ctx context.Context, ranks int) (lines []measured, err error) {
	sizes, _ := bench.Sizes(c.Low, c.High, c.Step) // the sizes are valid
	lineEachWay := perCall(pingPong)
	for _, bytes := range sizes {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		for _, place := range []bench.Place{bench.OutOfPlace, bench.InPlace} {
			lines = append(lines, measured{
				Work{Bytes: bytes, Place: place},
				max(lineEachWay, perCall(mover(ranks, bytes, place))),
			})
		}
	}
	return lines, nil
}

// perCall returns the microseconds of one of run's calls: the median over rounds.
func perCall(run func(calls int)) float64 {
	timed := func(calls int) (float64, error) {
		start := time.Now()
		run(calls)
		return time.Since(start).Seconds(), nil
	}
	calls, _ := measure.Fit(roundTime.Seconds(), math.MaxInt32, measure.Alone, timed)
	calls = max(3, calls)
	rounds, _ := measure.InTurns(0, floorRounds, measure.Alone, func() (float64, error) {
		return timed(calls)
	})
	return measure.Median(rounds[0]) * 1e6 / float64(calls)
}

// pingPong sends a line from one goroutine to another and back, calls times.
func pingPong(calls int) {
	var lines [2]struct {
		_     [128]byte
		count atomic.Int64
		_     [120]byte
	}
	ping := &lines[0].count
	back := &lines[1].count
	var pong sync.WaitGroup
	await := func(line *atomic.Int64, count int64) {
		for looks := 1; line.Load() < count; looks++ {
			if looks%(1<<12) == 0 {
				runtime.Gosched() // the other one may have no processor
			}
		}
	}
	pong.Go(func() {
		for i := range int64(calls) {
			await(ping, i+1)
			back.Store(i + 1)
		}
	})
	for i := range int64(calls) {
		ping.Store(i + 1)
		await(back, i+1)
	}
	pong.Wait()
}

// mover returns a function that reads every rank's buffer once and writes every rank's result once, on all processors
// together.
func mover(ranks, bytes int, place bench.Place) func(calls int) {
	send := make([][]byte, ranks)
	recv := make([][]byte, ranks)
	for r := range ranks {
		// Written once: pages that were only read all share one physical page.
		send[r] = make([]byte, bytes)
		recv[r] = make([]byte, bytes)
		for i := range bytes {
			send[r][i] = 1
			recv[r][i] = 1
		}
		if place == bench.InPlace {
			recv[r] = send[r]
		}
	}
	workers := min(ranks, runtime.GOMAXPROCS(0))
	if bytes < 64<<10 {
		workers = 1 // handing over a part would take longer
	}
	part := bytes / workers
	return func(calls int) {
		var all sync.WaitGroup
		for w := range workers {
			all.Go(func() {
				offset := w * part
				for range calls {
					for r := range ranks {
						// From another rank's buffer, so that it is a copy in place as well.
						from := send[(r+1)%ranks]
						to := recv[r]
						hostops.Copy(
							hostmem.Addr(to)+uintptr(offset),
							hostmem.Addr(from)+uintptr(offset),
							part,
							bytes*ranks >= streamFrom,
						)
					}
				}
			})
		}
		all.Wait()
	}
}
