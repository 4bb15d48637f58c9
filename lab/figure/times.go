package figure

import (
	"fmt"
	"image/color"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
)

// Curve is a line of [TimesAgainstSizes].
type Curve struct {
	Name   string         // in the legend
	Color  int            // equal for curves that belong together
	Dashed bool           // false for a solid line
	Points []bench.Result // points without a size or time are not drawn
}

// TimesAgainstSizes draws curves on logarithmic axes. It leaves out curves with fewer than two points.
func TimesAgainstSizes(curves []Curve, title string) (*plot.Plot, error) {
	// Times rise from the lower left to the upper right, so the upper left is free.
	p := picture.NewChart(title, "size", "time of a call (µs)", picture.Left)
	p.Legend.Top = true
	p.Legend.YOffs = -p.Legend.YOffs
	p.X.Tick.Marker = plot.TickerFunc(binarySizes)
	p.Y.Tick.Marker = picture.Decades(picture.FormatNumber)

	var lines []picture.Curve
	for _, c := range curves {
		line := picture.Curve{Name: c.Name, Style: picture.LineStyle(0)}
		line.Style.Color = curveColors[c.Color%len(curveColors)]
		if c.Dashed {
			line.Style.Dashes = []vg.Length{vg.Points(5), vg.Points(4)}
		}
		for _, t := range c.Points {
			if t.Bytes > 0 && t.Time > 0 {
				line.Points = append(line.Points, plotter.XY{
					X: math.Log2(float64(t.Bytes)),
					Y: math.Log10(t.Time),
				})
			}
		}
		lines = append(lines, line)
	}
	if err := picture.AddCurves(p, lines); err != nil {
		return nil, err
	}
	return p, nil
}

// curveColors are the colors in [picture.Colors] that differ most.
var curveColors = []color.RGBA{
	picture.Colors[0],
	picture.Colors[7],
	picture.Colors[3],
	picture.Colors[1],
	picture.Colors[5],
}

// binarySizes puts ticks at the powers of two on an axis of base-2 logarithms, and labels every fifth.
func binarySizes(low, high float64) (ticks []plot.Tick) {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for exponent := int(math.Ceil(low)); float64(exponent) <= high; exponent++ {
		tick := plot.Tick{Value: float64(exponent)}
		if unit := exponent / 10; exponent%5 == 0 && exponent >= 0 && unit < len(units) {
			tick.Label = fmt.Sprintf("%d %s", 1<<(exponent%10), units[unit])
		}
		ticks = append(ticks, tick)
	}
	return ticks
}
