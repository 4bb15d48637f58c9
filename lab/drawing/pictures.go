package drawing

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// picture is one of the documents.
type picture struct {
	file string
	data string // in lab/results
	draw func(data string) (string, error)
}

// Pictures draws those whose data the tree has, in the folder docs of root.
func Pictures(root string) error {
	for _, p := range pictures {
		svg, err := p.draw(filepath.Join(root, "lab", "results", p.data))
		if err != nil {
			return fmt.Errorf("%s: %w", p.file, err)
		}
		if err := os.WriteFile(filepath.Join(root, "docs", p.file), []byte(svg), 0o644); err != nil {
			return err
		}
	}
	return nil
}

var pictures = []picture{
	{"slow-links-seconds.svg", "slow-links/digits.jsonl", accuracyBySeconds},
	{"slow-links-bytes.svg", "slow-links/text.jsonl", lossByBytes},
	{"elastic-pulled.svg", "elastic/pulled.jsonl", lossBySeconds},
	{"overlap.svg", "gpu/overlap.csv", overlap},
	{"p2p.svg", "gpu/peer-memory.csv", peerMemory},
}

// training is a line that tutti train --json prints.
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

// trainings reads a number of lines.
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
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, t)
	}
	if len(all) != count {
		return nil, fmt.Errorf("%s has %d trainings, want %d", path, len(all), count)
	}
	return all, nil
}

// accuracyBySeconds draws the best accuracy so far of dense, auto and an outer loop.
func accuracyBySeconds(data string) (string, error) {
	all, err := trainings(data, 3)
	if err != nil {
		return "", err
	}
	dense, auto, outer := all[0], all[1], all[2]
	c := &Chart{
		Title: "Test accuracy against time: 4 hosts at 100 Mbit/s",
		Summary: fmt.Sprintf("Test accuracy against time: an outer loop reaches %g %% after %.2f s, auto after %.1f s,"+
			" dense gradients after %.1f s", dense.Target, outer.TargetSeconds, auto.TargetSeconds, dense.TargetSeconds),
		X: Axis{Label: "time since the start (s)", Max: 32, Ticks: numbers(0, 5, 10, 15, 20, 25, 30)},
		Y: Axis{Label: "best test accuracy so far (%)", Min: 80, Max: 100, Ticks: numbers(80, 85, 90, 95, 100)},
	}
	styles := []Curve{{Color: black}, {Color: indigo, Dashes: "7,5"}, {Color: teal}}
	for i, t := range all {
		curve := styles[i]
		curve.Steps = true
		curve.Points = best(t.Tests)
		c.Curves = append(c.Curves, curve)
		c.Marks = append(c.Marks, Mark{Point{t.TargetSeconds, t.Target}, curve.Color})
	}
	c.Curves = append(c.Curves, Curve{
		Points: []Point{{c.X.Min, dense.Target}, {c.X.Max, dense.Target}},
		Color:  "#6E6E6E",
		Dashes: "2,3",
	})
	c.Notes = []Note{
		{X: 118, Y: 68, Color: indigo, Text: fmt.Sprintf("auto: %g %% after %.1f s", auto.Target, auto.TargetSeconds)},
		{X: 100, Y: 276.9, Color: darkTeal, Text: fmt.Sprintf(
			"outer loop, every 11 steps: %g %% after %.2f s (at the left edge)", outer.Target, outer.TargetSeconds)},
		{X: c.place(Point{X: dense.TargetSeconds}).X, Y: 130.3,
			Text: fmt.Sprintf("dense: %g %% after %.1f s", dense.Target, dense.TargetSeconds)},
	}
	return c.SVG(), nil
}

// best returns the highest accuracies up to each test.
func best(tests []test) (points []Point) {
	highest := 0.0
	for _, t := range tests {
		highest = max(highest, t.Accuracy)
		points = append(points, Point{t.Seconds, highest})
	}
	return points
}

// lossByBytes draws the loss of dense, oktopk, chunked and an outer loop.
func lossByBytes(data string) (string, error) {
	all, err := trainings(data, 4)
	if err != nil {
		return "", err
	}
	c := &Chart{
		Title:   "Loss of a text against bytes sent: 1,180,416 parameters, 4 ranks",
		Summary: "Loss of a text against bytes sent: all end near the same loss; dense sends 51 to 513 times as much",
		X: Axis{Label: "sent by each rank", Min: 3e6, Max: 1e10, Log: true,
			Ticks: []Tick{{1e7, "10 MB"}, {1e8, "100 MB"}, {1e9, "1 GB"}}},
		Y: Axis{Label: "loss on unseen text (nats a byte)", Min: 1.5, Max: 2.5, Ticks: numbers(1.5, 1.75, 2, 2.25, 2.5)},
	}
	names := []string{"dense", "oktopk", "chunked", "outer loop"}
	styles := []Curve{{Color: black}, {Color: indigo, Dashes: "7,5"}, {Color: rose}, {Color: teal, Dashes: "2,3"}}
	texts := []string{black, indigo, darkRose, darkTeal}
	anchors := []string{"middle", "end", "start", "middle"} // two ends are close together
	for i, t := range all {
		curve := styles[i]
		for _, test := range t.Tests {
			curve.Points = append(curve.Points, Point{test.SentBytes, test.Loss})
		}
		c.Curves = append(c.Curves, curve)
		end := curve.Points[len(curve.Points)-1]
		c.Marks = append(c.Marks, Mark{end, curve.Color})
		place := c.place(end)
		c.Notes = append(c.Notes,
			Note{X: place.X, Y: place.Y + 18, Color: texts[i], Anchor: anchors[i], Text: names[i]},
			Note{X: place.X, Y: place.Y + 33, Color: texts[i], Anchor: anchors[i], Text: megabytes(end.X)})
	}
	return c.SVG(), nil
}

// stepOfReturn is the first step with all four machines, from the log of the training of lossBySeconds.
const stepOfReturn = 347

// lossBySeconds draws the loss of machines of which one loses its network: the longest time between two tests is the
// pause.
func lossBySeconds(data string) (string, error) {
	all, err := trainings(data, 1)
	if err != nil {
		return "", err
	}
	tests := all[0].Tests
	if len(tests) < 2 {
		return "", fmt.Errorf("%s has %d tests", data, len(tests))
	}
	var pause Band
	var back Point
	curve := Curve{Color: black}
	for i, t := range tests {
		curve.Points = append(curve.Points, Point{t.Seconds, t.Loss})
		if i > 0 && t.Seconds-tests[i-1].Seconds > pause.To-pause.From {
			pause = Band{From: tests[i-1].Seconds, To: t.Seconds, Color: "#FAEBD2"}
		}
		if t.Step >= stepOfReturn && back.X == 0 {
			back = curve.Points[i]
		}
	}
	last := tests[len(tests)-1]
	c := &Chart{
		Title:   "Four machines train, and one loses its network",
		Summary: fmt.Sprintf("Loss against time: training pauses for %.1f s, then goes on", pause.To-pause.From),
		X:       Axis{Label: "time since the start (s)", Max: 25, Ticks: numbers(0, 5, 10, 15, 20, 25)},
		Y:       Axis{Label: "test loss", Min: 0.25, Max: 2.5, Log: true, Ticks: numbers(0.25, 0.5, 1, 2)},
		Bands:   []Band{pause},
		Curves:  []Curve{curve},
		Marks:   []Mark{{back, black}},
	}
	place := c.place(back)
	resumed := c.place(Point{X: pause.To}).X
	c.Notes = []Note{
		{X: resumed + 6, Y: 70, Color: darkRose,
			Text: fmt.Sprintf("a cable is pulled: %.1f s without a step,", pause.To-pause.From)},
		{X: resumed + 6, Y: 87, Color: darkRose, Text: "then three machines go on"},
		{X: place.X + 8, Y: place.Y - 8, Text: "the fourth is back"},
		{X: right - 4, Y: c.place(Point{Y: last.Loss}).Y - 12, Anchor: "end",
			Text: fmt.Sprintf("test accuracy %.1f %%", last.Accuracy)},
	}
	return c.SVG(), nil
}

func megabytes(bytes float64) string {
	if bytes >= 1e9 {
		return fmt.Sprintf("%.2f GB", bytes/1e9)
	}
	return fmt.Sprintf("%.1f MB", bytes/1e6)
}

// numbers returns ticks that are labelled with their values.
func numbers(values ...float64) (ticks []Tick) {
	for _, v := range values {
		ticks = append(ticks, Tick{v, strconv.FormatFloat(v, 'g', -1, 64)})
	}
	return ticks
}

// overlap draws the times of a step as bars: compute, and the part of communication that it does not hide.
func overlap(data string) (string, error) {
	ms, err := column(data)
	if err != nil {
		return "", err
	}
	compute := ms["compute alone (726 TFLOP/s)"]
	serial := ms["one after the other"]
	hidden := ms["overlapped"]
	if compute == 0 || serial == 0 || hidden == 0 {
		return "", fmt.Errorf("%s lacks a time", data)
	}
	s := newSketch("A training step on four H200s, in ms",
		fmt.Sprintf("A training step takes %.2f ms one after the other and %.2f ms overlapped; compute alone takes %.2f ms",
			serial, hidden, compute))
	const pixels = 12.0 // of a millisecond
	const start = 30.0
	bar := func(y float64, from, to float64, color string) {
		s.printf(`<rect x="%.1f" y="%.1f" width="%.1f" height="34" fill="%s"/>`,
			start+from*pixels, y, (to-from)*pixels, color)
	}
	for i, row := range []struct {
		name  string
		total float64
	}{
		{"compute alone", compute},
		{"compute, then one allreduce of all gradients", serial},
		{"overlapped: each bucket as soon as its gradients are ready", hidden},
	} {
		y := 78 + 88*float64(i)
		s.text(Note{X: start, Y: y - 9, Text: row.name}, 13)
		bar(y, 0, compute, sky)
		bar(y, compute, row.total, rose)
		s.text(Note{X: start + row.total*pixels + 8, Y: y + 22, Text: fmt.Sprintf("%.2f", row.total)}, 13)
	}
	s.printf(`<rect x="30" y="318" width="14" height="14" fill="%s"/>`, sky)
	s.text(Note{X: 50, Y: 330, Text: "compute"}, 13)
	s.printf(`<rect x="130" y="318" width="14" height="14" fill="%s"/>`, rose)
	s.text(Note{X: 150, Y: 330, Text: "communication that compute does not hide"}, 13)
	return s.end(), nil
}

// peerMemory draws the times of sums by size.
func peerMemory(data string) (string, error) {
	rows, err := table(data)
	if err != nil {
		return "", err
	}
	if len(rows) < 2 || len(rows[0]) != 5 {
		return "", fmt.Errorf("%s is no table of four times by size", data)
	}
	c := &Chart{
		Title:   "Allreduce of f32 on two H200s: peer memory and NCCL",
		Summary: "Time of an allreduce against its size on two H200s: over peer memory and over NCCL",
		X:       Axis{Label: "size", Min: 1 << 8, Max: 1 << 30, Log: true},
		Y: Axis{Label: "time of a call (µs)", Min: 1, Max: 1e4, Log: true,
			Ticks: []Tick{{1, "1"}, {10, "10"}, {100, "100"}, {1000, "1000"}, {1e4, "10000"}}},
		Curves: []Curve{{Color: black}, {Color: black, Dashes: "7,5"}, {Color: rose}, {Color: rose, Dashes: "7,5"}},
	}
	for _, row := range rows[1:] {
		bytes, err := size(row[0])
		if err != nil {
			return "", fmt.Errorf("%s: %w", data, err)
		}
		label := row[0]
		if !strings.Contains(label, " ") {
			label += " B"
		}
		c.X.Ticks = append(c.X.Ticks, Tick{bytes, label})
		for i := range c.Curves {
			micros, err := strconv.ParseFloat(row[i+1], 64)
			if err != nil {
				return "", fmt.Errorf("%s: %w", data, err)
			}
			c.Curves[i].Points = append(c.Curves[i].Points, Point{bytes, micros})
		}
	}
	for i := range c.Curves {
		c.Curves[i].Name = rows[0][i+1]
	}
	return c.SVG(), nil
}

// size returns the bytes of a text such as 16 KiB.
func size(text string) (float64, error) {
	number, unit, _ := strings.Cut(text, " ")
	factor, known := map[string]float64{"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
	if !known {
		return 0, fmt.Errorf("size %q has no known unit", text)
	}
	value, err := strconv.ParseFloat(number, 64)
	return value * factor, err
}

// table reads a file of comma-separated values, whose rows have as many as its heading.
func table(path string) ([][]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	lines := csv.NewReader(strings.NewReader(string(text)))
	lines.Comment = '#'
	rows, err := lines.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return rows, nil
}

// column reads a table with one column of numbers, by the names of its rows. Other values are left out.
func column(path string) (map[string]float64, error) {
	rows, err := table(path)
	if err != nil {
		return nil, err
	}
	values := map[string]float64{}
	for _, row := range rows {
		value, err := strconv.ParseFloat(row[1], 64)
		if err != nil {
			continue // a heading, or a share
		}
		values[row[0]] = value
	}
	return values, nil
}
