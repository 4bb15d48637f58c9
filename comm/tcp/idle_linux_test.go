package tcp_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// BenchmarkIdleCommunicators is a short allreduce of two ranks that share memory, and a Split, beside 0, 800 and 1,800
// communicators that are open and idle. It reports both as multiples of what they take beside none.
func BenchmarkIdleCommunicators(b *testing.B) {
	tcp.Neighbors(nil, together)
	defer tcp.Neighbors(nil, apart)
	rt := cpu.New()
	defer rt.Close() //nolint:errcheck // a benchmark
	comms, err := world(b.Context(), 2, nil)
	require.NoError(b, err)
	require.NoError(b, comm.Run(b.Context(), comms, func(ctx context.Context, c comm.Communicator) error {
		p, err := rt.Allocate(8)
		if err != nil {
			return err
		}
		var idle []comm.Communicator
		open := func() error {
			sub, err := c.Split(ctx, 0, 0)
			if err == nil {
				idle = append(idle, sub)
			}
			return err
		}
		call := func() error { return errors.Join(c.AllReduce(p, p, 1, dtype.F32, comm.Sum), c.Sync(ctx)) }
		var first, firstSplit time.Duration
		for _, count := range []int{0, 800, 1800} {
			for len(idle) < count {
				if err := open(); err != nil {
					return err
				}
			}
			const calls, splits = 3000, 50
			took, err := timed(calls, call)
			if err != nil {
				return err
			}
			tookSplit, err := timed(splits, open)
			if err != nil {
				return err
			}
			if count == 0 {
				first, firstSplit = took, tookSplit
			}
			if c.Rank() == 0 {
				b.Logf("%5d idle: allreduce %v, %.2f times; Split %v, %.2f times", count,
					took, float64(took)/float64(first), tookSplit, float64(tookSplit)/float64(firstSplit))
			}
		}
		for _, sub := range idle {
			err = errors.Join(err, sub.Close())
		}
		return err
	}))
}

// timed returns what a call takes, as the mean of some.
func timed(times int, call func() error) (time.Duration, error) {
	began := time.Now()
	for range times {
		if err := call(); err != nil {
			return 0, err
		}
	}
	return time.Since(began) / time.Duration(times), nil
}
