// Package drawing draws the pictures of the documents from the data in lab/results: SVG of 600 by 360 pixels, in one
// set of fonts and colours, with what matters written beside the line that shows it.
package drawing

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// Colours that readers with any sight tell apart, and the ones of text in them.
const (
	black  = "#000000"
	indigo = "#332288"
	teal   = "#44AA99"
	rose   = "#CC6677"
	sky    = "#88CCEE"

	darkTeal = "#1F7A6C"
	darkRose = "#A63D52"
)

// The corners of the area that curves are drawn in, in pixels.
const (
	left   = 60.0
	right  = 585.0
	top    = 50.0
	bottom = 305.0
)

// Axis is one of a chart, from Min to Max.
type Axis struct {
	Label string
	Min   float64
	Max   float64
	Ticks []Tick
	Log   bool
}

// Tick is a labelled place of an axis.
type Tick struct {
	Value float64
	Label string
}

// share returns how far along the axis a value is, from 0 to 1. What lies beyond an end is drawn there.
func (a Axis) share(value float64) float64 {
	value = math.Min(math.Max(value, a.Min), a.Max)
	if a.Log {
		return math.Log(value/a.Min) / math.Log(a.Max/a.Min)
	}
	return (value - a.Min) / (a.Max - a.Min)
}

// Point is a place in a chart, in the units of its axes.
type Point struct {
	X, Y float64
}

// Curve is a line of a chart.
type Curve struct {
	Name   string // in the legend; "" means it has no line there
	Points []Point
	Color  string
	Dashes string // "" means none
	Steps  bool   // it stays at a point's height until the next point
}

// Note is a text in a chart, in pixels.
type Note struct {
	X, Y   float64
	Text   string
	Color  string
	Anchor string // "" means start
}

// Chart is a picture of curves.
type Chart struct {
	Title   string
	Summary string // for those who do not see it
	X, Y    Axis
	Bands   []Band
	Curves  []Curve
	Marks   []Mark
	Notes   []Note
}

// Band is a part of the X axis with another background.
type Band struct {
	From, To float64
	Color    string
}

// Mark is a dot on a curve.
type Mark struct {
	Point
	Color string
}

// SVG returns the picture.
func (c *Chart) SVG() string {
	s := newSketch(c.Title, c.Summary)
	for _, band := range c.Bands {
		from := c.place(Point{X: band.From}).X
		to := c.place(Point{X: band.To}).X
		s.printf(`<rect x="%.1f" y="%g" width="%.1f" height="%g" fill="%s"/>`, from, top, to-from, bottom-top, band.Color)
	}
	for _, tick := range c.X.Ticks {
		x := c.place(Point{X: tick.Value}).X
		s.line("M%.1f,%gV%g", x, top, bottom)
		s.text(Note{X: x, Y: bottom + 17, Text: tick.Label, Anchor: "middle"}, 12)
	}
	for _, tick := range c.Y.Ticks {
		y := c.place(Point{Y: tick.Value}).Y
		s.line("M%g,%.1fH%g", left, y, right)
		s.text(Note{X: left - 7, Y: y + 4, Text: tick.Label, Anchor: "end"}, 12)
	}
	s.printf(`<path d="M%g,%gV%gH%g" fill="none" stroke="#000000" stroke-width="0.75"/>`, left, top, bottom, right)
	for _, curve := range c.Curves {
		s.printf(`<path d="%s" fill="none" stroke="%s" stroke-width="2"%s/>`,
			c.path(curve), curve.Color, dashes(curve.Dashes))
	}
	c.legend(s)
	for _, mark := range c.Marks {
		p := c.place(mark.Point)
		s.printf(`<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>`, p.X, p.Y, mark.Color)
	}
	for _, note := range c.Notes {
		s.text(note, 13)
	}
	s.text(Note{X: (left + right) / 2, Y: 344, Text: c.X.Label, Anchor: "middle"}, 13)
	s.printf(`<text transform="translate(18,178) rotate(-90)" font-size="13" text-anchor="middle">%s</text>`,
		html.EscapeString(c.Y.Label))
	return s.end()
}

// legend names curves in the upper left corner.
func (c *Chart) legend(s *sketch) {
	y := top + 16
	for _, curve := range c.Curves {
		if curve.Name == "" {
			continue
		}
		s.printf(`<path d="M%g,%gh30" stroke="%s" stroke-width="2"%s/>`, left+16, y, curve.Color, dashes(curve.Dashes))
		s.text(Note{X: left + 54, Y: y + 4, Text: curve.Name}, 13)
		y += 19
	}
}

// place returns where a point is, in pixels.
func (c *Chart) place(p Point) Point {
	return Point{
		X: left + (right-left)*c.X.share(p.X),
		Y: bottom - (bottom-top)*c.Y.share(p.Y),
	}
}

// path returns the d of a curve.
func (c *Chart) path(curve Curve) string {
	var d strings.Builder
	var last Point
	for i, point := range curve.Points {
		p := c.place(point)
		switch {
		case i == 0:
			fmt.Fprintf(&d, "M%.1f,%.1f", p.X, p.Y)
		case curve.Steps:
			fmt.Fprintf(&d, "L%.1f,%.1fL%.1f,%.1f", p.X, last.Y, p.X, p.Y)
		default:
			fmt.Fprintf(&d, "L%.1f,%.1f", p.X, p.Y)
		}
		last = p
	}
	return d.String()
}

func dashes(pattern string) string {
	if pattern == "" {
		return ""
	}
	return fmt.Sprintf(` stroke-dasharray="%s"`, pattern)
}

// sketch is a picture that is being written.
type sketch struct {
	out strings.Builder
}

func newSketch(title, summary string) *sketch {
	s := &sketch{}
	s.printf(`<svg xmlns="http://www.w3.org/2000/svg" width="600" height="360" viewBox="0 0 600 360" ` +
		`font-family="Liberation Sans,Arimo,Arial,Helvetica,sans-serif" role="img" aria-labelledby="title">`)
	s.printf(`<title id="title">%s</title>`, html.EscapeString(summary))
	s.printf(`<rect width="600" height="360" fill="#FFFFFF"/>`)
	s.text(Note{X: 320, Y: 22, Text: title, Anchor: "middle"}, 14)
	return s
}

// printf writes a line.
func (s *sketch) printf(format string, args ...any) {
	fmt.Fprintf(&s.out, format+"\n", args...)
}

// line writes one of the grid.
func (s *sketch) line(format string, args ...any) {
	s.printf(`<path d="%s" stroke="#D7D7D7" stroke-width="0.5"/>`, fmt.Sprintf(format, args...))
}

// text writes a note in letters of a height.
func (s *sketch) text(n Note, size int) {
	style := ""
	if n.Anchor != "" {
		style += fmt.Sprintf(` text-anchor="%s"`, n.Anchor)
	}
	if n.Color != "" && n.Color != black {
		style += fmt.Sprintf(` fill="%s"`, n.Color)
	}
	s.printf(`<text x="%.1f" y="%.1f" font-size="%d"%s>%s</text>`, n.X, n.Y, size, style, html.EscapeString(n.Text))
}

func (s *sketch) end() string {
	s.printf(`</svg>`)
	return s.out.String()
}
