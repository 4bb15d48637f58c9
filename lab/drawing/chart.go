// Package drawing draws the pictures of the documents from the data in lab/results, in the style of package picture.
// Labels stand beside the lines that they explain.
package drawing

import (
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
)

// Colors of lines, and darker ones for the labels beside teal and rose lines, which are too light for letters.
var (
	black    = picture.Colors[0]
	indigo   = picture.Colors[1]
	sky      = picture.Colors[2]
	teal     = picture.Colors[3]
	rose     = picture.Colors[7]
	darkTeal = color.RGBA{R: 0x1F, G: 0x7A, B: 0x6C, A: 255}
	darkRose = color.RGBA{R: 0xA6, G: 0x3D, B: 0x52, A: 255}
)

// note is a text beside a point.
type note struct {
	point plotter.XY      // of the data
	shift vg.Point        // from the point to the text
	align draw.XAlignment // 0: the text starts at the point
	color color.Color     // of the letters
	text  string          // may have several lines
}

// addNotes adds notes to a picture.
func addNotes(p *plot.Plot, notes ...note) error {
	for _, n := range notes {
		labels, err := plotter.NewLabels(plotter.XYLabels{XYs: plotter.XYs{n.point}, Labels: []string{n.text}})
		if err != nil {
			return err
		}
		labels.Offset = n.shift
		style := &labels.TextStyle[0]
		style.Font = p.X.Tick.Label.Font
		style.Color = n.color
		style.XAlign = n.align
		style.YAlign = draw.YCenter
		p.Add(labels)
	}
	return nil
}

// addDot marks a point.
func addDot(p *plot.Plot, point plotter.XY, fill color.Color) error {
	dot, err := plotter.NewScatter(plotter.XYs{point})
	if err != nil {
		return err
	}
	dot.GlyphStyle = draw.GlyphStyle{Color: fill, Radius: vg.Points(2.75), Shape: draw.CircleGlyph{}}
	p.Add(dot)
	return nil
}

// setRange limits an axis to a range.
func setRange(axis *plot.Axis, low, high float64, ticks plot.TickerFunc) {
	axis.Min = low
	axis.Max = high
	axis.Tick.Marker = ticks
}

// lineStyle returns the style of a curve. Without dashes its line is solid.
func lineStyle(stroke color.Color, dashes ...vg.Length) draw.LineStyle {
	style := picture.LineStyle(0)
	style.Color = stroke
	style.Dashes = dashes
	return style
}
