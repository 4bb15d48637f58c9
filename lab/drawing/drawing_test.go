package drawing

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
)

// The pictures in docs match the data in lab/results.
func TestPicturesAreOfTheData(t *testing.T) {
	for _, e := range entries {
		t.Run(e.file, func(t *testing.T) {
			svg, err := e.svg(filepath.Join("..", "results"))
			require.NoError(t, err)
			stored, err := os.ReadFile(filepath.Join("..", "..", "docs", e.file))
			require.NoError(t, err)
			assert.Equal(t, string(stored), string(svg), "go run -C lab . pictures draws it anew")
			d, err := e.draw(filepath.Join("..", "results", e.data))
			require.NoError(t, err)
			assert.Contains(t, string(svg), "<title>"+d.summary+"</title>")
		})
	}
}

// Texts stay inside the picture and clear of other texts and curves, also in a font that is wider by a sixth.
func TestTextsAreBesideCurves(t *testing.T) {
	for _, e := range entries {
		svg, err := e.svg(filepath.Join("..", "results"))
		require.NoError(t, err)
		page := read(t, string(svg))
		require.Greater(t, len(page.texts), 4, e.file)
		for i, a := range page.texts {
			inside := a.left >= 0 && a.right <= 450 && a.low >= 0 && a.high <= 270
			assert.True(t, inside, "%s: %+v leaves the picture", e.file, a)
			for _, b := range page.texts[:i] {
				assert.False(t, a.left < b.right && b.left < a.right && a.low < b.high && b.low < a.high,
					"%s: %q is on %q", e.file, a.text, b.text)
			}
			for _, p := range page.curves {
				if p.X > a.left && p.X < a.right && p.Y > a.low && p.Y < a.high {
					assert.Fail(t, "a curve goes through a text", "%s: %q", e.file, a.text)
					break
				}
			}
		}
	}
}

// Curves and notes match the ticks of linear and logarithmic axes, and steps are vertical.
func TestPlaces(t *testing.T) {
	p := picture.NewChart("", "", "", picture.Left)
	line := plotter.XYs{{X: 1, Y: 80}, {X: 2, Y: 90}, {X: 3, Y: 100}}
	require.NoError(t, picture.AddCurves(p, []picture.Curve{{Points: line, Style: lineStyle(black)}}))
	steps := picture.Curve{Points: line, Style: lineStyle(black), Steps: plotter.PostStep}
	require.NoError(t, picture.AddCurves(p, []picture.Curve{steps}))
	require.NoError(t, addNotes(p,
		note{point: line[0], text: "start", color: black},
		note{point: line[1], text: "middle", color: black},
		note{point: line[1], shift: vg.Point{X: 7, Y: -9}, text: "beside", color: black}))
	setRange(&p.X, 1, 3, picture.Decades(picture.FormatBytes))
	setRange(&p.Y, 80, 100, picture.RoundTicks)
	svg, err := picture.SVG(p, "a <summary>")
	require.NoError(t, err)
	assert.Contains(t, string(svg), "<title>a &lt;summary&gt;</title>")
	page := read(t, string(svg))
	box := map[string]box{}
	for _, b := range page.texts {
		box[b.text] = b
	}
	for _, label := range []string{"10 B", "100 B", "1 kB", "80", "85", "100", "start", "middle", "beside"} {
		require.Contains(t, box, label)
	}
	assert.InDelta(t, box["100 B"].middle(), (box["10 B"].middle()+box["1 kB"].middle())/2, 1, "logarithmic")
	assert.InDelta(t, box["90"].low, (box["80"].low+box["100"].low)/2, 0.1, "linear")
	assert.InDelta(t, box["100 B"].middle(), box["middle"].left, 1, "a note begins at its point")
	assert.InDelta(t, box["90"].low, box["middle"].low, 3)
	assert.InDelta(t, box["90"].low-box["80"].low, box["middle"].low-box["start"].low, 0.1)
	assert.InDelta(t, box["middle"].left+7, box["beside"].left, 0.1)
	assert.InDelta(t, box["middle"].low-9, box["beside"].low, 0.1)
	assert.Equal(t, []int{2, 4}, page.pieces, "a step goes across and then up")
}

// Data that is missing, truncated or from another measurement is an error and gives no picture.
func TestBadData(t *testing.T) {
	for _, e := range entries {
		for _, text := range []string{"", "{\"target_s\": 1}\n", "{\"tests\": [", "a,b\n", "bytes,a,b,c,d\n1 mile,1,2,3,4\n"} {
			dir := t.TempDir()
			path := filepath.Join(dir, e.data)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
			require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
			_, err := e.svg(dir)
			assert.ErrorContains(t, err, e.data, "%s of %q", e.file, text)
		}
		_, err := e.svg(t.TempDir())
		assert.ErrorIs(t, err, os.ErrNotExist)
	}
}

// page holds the contents of a picture, in points from its lower left corner.
type page struct {
	texts  []box
	curves plotter.XYs // points close to each other
	pieces []int       // straight pieces of each curve
}

// box is the place of a text.
type box struct {
	text                   string
	left, right, low, high float64
}

func (b box) middle() float64 {
	return b.left + (b.right-b.left)/wide/2
}

// wide is the width of a reader's widest font relative to Liberation Sans.
const wide = 7.0 / 6

// read finds the horizontal texts of a picture, and its curves by their width.
func read(t *testing.T, svg string) (out page) {
	t.Helper()
	style := picture.NewPlot("").X.Tick.Label
	decoder := xml.NewDecoder(strings.NewReader(svg))
	turned := 0 // number of open groups from a rotated one on
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(t, err)
		start, ok := token.(xml.StartElement)
		if end, ok := token.(xml.EndElement); ok && end.Name.Local == "g" && turned > 0 {
			turned--
		}
		if !ok {
			continue
		}
		attributes := map[string]string{}
		for _, a := range start.Attr {
			attributes[a.Name.Local] = a.Value
		}
		switch start.Name.Local {
		case "g":
			if turned > 0 || strings.HasPrefix(attributes["transform"], "rotate") {
				turned++
			}
		case "text":
			var text string
			require.NoError(t, decoder.DecodeElement(&text, &start))
			if turned > 0 {
				continue
			}
			size := number(t, between(attributes["style"], "font-size:", "px"))
			style.Font.Size = vg.Length(size)
			left := number(t, attributes["x"])
			low := -number(t, attributes["y"])
			out.texts = append(out.texts, box{text, left, left + wide*float64(style.Width(text)), low, low + 0.7*size})
		case "path":
			width := between(attributes["style"]+";", "stroke-width:", ";")
			if width == fmt.Sprint(picture.LineStyle(0).Width.Points()) {
				out.add(t, attributes["d"])
			}
		}
	}
}

// add adds the points along a path.
func (p *page) add(t *testing.T, path string) {
	var last plotter.XY
	pieces := strings.Split(strings.TrimPrefix(path, "M"), "L")
	for i, piece := range pieces {
		x, y, _ := strings.Cut(piece, ",")
		next := plotter.XY{X: number(t, x), Y: number(t, y)}
		if i > 0 {
			const parts = 200
			for part := range parts {
				share := float64(part) / parts
				p.curves = append(p.curves, plotter.XY{
					X: last.X + share*(next.X-last.X),
					Y: last.Y + share*(next.Y-last.Y),
				})
			}
		}
		last = next
	}
	p.pieces = append(p.pieces, len(pieces)-1)
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	value, err := strconv.ParseFloat(text, 64)
	require.NoError(t, err)
	require.False(t, math.IsNaN(value))
	return value
}

func between(text, before, after string) string {
	_, text, _ = strings.Cut(text, before)
	text, _, _ = strings.Cut(text, after)
	return text
}
