package main

import (
	"context"
	"fmt"
	"image/color"
	"io"
	"net/http"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/tutti-go/tutti/atomicfile"
)

// scrape reads the metrics as Prometheus does.
func scrape(ctx context.Context, url string) (map[string]float64, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	values := map[string]float64{}
	for name, f := range families {
		values[name] = f.GetMetric()[0].GetCounter().GetValue() + f.GetMetric()[0].GetGauge().GetValue()
	}
	return values, err
}

// panel is one graph of the picture.
type panel struct {
	title string                                     // above the curve
	value func(now, rate map[string]float64) float64 // now: all metrics; rate: their growth per second
}

var panels = []panel{
	{"steps a second", func(_, rate map[string]float64) float64 { return rate["tutti_steps_total"] }},
	{"kB sent a second", func(_, rate map[string]float64) float64 { return rate["tutti_sent_bytes_total"] / 1000 }},
	{"share of exchanges that is hidden", func(_, rate map[string]float64) float64 {
		return rate["tutti_hidden_seconds_total"] / max(rate["tutti_exchange_seconds_total"], 1e-9)
	}},
	{"seconds waited a second", func(_, rate map[string]float64) float64 { return rate["tutti_wait_seconds_total"] }},
	{"members", func(now, _ map[string]float64) float64 { return now["tutti_members"] }},
	{"epoch", func(now, _ map[string]float64) float64 { return now["tutti_epoch"] }},
}

// drawMetrics scrapes until ctx ends and writes a picture.
func drawMetrics(ctx context.Context, url, file string) error {
	lines, err := record(ctx, url)
	if err != nil {
		return err
	}
	grid, err := plots(lines)
	if err != nil {
		return err
	}
	tiles := draw.Tiles{
		Rows:     len(grid),
		Cols:     columns,
		PadX:     vg.Points(20),
		PadY:     vg.Points(12),
		PadTop:   vg.Points(6),
		PadRight: vg.Points(8),
	}
	img := vgimg.New(18*vg.Centimeter, 15*vg.Centimeter)
	for i, row := range plot.Align(grid, tiles, draw.New(img)) {
		for j, canvas := range row {
			grid[i][j].Draw(canvas)
		}
	}
	return atomicfile.Write(file, func(w io.Writer) error {
		_, err := vgimg.PngCanvas{Canvas: img}.WriteTo(w)
		return err
	})
}

// record scrapes until ctx ends and returns the points of each panel.
func record(ctx context.Context, url string) ([]plotter.XYs, error) {
	const interval = 200 * time.Millisecond
	lines := make([]plotter.XYs, len(panels))
	start := time.Now()
	before := start
	var last map[string]float64
	clock := time.NewTicker(interval)
	defer clock.Stop()
	for {
		select {
		case <-clock.C:
		case <-ctx.Done():
			return lines, nil
		}
		values, err := scrape(ctx, url)
		if ctx.Err() != nil {
			return lines, nil
		}
		if err != nil {
			return nil, err
		}
		now := time.Now()
		rate := map[string]float64{}
		for name, v := range values {
			rate[name] = (v - last[name]) / now.Sub(before).Seconds()
		}
		for i, p := range panels {
			if last != nil {
				lines[i] = append(lines[i], plotter.XY{
					X: now.Sub(start).Seconds(),
					Y: p.value(values, rate),
				})
			}
		}
		last = values
		before = now
	}
}

// columns is the number of panels side by side.
const columns = 2

// plots makes the panels from their points, in rows.
func plots(lines []plotter.XYs) ([][]*plot.Plot, error) {
	grid := make([][]*plot.Plot, len(panels)/columns)
	for i, p := range panels {
		graph := plot.New()
		graph.Title.Text = p.title
		graph.Y.Min = 0
		if i >= len(panels)-columns {
			graph.X.Label.Text = "seconds"
		}
		line, err := plotter.NewLine(lines[i])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.title, err)
		}
		line.Color = color.RGBA{
			R: 0x1f,
			G: 0x77,
			B: 0xb4,
			A: 0xff,
		}
		line.Width = vg.Points(1.5)
		graph.Add(plotter.NewGrid(), line)
		grid[i/columns] = append(grid[i/columns], graph)
	}
	return grid, nil
}
