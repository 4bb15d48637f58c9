package main

import (
	"bytes"
	"fmt"
	"io"
	"time"
)

// Layout of the picture in pixels.
const (
	pictureWidth = 960
	leftEdge     = 150 // of the lanes; their names are to the left
	rightEdge    = 930
	topEdge      = 40
	laneHeight   = 26
	laneGap      = 4
	stepHeight   = 2*(laneHeight+laneGap) + 36 // with the step's name above the lanes
	axisHeight   = 30
)

// Colors that readers with any form of color vision can tell apart (Paul Tol's "muted" scheme).
var laneColors = [...]string{compute: "#332288", communication: "#cc6677"}

var laneNames = [...]string{compute: "compute", communication: "communication"}

// draw writes an SVG picture of steps, one below the other, with a lane for each stream.
func draw(w io.Writer, title string, steps []step) error {
	var longest time.Duration
	for _, s := range steps {
		longest = max(longest, s.total)
	}
	x := func(t time.Duration) float64 {
		return leftEdge + (rightEdge-leftEdge)*t.Seconds()/longest.Seconds()
	}
	bottom := topEdge + stepHeight*len(steps)
	var b bytes.Buffer
	const head = `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="13">`
	fmt.Fprintf(&b, head+"\n", pictureWidth, bottom+axisHeight)
	fmt.Fprintln(&b, `<rect width="100%" height="100%" fill="white"/>`)
	text(&b, pictureWidth/2, 24, "middle", title)
	for i, s := range steps {
		top := topEdge + stepHeight*i
		text(
			&b,
			leftEdge,
			float64(top+22),
			"start",
			fmt.Sprintf("%s: %.1f ms", s.way, milliseconds(s.total)),
		)
		laneTop := func(l lane) float64 {
			return float64(top + 30 + int(l)*(laneHeight+laneGap))
		}
		for l, name := range laneNames {
			text(&b, leftEdge-10, laneTop(lane(l))+laneHeight-8, "end", name)
		}
		for _, p := range s.spans {
			const box = `<rect x="%.2f" y="%.0f" width="%.2f" height="%d" fill="%s" stroke="white" stroke-width="0.5"/>`
			fmt.Fprintf(
				&b,
				box+"\n",
				x(p.start),
				laneTop(p.lane),
				x(p.end)-x(p.start),
				laneHeight,
				laneColors[p.lane],
			)
		}
	}
	interval := time.Millisecond
	for longest > 10*interval {
		interval *= 2
	}
	for t := time.Duration(0); t <= longest; t += interval {
		text(
			&b,
			x(t),
			float64(bottom+18),
			"middle",
			fmt.Sprintf("%.0f ms", milliseconds(t)),
		)
	}
	fmt.Fprintln(&b, "</svg>")
	_, err := b.WriteTo(w)
	return err
}

// text writes a text without special characters of XML.
func text(b *bytes.Buffer, x, y float64, anchor, content string) {
	fmt.Fprintf(b, `<text x="%.2f" y="%.2f" text-anchor="%s">%s</text>`+"\n", x, y, anchor, content)
}
