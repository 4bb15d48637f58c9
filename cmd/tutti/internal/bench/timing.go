package bench

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/median"
	"github.com/tutti-go/tutti/comm"
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

// DefaultRepeats are those of `tutti bench` without flags.
func DefaultRepeats() Repeats { return Repeats{Warmup: 5, Rounds: 7} }

// roundTime is how long a round takes when Repeats.Iterations is 0.
const roundTime = 20 * time.Millisecond

// Limits of the iterations of a round, when they are chosen: calls that take longer
// than a round are not held up by each other.
const (
	minIterations = 1
	maxIterations = 20000
)

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

// settle warms up and returns the iterations of a round. It is collective. What comes
// once, such as auto's choice, is over by the time that iterations are fitted to.
func (n Repeats) settle(ctx context.Context, r backend.Rank, run round) (iterations int, err error) {
	if _, err := run(ctx, n.Warmup); err != nil || n.Iterations != 0 {
		return n.Iterations, err
	}
	return fitIterations(ctx, r, run)
}

// medianTime returns the seconds of one iteration: the median of its rounds. It is
// collective.
func (n Repeats) medianTime(ctx context.Context, r backend.Rank, run round, iterations int) (float64, error) {
	seconds, err := n.inTurns(ctx, r, []round{run}, []int{iterations})
	if err != nil {
		return 0, err
	}
	return median.Of(seconds[0]), nil
}

// inTurns measures several in turns: what else the machine does in a while, it does
// to all of them. Each is the first in some of the rounds. It returns for each of them
// the seconds of one iteration in each round: the mean over its iterations, on the
// slowest rank. It is collective.
func (n Repeats) inTurns(ctx context.Context, r backend.Rank, runs []round, iterations []int) ([][]float64, error) {
	means := make([]float64, len(runs)*n.Rounds) // one after the other
	for i := range n.Rounds {
		for turn := range runs {
			which := (turn + i) % len(runs)
			seconds, err := runs[which](ctx, iterations[which])
			if err != nil {
				return nil, err
			}
			means[which*n.Rounds+i] = seconds / float64(iterations[which])
		}
	}
	slowest, err := backend.Reduce(ctx, r, means, comm.Max)
	return slices.Collect(slices.Chunk(slowest, n.Rounds)), err
}

// fitIterations finds out, together with the other ranks, how many iterations
// take about roundTime.
func fitIterations(ctx context.Context, r backend.Rank, run round) (int, error) {
	for iterations := 2; ; iterations *= 8 {
		own, err := run(ctx, iterations)
		if err != nil {
			return 0, err
		}
		slowest, err := backend.Reduce(ctx, r, []float64{own}, comm.Max)
		if err != nil {
			return 0, err
		}
		if seconds := slowest[0]; seconds > roundTime.Seconds()/16 || iterations >= maxIterations {
			fit := float64(iterations) * roundTime.Seconds() / seconds
			return int(math.Round(min(max(fit, minIterations), maxIterations))), nil
		}
	}
}
