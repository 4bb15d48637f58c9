// Package figure draws the measurements of the laboratory in the style of package picture.
package figure

import (
	"fmt"
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
	"github.com/tutti-go/tutti/cmd/tutti/lab/overlap"
)

// Geometry of a lane on the vertical axis. Lanes are 1 apart.
const (
	laneHeight = 0.8
	// laneGap is the additional distance between the lanes of two timelines.
	laneGap = 0.6
	// laneEdge is the distance between the lowest lane and the frame.
	laneEdge = 0.3
	// legendShare is the fraction of the height that an entry of the legend takes above the lanes.
	legendShare = 0.063
)

// timeMargin leaves space to the right of the longest timeline.
const timeMargin = 1.03

// Timelines draws timelines one below the other on one time axis, with a lane for each stream. It writes the picture
// to path, in the format of its extension (one of [picture.Formats]).
func Timelines(timelines []overlap.Timeline, title, path string) error {
	longest := 0.0 // microseconds
	for _, t := range timelines {
		longest = max(longest, t.Total)
	}
	if longest == 0 {
		return fmt.Errorf("%w: no step took any time", picture.ErrNothingToDraw)
	}
	ticks, boxes := arrange(timelines)
	p := picture.NewPlot(title)
	p.X.Label.Text = "time (ms)"
	p.X.Min = 0
	p.X.Max = timeMargin * longest / 1e3
	p.X.Tick.Marker = plot.TickerFunc(picture.RoundTicks)
	p.Y.LineStyle.Width = 0
	p.Y.Tick.Length = 0
	p.Y.Tick.Marker = plot.ConstantTicks(ticks)
	p.Y.Max = laneHeight / 2
	p.Y.Min = ticks[len(ticks)-1].Value - laneHeight/2 - laneEdge
	legend := legendShare * float64(len(boxes))
	p.Y.Max += (p.Y.Max - p.Y.Min) * legend / (1 - legend)
	p.Legend.Top = true
	p.Legend.Left = true
	p.Legend.Padding = vg.Points(2)
	p.Legend.XOffs = vg.Points(8)
	for _, kind := range overlap.Kinds() {
		if len(boxes[kind]) == 0 {
			continue
		}
		work, err := plotter.NewPolygon(boxes[kind]...)
		if err != nil {
			return err
		}
		work.Color = kind.Color()
		work.LineStyle = draw.LineStyle{Color: color.White, Width: vg.Points(0.4)} // separates the pieces
		p.Add(work)
		p.Legend.Add(string(kind), work)
	}
	return picture.Save(p, path)
}

// arrange places the lanes that any timeline uses below each other, from 0 down. It returns their labels, and the
// boxes of all spans.
func arrange(timelines []overlap.Timeline) (ticks []plot.Tick, boxes map[overlap.Kind][]plotter.XYer) {
	used := make(map[overlap.Lane]bool)
	for _, t := range timelines {
		for _, s := range t.Spans {
			used[s.Kind.Lane()] = true
		}
	}
	boxes = make(map[overlap.Kind][]plotter.XYer)
	y := 0.0
	for _, t := range timelines {
		lanes := make(map[overlap.Lane]float64)
		for _, lane := range overlap.Lanes() {
			if !used[lane] {
				continue
			}
			lanes[lane] = y
			ticks = append(ticks, plot.Tick{Value: y, Label: fmt.Sprintf("%s: %.1f ms\n%s", t.Name, t.Total/1e3, lane)})
			y--
		}
		for _, s := range t.Spans {
			boxes[s.Kind] = append(boxes[s.Kind], box(s.Start/1e3, s.End/1e3, lanes[s.Kind.Lane()]))
		}
		y -= laneGap
	}
	return ticks, boxes
}
