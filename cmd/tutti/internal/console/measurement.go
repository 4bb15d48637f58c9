package console

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
)

// Measurement holds the flags of commands that measure collectives of several sizes.
type Measurement struct {
	World
	Repeats bench.Repeats // how often each size is measured
	Verify  bool          // compare results with a reference
	JSON    bool          // print lines of JSON

	low, high, step int // of sizes
}

// NewMeasurement adds the flags to a command that has these sizes by default.
func NewMeasurement(flags *pflag.FlagSet, w World, low, high int) *Measurement {
	m := &Measurement{
		World:   w,
		Repeats: bench.DefaultRepeats(),
		Verify:  true,
		low:     low,
		high:    high,
		step:    4,
	}
	m.Register(flags)
	flags.Var(SizeFlag(&m.low), "min", "smallest size: bytes, or with K, M, G")
	flags.Var(SizeFlag(&m.high), "max", "largest size")
	flags.IntVar(&m.step, "step", m.step, "`factor` from one size to the next")
	flags.IntVar(&m.Repeats.Warmup, "warmup", m.Repeats.Warmup, "calls before the measurement of a size")
	flags.IntVar(&m.Repeats.Iterations, "iters", m.Repeats.Iterations,
		"calls in a round; 0 means as many as take about 20 ms")
	flags.IntVar(&m.Repeats.Rounds, "rounds", m.Repeats.Rounds, "rounds, of which the median counts")
	flags.BoolVar(&m.Verify, "verify", m.Verify, "compare every element of a result with a reference")
	flags.BoolVar(&m.JSON, "json", false, "print one JSON object a line instead of the table")
	return m
}

// Sizes returns the sizes that the flags select.
func (m *Measurement) Sizes() ([]int, error) {
	sizes, err := bench.Sizes(m.low, m.high, m.step)
	if err != nil {
		return nil, UsageError{err}
	}
	return sizes, nil
}

// HandOver says which sizes of a result used peer memory.
func HandOver(r bench.Result) string {
	switch {
	case r.Ranks == 1:
		return "one rank has no peers"
	case *r.HandOver < 0:
		return "for none of these sizes, over which " + r.Backend + " is faster"
	}
	return fmt.Sprintf("up to %d bytes, beyond that %s is faster", *r.HandOver, r.Backend)
}

// WrongElements returns an error if count is not zero.
func WrongElements(count int64) error {
	if count > 0 {
		return fmt.Errorf("%d elements of the results are wrong", count)
	}
	return nil
}

// FormatTime writes microseconds with as many digits as are meaningful.
func FormatTime(us float64) string {
	switch {
	case us < 10:
		return fmt.Sprintf("%.3f", us)
	case us < 1000:
		return fmt.Sprintf("%.2f", us)
	default:
		return fmt.Sprintf("%.0f", us)
	}
}
