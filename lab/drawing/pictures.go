package drawing

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
	"github.com/tutti-go/tutti/cmd/tutti/lab/figure"
)

// entry is a picture of the documents.
type entry struct {
	file string                            // in docs
	data string                            // in lab/results
	draw func(path string) (*drawn, error) // of the data's path
}

// drawn is a picture with a summary for readers who cannot see it.
type drawn struct {
	plot    *plot.Plot // without text sizes, which svg sets
	summary string     // text in the SVG
}

var entries = []entry{
	{"slow-links-seconds.svg", "slow-links/digits.jsonl", accuracyBySeconds},
	{"slow-links-bytes.svg", "slow-links/text.jsonl", lossByBytes},
	{"elastic-pulled.svg", "elastic/pulled.jsonl", lossBySeconds},
	{"overlap.svg", "gpu/overlap.csv", overlap},
	{"p2p.svg", "gpu/peer-memory.csv", peerMemory},
}

// Pictures draws the pictures whose data the tree has, in the folder docs of root.
func Pictures(root string) error {
	for _, e := range entries {
		svg, err := e.svg(filepath.Join(root, "lab", "results"))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(root, "docs", e.file), svg, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// svg draws the picture from the data in a folder.
func (e entry) svg(results string) ([]byte, error) {
	d, err := e.draw(filepath.Join(results, e.data))
	if err != nil {
		return nil, fmt.Errorf("%s from %s: %w", e.file, e.data, err)
	}
	for _, style := range []*text.Style{
		&d.plot.Legend.TextStyle,
		&d.plot.X.Label.TextStyle,
		&d.plot.Y.Label.TextStyle,
	} {
		style.Font.Size = d.plot.X.Tick.Label.Font.Size
	}
	return picture.SVG(d.plot, d.summary)
}

// training is a line of tutti train --json.
type training struct {
	TargetSeconds float64 `json:"target_s"`
	Target        float64 `json:"target"`
	Tests         []test  `json:"tests"`
}

// test is a measurement during a training.
type test struct {
	Step      int     `json:"step"`
	Seconds   float64 `json:"s"`
	SentBytes float64 `json:"sent_bytes"`
	Accuracy  float64 `json:"accuracy"`
	Loss      float64 `json:"loss"`
}

// trainings reads count lines.
func trainings(path string, count int) ([]training, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close() //nolint:errcheck // it was only read
	var all []training
	lines := json.NewDecoder(file)
	for {
		var t training
		err := lines.Decode(&t)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		all = append(all, t)
	}
	if len(all) != count {
		return nil, fmt.Errorf("%d trainings, want %d", len(all), count)
	}
	return all, nil
}

// accuracyBySeconds draws the best accuracy so far of dense, auto and an outer loop.
func accuracyBySeconds(data string) (*drawn, error) {
	all, err := trainings(data, 3)
	if err != nil {
		return nil, err
	}
	dense := all[0]
	auto := all[1]
	outer := all[2]
	p := picture.NewChart("Test accuracy against time: 4 hosts at 100 Mbit/s",
		"time since the start (s)", "best test accuracy so far (%)", picture.Right)
	var curves []picture.Curve
	styles := []draw.LineStyle{lineStyle(black), lineStyle(indigo, 7, 5), lineStyle(teal)}
	for i, t := range all {
		curves = append(curves, picture.Curve{Points: best(t.Tests), Style: styles[i], Steps: plotter.PostStep})
	}
	if err := picture.AddCurves(p, curves); err != nil {
		return nil, err
	}
	p.Add(picture.Goal(dense.Target))
	for i, t := range all {
		if err := addDot(p, plotter.XY{X: t.TargetSeconds, Y: t.Target}, styles[i].Color); err != nil {
			return nil, err
		}
	}
	err = addNotes(p,
		note{point: plotter.XY{X: 3.5, Y: 98.8}, color: indigo,
			text: fmt.Sprintf("auto: %g %% after %.1f s", auto.Target, auto.TargetSeconds)},
		note{point: plotter.XY{X: 2.5, Y: 82.5}, color: darkTeal, text: fmt.Sprintf(
			"outer loop, every 11 steps: %g %% after %.2f s (at the left edge)", outer.Target, outer.TargetSeconds)},
		note{point: plotter.XY{X: dense.TargetSeconds, Y: dense.Target}, shift: vg.Point{Y: -18}, color: black,
			text: fmt.Sprintf("dense: %g %% after %.1f s", dense.Target, dense.TargetSeconds)})
	setRange(&p.X, 0, 32, picture.RoundTicks)
	setRange(&p.Y, accuracyFloor, 100, picture.RoundTicks)
	summary := fmt.Sprintf("Test accuracy against time: an outer loop reaches %g %% after %.2f s, auto after %.1f s,"+
		" dense gradients after %.1f s", dense.Target, outer.TargetSeconds, auto.TargetSeconds, dense.TargetSeconds)
	return &drawn{p, summary}, err
}

// accuracyFloor is the start of the accuracy axis.
const accuracyFloor = 80

// best returns the highest accuracy up to each test. Values below the floor are drawn at the floor.
func best(tests []test) (points plotter.XYs) {
	highest := float64(accuracyFloor)
	for _, t := range tests {
		highest = max(highest, t.Accuracy)
		points = append(points, plotter.XY{X: t.Seconds, Y: highest})
	}
	return points
}

// lossByBytes draws the loss of dense, oktopk, chunked and an outer loop.
func lossByBytes(data string) (*drawn, error) {
	all, err := trainings(data, 4)
	if err != nil {
		return nil, err
	}
	p := picture.NewChart("Loss of a text against bytes sent: 1,180,416 parameters, 4 ranks",
		"sent by each rank", "loss on unseen text (nats a byte)", picture.Left)
	curves := []picture.Curve{
		{Style: lineStyle(black)},
		{Style: lineStyle(indigo, 7, 5)},
		{Style: lineStyle(rose)},
		{Style: lineStyle(teal, 2, 3)},
	}
	notes := []note{
		{text: "dense", color: black, align: draw.XCenter},
		{text: "oktopk", color: indigo, align: draw.XRight}, // two curves end close together
		{text: "chunked", color: darkRose, align: draw.XLeft},
		{text: "outer loop", color: darkTeal, align: draw.XCenter},
	}
	for i, t := range all {
		var bytes float64
		for _, test := range t.Tests {
			bytes = test.SentBytes
			notes[i].point = plotter.XY{X: math.Log10(bytes), Y: test.Loss}
			curves[i].Points = append(curves[i].Points, notes[i].point)
		}
		notes[i].text += "\n" + megabytes(bytes)
		notes[i].shift.Y = -18
		if err := addDot(p, notes[i].point, curves[i].Style.Color); err != nil {
			return nil, err
		}
	}
	if err := picture.AddCurves(p, curves); err != nil {
		return nil, err
	}
	err = addNotes(p, notes...)
	setRange(&p.X, math.Log10(3e6), 10, picture.Decades(picture.FormatBytes))
	setRange(&p.Y, 1.4, 2.5, picture.RoundTicks)
	const summary = "Loss of a text against bytes sent: all end near the same loss; dense sends 51 to 513 times as much"
	return &drawn{p, summary}, err
}

// stepOfReturn is the first step with all four machines in the training of lossBySeconds: from there on a rank sends
// 230,460 bytes in a step, as before the pause, and not 204,852.
const stepOfReturn = 320

// lossBySeconds draws the loss of machines, one of which loses its network. The longest time between two tests is the
// pause.
func lossBySeconds(data string) (*drawn, error) {
	all, err := trainings(data, 1)
	if err != nil {
		return nil, err
	}
	tests := all[0].Tests
	if len(tests) < 2 {
		return nil, fmt.Errorf("%d tests, want two or more", len(tests))
	}
	curve := picture.Curve{Style: lineStyle(black)}
	var pauseStart, pauseEnd float64
	var back plotter.XY
	for i, t := range tests {
		curve.Points = append(curve.Points, plotter.XY{X: t.Seconds, Y: math.Log10(t.Loss)})
		if i > 0 && t.Seconds-tests[i-1].Seconds > pauseEnd-pauseStart {
			pauseStart = tests[i-1].Seconds
			pauseEnd = t.Seconds
		}
		if t.Step >= stepOfReturn && back.X == 0 {
			back = curve.Points[i]
		}
	}
	low := math.Log10(0.25)
	high := math.Log10(2.5)
	pause, err := plotter.NewPolygon(plotter.XYs{
		{X: pauseStart, Y: low}, {X: pauseEnd, Y: low}, {X: pauseEnd, Y: high}, {X: pauseStart, Y: high},
	})
	if err != nil {
		return nil, err
	}
	pause.Color = color.NRGBA{R: 0xF0, G: 0xC0, B: 0x60, A: 0x50}
	pause.LineStyle.Width = 0
	p := picture.NewChart("Four machines train, and one loses its network",
		"time since the start (s)", "test loss", picture.Left)
	p.Add(pause)
	if err := picture.AddCurves(p, []picture.Curve{curve}); err != nil {
		return nil, err
	}
	if err := addDot(p, back, black); err != nil {
		return nil, err
	}
	last := len(tests) - 1
	err = addNotes(p,
		note{point: plotter.XY{X: pauseEnd, Y: high}, shift: vg.Point{X: 6, Y: -18}, color: darkRose,
			text: fmt.Sprintf("a cable is pulled: %.1f s without a step,\nthen three machines go on", pauseEnd-pauseStart)},
		note{point: back, shift: vg.Point{X: 6, Y: 9}, color: black, text: "the fourth is back"},
		note{point: curve.Points[last], shift: vg.Point{Y: 11}, align: draw.XRight, color: black,
			text: fmt.Sprintf("test accuracy %.1f %%", tests[last].Accuracy)})
	setRange(&p.X, 0, 25, picture.RoundTicks)
	setRange(&p.Y, low, high, picture.Decades(picture.FormatNumber))
	return &drawn{p, fmt.Sprintf("Loss against time: training pauses for %.1f s, then goes on", pauseEnd-pauseStart)}, err
}

func megabytes(bytes float64) string {
	if bytes >= 1e9 {
		return fmt.Sprintf("%.2f GB", bytes/1e9)
	}
	return fmt.Sprintf("%.1f MB", bytes/1e6)
}

// overlap draws the times of a step as bars: compute, and the part of communication that compute does not hide.
func overlap(data string) (*drawn, error) {
	ms, err := column(data)
	if err != nil {
		return nil, err
	}
	compute := ms["compute alone (726 TFLOP/s)"]
	serial := ms["one after the other"]
	hidden := ms["overlapped"]
	if compute == 0 || serial == 0 || hidden == 0 {
		return nil, errors.New("a time is missing")
	}
	p := picture.NewPlot("A training step on four H200s, in ms")
	p.HideAxes()
	// Bars are ordered from below.
	first, err := addBars(p, "compute", plotter.Values{compute, compute, compute}, sky)
	if err != nil {
		return nil, err
	}
	second, err := addBars(p, "communication that compute does not hide",
		plotter.Values{hidden - compute, serial - compute, 0}, rose)
	if err != nil {
		return nil, err
	}
	second.StackOn(first)
	for i, name := range []string{
		"overlapped: each bucket as soon as its gradients are ready",
		"compute, then one allreduce of all gradients",
		"compute alone",
	} {
		total := second.BarHeight(i)
		err = errors.Join(err, addNotes(p,
			note{point: plotter.XY{Y: float64(i)}, shift: vg.Point{Y: 21}, color: black, text: name},
			note{point: plotter.XY{X: total, Y: float64(i)}, shift: vg.Point{X: 6}, color: black,
				text: fmt.Sprintf("%.2f", total)}))
	}
	p.Legend.Left = true
	p.Legend.Padding = vg.Points(4)
	p.X.Min = 0
	p.X.Max = serial
	p.Y.Min = -0.9 // space for the legend
	p.Y.Max = 2.5
	return &drawn{p, fmt.Sprintf("A training step takes %.2f ms one after the other and %.2f ms overlapped;"+
		" compute alone takes %.2f ms", serial, hidden, compute)}, err
}

// addBars draws horizontal bars.
func addBars(p *plot.Plot, name string, lengths plotter.Values, fill color.Color) (*plotter.BarChart, error) {
	bars, err := plotter.NewBarChart(lengths, vg.Points(26))
	if err != nil {
		return nil, err
	}
	bars.Horizontal = true
	bars.Color = fill
	bars.LineStyle.Width = 0
	p.Add(bars)
	p.Legend.Add(name, bars)
	return bars, nil
}

// peerMemory draws the times of sums by size.
func peerMemory(data string) (*drawn, error) {
	rows, err := table(data)
	if err != nil {
		return nil, err
	}
	if len(rows) < 2 || len(rows[0]) != 5 {
		return nil, errors.New("this is no table of four times by size")
	}
	curves := make([]figure.Curve, 4)
	for i := range curves {
		curves[i].Name = rows[0][i+1]
		curves[i].Color = i / 2
		curves[i].Dashed = i%2 == 1
	}
	for _, row := range rows[1:] {
		bytes, err := size(row[0])
		if err != nil {
			return nil, err
		}
		for i := range curves {
			micros, err := strconv.ParseFloat(row[i+1], 64)
			if err != nil {
				return nil, err
			}
			curves[i].Points = append(curves[i].Points, bench.Result{Bytes: int(bytes), Time: micros})
		}
	}
	p, err := figure.TimesAgainstSizes(curves, "Allreduce of f32 on two H200s: peer memory and NCCL")
	if err != nil {
		return nil, err
	}
	p.Y.Min = 0 // 1 µs
	return &drawn{p, "Time of an allreduce against its size on two H200s: over peer memory and over NCCL"}, nil
}

// size returns the number of bytes in a text such as 16 KiB.
func size(text string) (float64, error) {
	number, unit, _ := strings.Cut(text, " ")
	factor, known := map[string]float64{"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
	if !known {
		return 0, fmt.Errorf("size %q has no known unit", text)
	}
	value, err := strconv.ParseFloat(number, 64)
	return value * factor, err
}

// table reads a file of comma-separated values. Each row has as many values as the heading.
func table(path string) ([][]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	lines := csv.NewReader(strings.NewReader(string(text)))
	lines.Comment = '#'
	rows, err := lines.ReadAll()
	if err != nil {
		return nil, err
	}
	return rows, nil
}

// column reads a table with one column of numbers, by the names of its rows. It skips other values.
func column(path string) (map[string]float64, error) {
	rows, err := table(path)
	if err != nil {
		return nil, err
	}
	values := map[string]float64{}
	for _, row := range rows {
		value, err := strconv.ParseFloat(row[1], 64)
		if err != nil {
			continue // a heading or a share
		}
		values[row[0]] = value
	}
	return values, nil
}
