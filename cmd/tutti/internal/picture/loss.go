// Package picture draws the results of the commands.
package picture

import (
	"errors"
	"fmt"
	"image/color"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/tutti-go/tutti/cmd/tutti/internal/train"
)

// ErrNothingToDraw reports that a picture would be empty.
var ErrNothingToDraw = errors.New("nothing to draw")

// pointsPerCurve is the number of points, spread evenly over the logarithm of the bytes or seconds.
const pointsPerCurve = 60

// LossAgainstBytes draws the training loss of each result against the bytes sent by a rank up to then, both on
// logarithmic axes. It writes the picture to path, in the format of its extension (one of [Formats]).
func LossAgainstBytes(results []train.Result, path string) error {
	return loss(results, path, "bytes sent", "sent per rank since the start (bytes)", FormatBytes,
		func(p train.Point) float64 { return p.SentBytes })
}

// LossAgainstTime is LossAgainstBytes with the time since the start.
func LossAgainstTime(results []train.Result, path string) error {
	return loss(results, path, "time", "time since the start (s)", FormatNumber,
		func(p train.Point) float64 { return p.Seconds })
}

// loss draws losses against x.
func loss(
	results []train.Result,
	path, against, label string,
	format func(float64) string,
	x func(train.Point) float64,
) error {
	// Losses fall from the upper left to the lower right, so the lower left is free.
	p := NewChart(
		"Training loss against "+against+" (with the test accuracy)",
		label,
		"training loss (mean over recent steps)",
		Left,
	)
	p.X.Tick.Marker = Decades(format)
	p.Y.Tick.Marker = Decades(FormatNumber)

	var curves []Curve
	for i, r := range results {
		name := fmt.Sprintf("%s (%.1f %%)", r.Name(), r.Accuracy)
		curves = append(curves, Curve{name, smooth(r.Curve, pointsPerCurve, x), LineStyle(i), plotter.NoStep})
	}
	if err := AddCurves(p, curves); err != nil {
		return err // no bytes were sent
	}
	return Save(p, path)
}

// Colors are black and Paul Tol's "muted" scheme, which readers with any form of color vision can tell apart
// (https://sronpersonalpages.nl/~pault/).
var Colors = []color.RGBA{
	{A: 255},
	{R: 0x33, G: 0x22, B: 0x88, A: 255},
	{R: 0x88, G: 0xcc, B: 0xee, A: 255},
	{R: 0x44, G: 0xaa, B: 0x99, A: 255},
	{R: 0x11, G: 0x77, B: 0x33, A: 255},
	{R: 0x99, G: 0x99, B: 0x33, A: 255},
	{R: 0xdd, G: 0xcc, B: 0x77, A: 255},
	{R: 0xcc, G: 0x66, B: 0x77, A: 255},
	{R: 0x88, G: 0x22, B: 0x55, A: 255},
	{R: 0xaa, G: 0x44, B: 0x99, A: 255},
}

// LineStyle returns the style of the i-th curve. Patterns that send the same have coincident curves, so every second
// one is dashed and shows the one below through its gaps. Curves that reuse a color are dotted.
func LineStyle(i int) draw.LineStyle {
	style := draw.LineStyle{Color: Colors[i%len(Colors)], Width: vg.Points(1.7)}
	if i >= len(Colors) {
		style.Dashes = []vg.Length{vg.Points(1.5), vg.Points(3)}
	} else if i%2 == 1 {
		style.Width = vg.Points(2)
		style.Dashes = []vg.Length{vg.Points(7), vg.Points(5)}
	}
	return style
}

// smooth reduces a curve to at most n points, spread evenly over the logarithm of x. Each point is the mean of the
// steps since the previous point, so that the noise of single batches does not hide the trend. Steps at x = 0, and
// losses without a logarithm, are omitted. The points are base-10 logarithms, because the plot package reserves too
// much space for the label of an axis with a logarithmic scale.
func smooth(curve []train.Point, n int, x func(train.Point) float64) plotter.XYs {
	usable := func(p train.Point) bool {
		return x(p) > 0 && p.Loss > 0 && !math.IsInf(p.Loss, 0)
	}
	first := slices.IndexFunc(curve, usable)
	if first < 0 {
		return nil
	}
	low := math.Log10(x(curve[first]))
	high := math.Log10(x(curve[len(curve)-1]))
	var out plotter.XYs
	var sum float64
	var count int
	next := low
	for _, p := range curve[first:] {
		if !usable(p) {
			continue
		}
		sum += p.Loss
		count++
		position := math.Log10(x(p))
		if position < next {
			continue
		}
		out = append(out, plotter.XY{X: position, Y: math.Log10(sum / float64(count))})
		sum = 0
		count = 0
		next = position + (high-low)/float64(n)
	}
	return out
}

// Decades puts labeled ticks at 1 (and 2 and 5 if there is space) times powers of ten on an axis of base-10
// logarithms, and small ticks in between.
func Decades(format func(v float64) string) plot.TickerFunc {
	return func(low, high float64) (ticks []plot.Tick) {
		for exponent := math.Floor(low); exponent <= high; exponent++ {
			for digit := 1.0; digit <= 9; digit++ {
				v := digit * math.Pow(10, exponent)
				tick := plot.Tick{Value: math.Log10(v)}
				if tick.Value < low || tick.Value > high {
					continue
				}
				if digit == 1 || high-low < 2.5 && (digit == 2 || digit == 5) {
					tick.Label = format(v)
				}
				ticks = append(ticks, tick)
			}
		}
		return ticks
	}
}

// FormatBytes writes a number of bytes with a decimal unit.
func FormatBytes(v float64) string {
	units := []string{"B", "kB", "MB", "GB", "TB"}
	i := 0
	for v >= 999.5 && i < len(units)-1 {
		v /= 1000
		i++
	}
	return FormatNumber(v) + " " + units[i]
}

// FormatNumber writes a number without trailing zeros.
func FormatNumber(v float64) string {
	return fmt.Sprintf("%.4g", v)
}
