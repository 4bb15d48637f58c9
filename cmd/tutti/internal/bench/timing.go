package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/measure"
)

// Repeats says how often something is measured.
type Repeats struct {
	// Warmup is how many calls precede the measurement.
	Warmup int
	// Iterations of a round, 0 for as many as take about [roundTime].
	Iterations int
	// Rounds are measured, and the median of their means is reported.
	Rounds int
}

// DefaultRepeats are the repeats of `tutti bench` without flags.
func DefaultRepeats() Repeats {
	return Repeats{Warmup: 5, Rounds: 7}
}

// roundTime is how long a round takes when Repeats.Iterations is 0.
const roundTime = 20 * time.Millisecond

// maxIterations is the most iterations of a round when they are chosen.
const maxIterations = 20000

// Limits of what is asked for: each round keeps its time, and calls that take a
// microsecond each would go on for a month.
const (
	mostRounds = 1 << 20
	mostCalls  = 1 << 41
)

// Validate names the first number that cannot be used.
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

// A round runs a number of iterations, which the ranks begin together, and
// returns how long all of them took on this rank, in seconds.
type round func(ctx context.Context, iterations int) (seconds float64, err error)

// timeCalls makes a round of calls one after the other.
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

// timeSubmissions makes a round of calls of submit one after the other, without
// a wait in between, by the clock of the device that they run on. One more that
// is not timed precedes them: it ends on all devices at about the same time,
// whereas the hosts leave a barrier up to hundreds of microseconds apart.
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

// inBatches makes a round of calls out of one of batches of calls, of which it
// runs as many as the calls need, the last one whole.
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

// calibrate warms up and returns the iterations of a round. It is collective. One-time work, such as auto's choice, is
// over by the time that iterations are fitted to.
func (n Repeats) calibrate(ctx context.Context, r backend.Rank, run round) (iterations int, err error) {
	if _, err := run(ctx, n.Warmup); err != nil || n.Iterations != 0 {
		return n.Iterations, err
	}
	return measure.Fit(roundTime.Seconds(), maxIterations, slowest(ctx, r), func(n int) (float64, error) {
		return run(ctx, n)
	})
}

// perIteration makes a measured round of a round: it returns the mean of its iterations.
func perIteration(ctx context.Context, run round, iterations int) measure.Round {
	return func() (float64, error) {
		seconds, err := run(ctx, iterations)
		return seconds / float64(iterations), err
	}
}

// slowest has the slowest rank's times count.
func slowest(ctx context.Context, r backend.Rank) measure.Slowest {
	return func(values []float64) ([]float64, error) {
		return backend.Reduce(ctx, r, values, comm.Max)
	}
}
