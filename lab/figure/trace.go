package figure

import (
	"fmt"
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
	"github.com/tutti-go/tutti/cmd/tutti/internal/trace"
)

// categories are the categories of a trace's slices, in the order of the legend.
var categories = []struct {
	name, legend string
	color        color.RGBA
}{
	{"program", "the program's spans", picture.Colors[3]},
	{"wait", "waits", picture.Colors[6]},
	{"collective", "collectives", picture.Colors[1]},
	{"send", "sent messages", picture.Colors[7]},
	{"receive", "received messages", picture.Colors[2]},
}

// lane is a track of a rank.
type lane struct{ rank, track int }

// Trace draws the part of a trace between two times in milliseconds, with a lane for each track of each rank. It
// writes the picture to path, in the format of its extension (one of [picture.Formats]).
func Trace(file *trace.File, from, to float64, title, path string) error {
	ticks, lanes := traceLanes(file.Events)
	boxes := map[string][]plotter.XYer{}
	for _, e := range file.Events {
		if e.Duration == nil {
			continue
		}
		begin := max(e.Time/1e3, from)
		end := min((e.Time+*e.Duration)/1e3, to)
		if begin >= end {
			continue
		}
		y := lanes[lane{e.Process, e.Thread}]
		boxes[e.Category] = append(boxes[e.Category], box(begin-from, end-from, y))
	}
	if len(boxes) == 0 {
		return fmt.Errorf("%w: nothing happens from %g to %g ms", picture.ErrNothingToDraw, from, to)
	}
	p := picture.NewPlot(title)
	p.X.Label.Text = "time (ms)"
	p.X.Min = 0
	p.X.Max = to - from
	p.X.Tick.Marker = plot.TickerFunc(picture.RoundTicks)
	p.Y.LineStyle.Width = 0
	p.Y.Tick.Length = 0
	p.Y.Tick.Marker = plot.ConstantTicks(ticks)
	p.Y.Min = ticks[len(ticks)-1].Value - laneHeight
	p.Y.Max = laneHeight
	legend := legendShare * float64(len(boxes))
	p.Y.Max += (p.Y.Max - p.Y.Min) * legend / (1 - legend)
	p.Legend.Top = true
	p.Legend.Left = true
	p.Legend.Padding = vg.Points(2)
	p.Legend.XOffs = vg.Points(8)
	for _, c := range categories {
		if len(boxes[c.name]) == 0 {
			continue
		}
		slices, err := plotter.NewPolygon(boxes[c.name]...)
		if err != nil {
			return err
		}
		slices.Color = c.color
		slices.LineStyle = draw.LineStyle{Color: color.White, Width: vg.Points(0.3)} // separates the slices
		p.Add(slices)
		p.Legend.Add(c.legend, slices)
	}
	return picture.SaveSmall(p, path)
}

// traceLanes places the tracks below each other, from 0 down, with a gap between ranks. It returns their labels and
// positions.
func traceLanes(events []trace.Event) ([]plot.Tick, map[lane]float64) {
	var ticks []plot.Tick
	lanes := map[lane]float64{}
	y := 0.0
	last := -1
	for _, e := range events {
		if e.Name != "thread_name" {
			continue
		}
		label := fmt.Sprint(e.Args["name"])
		if e.Process != last {
			if last >= 0 {
				y -= laneGap
			}
			last = e.Process
			label = fmt.Sprintf("rank %d: %s", e.Process, label)
		}
		lanes[lane{e.Process, e.Thread}] = y
		ticks = append(ticks, plot.Tick{Value: y, Label: label})
		y--
	}
	return ticks, lanes
}

// box is a rectangle of a lane.
func box(begin, end, y float64) plotter.XYs {
	low := y - laneHeight/2
	high := y + laneHeight/2
	return plotter.XYs{
		{X: begin, Y: low},
		{X: end, Y: low},
		{X: end, Y: high},
		{X: begin, Y: high},
	}
}
