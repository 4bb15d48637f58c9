package picture

import (
	"fmt"
	"math"

	"gonum.org/v1/plot/plotter"

	"github.com/tutti-go/tutti/cmd/tutti/internal/train"
)

// accuracyFloor is the start of the accuracy axis if all curves end above it: the first part of a training looks the
// same with all patterns.
const accuracyFloor = 80

// AccuracyAgainstTime draws the best test accuracy of each result so far against the time since its start, on a
// logarithmic axis. A target of the results is a horizontal line. It writes the picture to path, in the format of its
// extension (one of [Formats]).
func AccuracyAgainstTime(results []train.Result, title, path string) error {
	floor := float64(accuracyFloor)
	for _, r := range results {
		if r.Accuracy <= floor {
			floor = 0
		}
	}
	p := NewChart(title, "time since the start (s)", "best test accuracy so far (%)", Right)
	p.X.Tick.Marker = Decades(FormatNumber)

	first := math.Inf(1)
	var curves []Curve
	for i, r := range results {
		var points plotter.XYs
		best := 0.0
		for _, test := range r.Tests {
			x := math.Log10(test.Seconds)
			if math.IsInf(x, 0) {
				continue
			}
			best = max(best, test.Accuracy)
			if best >= floor {
				first = min(first, x)
			}
			points = append(points, plotter.XY{X: x, Y: best})
		}
		curves = append(curves, Curve{accuracyLegend(r), points, LineStyle(i), plotter.PostStep})
	}
	if err := AddCurves(p, curves); err != nil {
		return err
	}
	p.X.Min = min(first, p.X.Max)
	p.Y.Min = floor
	p.Y.Max = 100
	if target := results[0].Target; target > 0 {
		p.Add(Goal(target))
	}
	return Save(p, path)
}

// accuracyLegend names a curve and the time until its target or end.
func accuracyLegend(r train.Result) string {
	switch {
	case r.Target == 0:
		return fmt.Sprintf("%s (%.1f %%)", r.Name(), r.Accuracy)
	case r.TargetSeconds == nil:
		return fmt.Sprintf("%s (not to %g %%)", r.Name(), r.Target)
	}
	return fmt.Sprintf("%s (%.3g s to %g %%)", r.Name(), *r.TargetSeconds, r.Target)
}
