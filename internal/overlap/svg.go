package overlap

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"
)

// Measures of the picture, in pixels.
const (
	svgWidth   = 1200
	svgLeft    = 130 // of the time axis
	svgRight   = 20
	svgTop     = 40
	svgLane    = 34 // height of a lane
	svgTitle   = 30 // room for a timeline's name
	svgBottom  = 50
	svgTicks   = 10 // about as many numbers on the time axis
	svgTickLen = 6
)

// ErrNothingToDraw: there are no timelines, or they have no length.
var ErrNothingToDraw = errors.New("nothing to draw")

// WriteSVG draws timelines one below the other, on one axis of time, as a
// picture in the SVG format.
func WriteSVG(w io.Writer, timelines []Timeline) error {
	longest := Longest(timelines)
	if longest == 0 {
		return fmt.Errorf("overlap: %w", ErrNothingToDraw)
	}
	var b bytes.Buffer
	row := svgTitle + svgLane*len(Lanes())
	bottom := svgTop + row*len(timelines)
	at := func(us float64) float64 { return svgLeft + us/longest*(svgWidth-svgLeft-svgRight) }
	text := func(x, y float64, anchor, s string) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`+"\n", x, y, anchor, escape(s))
	}

	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="13">`+"\n", svgWidth, bottom+svgBottom)
	fmt.Fprintln(&b, `<rect width="100%" height="100%" fill="white"/>`)
	for i, kind := range Kinds() {
		x := float64(svgLeft + 110*i)
		fmt.Fprintf(&b, `<rect x="%.1f" y="12" width="14" height="14" fill="%s"/>`+"\n", x, hex(kind.Color()))
		text(x+20, 24, "start", string(kind))
	}
	for i, t := range timelines {
		top := float64(svgTop + row*i)
		text(svgLeft, top+svgTitle-8, "start", fmt.Sprintf("%s: %.1f ms", t.Name, t.Total/1e3))
		lanes := make(map[Lane]float64)
		for l, lane := range Lanes() {
			lanes[lane] = top + svgTitle + float64(svgLane*l)
			text(svgLeft-10, lanes[lane]+svgLane/2+3, "end", string(lane))
		}
		for _, s := range t.Spans {
			fmt.Fprintf(&b, `<rect x="%.2f" y="%.1f" width="%.2f" height="%d" fill="%s" stroke="white" stroke-width="0.5"><title>%s: %.3f ms</title></rect>`+"\n",
				at(s.Start), lanes[s.Kind.Lane()]+2, at(s.End)-at(s.Start), svgLane-4, hex(s.Kind.Color()), escape(s.Name), (s.End-s.Start)/1e3)
		}
	}
	fmt.Fprintf(&b, `<path d="M%d %dH%d" stroke="black"/>`+"\n", svgLeft, bottom+svgTickLen, svgWidth-svgRight)
	for us, step := 0.0, tickStep(longest); us <= longest; us += step {
		fmt.Fprintf(&b, `<path d="M%.1f %dv%d" stroke="black"/>`+"\n", at(us), bottom+svgTickLen, svgTickLen)
		text(at(us), float64(bottom+svgTickLen+20), "middle", fmt.Sprintf("%.4g", us/1e3))
	}
	text(svgWidth-svgRight, float64(bottom+svgBottom-8), "end", "time (ms)")
	fmt.Fprintln(&b, "</svg>")
	_, err := w.Write(b.Bytes())
	return err
}

// Longest returns the length of the longest timeline, in microseconds.
func Longest(timelines []Timeline) float64 {
	longest := 0.0
	for _, t := range timelines {
		longest = max(longest, t.Total)
	}
	return longest
}

// tickStep is 1, 2 or 5 times a power of ten.
func tickStep(longest float64) float64 {
	step := math.Pow(10, math.Floor(math.Log10(longest/svgTicks)))
	for _, factor := range []float64{1, 2, 5} {
		if longest/(factor*step) <= svgTicks {
			return factor * step
		}
	}
	return 10 * step
}

func hex(c color.RGBA) string { return fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B) }

func escape(s string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(s)) // a buffer takes everything
	return b.String()
}
