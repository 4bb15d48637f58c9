package main

import "time"

// A way to make a step.
type way int

const (
	computeOnly way = iota // gradients without sums
	reduceOnly             // sums of any data
	sequential             // the compute stream waits for each sum
	overlapped             // it waits for all sums, once
	ways
)

// String names the way.
func (w way) String() string {
	return [ways]string{"computing", "reducing", "one after the other", "overlapped"}[w]
}

// step is the measurement of one step.
type step struct {
	way   way           // how it was made
	total time.Duration // time until all sums are complete
	spans []span        // on both streams
}

// span is the time when a stream was busy with a gradient or with its sum.
type span struct {
	lane       lane          // the stream
	start, end time.Duration // since the step began
}

// lane is a stream.
type lane int

const (
	compute lane = iota
	communication
)

// newStep makes a step from the times at which gradients and sums were complete. Work begins when its input is
// complete and its stream has finished earlier work.
func newStep(mode way, computed, reduced []time.Duration) step {
	s := step{way: mode}
	var computeFree, commFree time.Duration
	for i := range computed {
		s.spans = append(s.spans, span{compute, computeFree, computed[i]})
		s.spans = append(s.spans, span{communication, max(computed[i], commFree), reduced[i]})
		computeFree = computed[i]
		commFree = reduced[i]
		if mode == sequential {
			computeFree = reduced[i]
		}
		s.total = max(s.total, computed[i], reduced[i])
	}
	return s
}
