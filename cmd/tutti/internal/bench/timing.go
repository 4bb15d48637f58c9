package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/measure"
)

// Repeats says how often a measurement is repeated.
type Repeats struct {
	// Warmup is the number of calls before the measurement.
	Warmup int
	// Iterations is the number of calls in a round; 0 chooses one that takes about [roundTime].
	Iterations int
	// Rounds is the number of rounds. The median of their means is reported.
	Rounds int
}

// DefaultRepeats returns the repeats of `tutti bench` without flags.
func DefaultRepeats() Repeats {
	return Repeats{Warmup: 5, Rounds: 7}
}

// roundTime is the length of a round if Repeats.Iterations is 0.
const roundTime = 20 * time.Millisecond

// maxIterations is the largest number of iterations chosen for a round.
const maxIterations = 20000

// Limits of the flags. Each round stores its time, and a round of the longest length, with calls of a microsecond,
// would run for a month.
const (
	mostRounds = 1 << 20
	mostCalls  = 1 << 41
)

// Validate returns an error that names the first invalid number.
func (n Repeats) Validate() error {
	switch {
	case n.Warmup < 0 || n.Warmup > mostCalls:
		return fmt.Errorf("warmup %d is not in [0, %d]", n.Warmup, mostCalls)
	case n.Iterations < 0 || n.Iterations > mostCalls:
		return fmt.Errorf("iters %d is not in [0, %d] (0 chooses)", n.Iterations, mostCalls)
	case n.Rounds < 1 || n.Rounds > mostRounds:
		return fmt.Errorf("rounds %d is not in [1, %d]", n.Rounds, mostRounds)
	}
	return nil
}

// A round runs a number of iterations, which all ranks begin together. It returns their total time on this rank, in
// seconds.
type round func(ctx context.Context, iterations int) (seconds float64, err error)

// timeCalls makes a round of calls, one after the other.
func timeCalls(r backend.Rank, call func() error) round {
	return func(ctx context.Context, iterations int) (float64, error) {
		if err := r.Comm.Barrier(ctx); err != nil {
			return 0, err
		}
		start := time.Now()
		for range iterations {
			if err := call(); err != nil {
				return 0, err
			}
		}
		return time.Since(start).Seconds(), nil
	}
}

// timeSubmissions makes a round of submit calls without waits in between, timed by the device's clock. An untimed
// call precedes them: it ends on all devices at about the same time, whereas hosts leave a barrier up to hundreds of
// microseconds apart.
func timeSubmissions(r backend.Rank, submit func() error) round {
	return func(ctx context.Context, iterations int) (float64, error) {
		if err := r.Comm.Barrier(ctx); err != nil {
			return 0, err
		}
		if err := submit(); err != nil {
			return 0, err
		}
		took, err := r.Stream.Time(ctx, func() error {
			for range iterations {
				if ctx.Err() != nil {
					return comm.ContextError(ctx)
				}
				if err := submit(); err != nil {
					return err
				}
			}
			return nil
		})
		return took.Seconds(), err
	}
}

// inBatches makes a round of calls from a round of batches. It runs enough whole batches for the requested calls.
func inBatches(batches round, size int) round {
	return func(ctx context.Context, iterations int) (float64, error) {
		n := (iterations + size - 1) / size
		seconds, err := batches(ctx, n)
		if n == 0 || err != nil {
			return 0, err
		}
		return seconds * float64(iterations) / float64(n*size), nil
	}
}

// calibrate warms up and returns the number of iterations in a round. It is collective. One-time work, such as auto's
// choice, ends before the number is chosen.
func (n Repeats) calibrate(ctx context.Context, r backend.Rank, run round) (iterations int, err error) {
	if _, err := run(ctx, n.Warmup); err != nil || n.Iterations != 0 {
		return n.Iterations, err
	}
	return measure.Fit(roundTime.Seconds(), maxIterations, slowest(ctx, r), func(n int) (float64, error) {
		return run(ctx, n)
	})
}

// perIteration makes a round that returns the mean time of its iterations.
func perIteration(ctx context.Context, run round, iterations int) measure.Round {
	return func() (float64, error) {
		seconds, err := run(ctx, iterations)
		return seconds / float64(iterations), err
	}
}

// slowest returns a function that takes the slowest rank's time.
func slowest(ctx context.Context, r backend.Rank) measure.Slowest {
	return func(values []float64) ([]float64, error) {
		return backend.Reduce(ctx, r, values, comm.Max)
	}
}
