package plot

import (
	"fmt"
	"math"
	"strings"

	"gonum.org/v1/plot/plotter"

	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
)

// mostCurves is the number of lines that an eye can tell apart in a picture of 600 pixels.
const mostCurves = 5

// axis is one axis of a picture.
type axis struct {
	name  string                  // value of the flag
	label string                  // beside the axis
	value func(p *Point) *float64 // nil if the point has no value
}

var (
	across = []axis{
		{"bytes", "sent by each rank", func(p *Point) *float64 { return p.SentBytes }},
		{"seconds", "seconds", func(p *Point) *float64 { return p.Seconds }},
		{"steps", "steps", func(p *Point) *float64 { return p.Step }},
	}
	upward = []axis{
		{"accuracy", "test accuracy (%)", func(p *Point) *float64 { return p.Accuracy }},
		{"loss", "test loss", func(p *Point) *float64 { return p.Loss }},
	}
)

// Across returns the names of the horizontal axes.
func Across() []string { return names(across) }

// Upward returns the names of the vertical axes.
func Upward() []string { return names(upward) }

func names(axes []axis) (list []string) {
	for _, a := range axes {
		list = append(list, a.name)
	}
	return list
}

// find returns the axis with the given name, one of Across or Upward.
func find(axes []axis, name string) axis {
	for _, a := range axes {
		if a.name == name {
			return a
		}
	}
	panic("plot: there is no axis " + name)
}

// Draw draws trainings on linear axes and writes the picture in the format of path's extension. x is one of Across,
// and y of Upward. Points without these values are omitted.
func Draw(curves []Curve, x, y, title, path string) error {
	if len(curves) > mostCurves {
		var all []string
		for _, c := range curves {
			all = append(all, c.Name)
		}
		return fmt.Errorf("%d trainings, and a picture has at most %d: choose by --only from %s",
			len(curves), mostCurves, strings.Join(all, ", "))
	}
	horizontal := find(across, x)
	vertical := find(upward, y)
	lines := make([]plotter.XYs, len(curves))
	furthest := 0.0
	for i, c := range curves {
		for _, p := range c.Points {
			h := horizontal.value(&p)
			v := vertical.value(&p)
			if !finite(h) || !finite(v) {
				continue
			}
			lines[i] = append(lines[i], plotter.XY{X: *h, Y: *v})
			furthest = math.Max(furthest, *h)
		}
		if len(lines[i]) < 2 {
			const format = "%q has %d points with both %s and %s: a line needs two%s"
			return fmt.Errorf(format, c.Name, len(lines[i]), x, y, c.instead())
		}
	}
	label := horizontal.label
	if x == "bytes" {
		unit, divisor := byteUnit(furthest)
		label += " (" + unit + ")"
		for _, line := range lines {
			for i := range line {
				line[i].X /= divisor
			}
		}
	}
	p := picture.NewChart(title, label, vertical.label, picture.Right)
	p.Legend.Top = y == "loss" // losses fall
	if p.Legend.Top {
		p.Legend.YOffs *= -1
	}
	var drawn []picture.Curve
	for i, c := range curves {
		drawn = append(drawn, picture.Curve{Name: c.Name, Points: lines[i], Style: picture.LineStyle(i)})
	}
	if err := picture.AddCurves(p, drawn); err != nil {
		return err
	}
	p.X.Min = 0
	return picture.SaveSmall(p, path)
}

// instead returns flags that can draw the training, "" if there are none.
func (c Curve) instead() string {
	for _, horizontal := range across {
		for _, vertical := range upward {
			count := 0
			for _, p := range c.Points {
				if finite(horizontal.value(&p)) && finite(vertical.value(&p)) {
					count++
				}
			}
			if count > 1 {
				return fmt.Sprintf("; it has them with --x %s --y %s", horizontal.name, vertical.name)
			}
		}
	}
	return ""
}

// byteUnit returns the largest decimal unit in which a number of bytes is at least 1, and the unit's size in bytes.
func byteUnit(bytes float64) (name string, size float64) {
	name = "B"
	size = 1.0
	for _, unit := range []string{"kB", "MB", "GB", "TB"} {
		if bytes < 1000*size {
			break
		}
		name = unit
		size *= 1000
	}
	return name, size
}
