package picture

import (
	"fmt"
	"image/color"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
)

// Curve is a line of [TimesAgainstSizes].
type Curve struct {
	Name   string
	Color  int // the same for curves that belong together
	Dashed bool
	Points []bench.Result
}

// TimesAgainstSizes draws curves on logarithmic axes and writes them to path, whose
// extension (one of [Formats]) says how. Curves with fewer than two points are left
// out.
func TimesAgainstSizes(curves []Curve, title, path string) error {
	// Times rise from the lower left to the upper right: the upper left is free.
	p := newChart(title, "size", "time of a call (µs)", left)
	p.Legend.Top, p.Legend.YOffs = true, -p.Legend.YOffs
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(binarySizes), decades(formatNumber)

	var lines []curve
	for _, c := range curves {
		line := curve{name: c.Name, style: lineStyle(0)}
		line.style.Color = curveColors[c.Color%len(curveColors)]
		if c.Dashed {
			line.style.Dashes = []vg.Length{vg.Points(5), vg.Points(4)}
		}
		for _, t := range c.Points {
			if t.Bytes > 0 && t.Time > 0 {
				line.points = append(line.points, plotter.XY{X: math.Log2(float64(t.Bytes)), Y: math.Log10(t.Time)})
			}
		}
		lines = append(lines, line)
	}
	if err := addCurves(p, lines); err != nil {
		return err
	}
	return save(p, path)
}

// curveColors are those of [colors] that differ most.
var curveColors = []color.RGBA{colors[0], colors[7], colors[3], colors[1], colors[5]}

// binarySizes puts ticks at the powers of two of an axis of base-2 logarithms, and
// labels every fifth.
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
