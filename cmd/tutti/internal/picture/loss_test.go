package picture

import (
	"bytes"
	"image/color"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/tutti-go/tutti/cmd/tutti/internal/train"
)

// results makes n curves that fall with a power of the bytes.
func results(n int) []train.Result {
	var out []train.Result
	for i := range n {
		r := train.Result{Pattern: string(rune('a' + i)), Accuracy: 97.5}
		for step := 1; step <= 500; step++ {
			sent := float64(step) * 800 * math.Pow(1.6, float64(i))
			r.Curve = append(r.Curve, train.Point{SentBytes: sent, Seconds: float64(step), Loss: 2.3 / math.Sqrt(float64(step))})
		}
		out = append(out, r)
	}
	return out
}

func TestLossAgainstBytesWritesBothFormats(t *testing.T) {
	dir := t.TempDir()
	for _, ext := range Formats() {
		path := filepath.Join(dir, "loss"+ext)
		require.NoError(t, LossAgainstTime(results(10), path))
		require.NoError(t, LossAgainstBytes(results(10), path))
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		if ext == ".svg" {
			assert.Contains(t, string(data), "sent per rank since the start")
			continue
		}
		image, err := png.Decode(bytes.NewReader(data))
		require.NoError(t, err)
		colours := map[[3]uint32]bool{}
		for y := range image.Bounds().Dy() {
			for x := range image.Bounds().Dx() {
				r, g, b, _ := image.At(x, y).RGBA()
				colours[[3]uint32{r >> 8, g >> 8, b >> 8}] = true
			}
		}
		for _, c := range Colors {
			assert.Contains(t, colours, [3]uint32{uint32(c.R), uint32(c.G), uint32(c.B)}, "a curve is missing")
		}
	}
}

// Both curves of two patterns that send the same are visible.
func TestCurvesThatCoincideAreToldApart(t *testing.T) {
	same := results(1)
	same = append(same, same[0])
	path := filepath.Join(t.TempDir(), "loss.png")
	require.NoError(t, LossAgainstBytes(same, path))
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	image, err := png.Decode(bytes.NewReader(data))
	require.NoError(t, err)
	seen := map[color.RGBA]int{}
	// Without the axis, its labels, and the legend at the lower left.
	for y := image.Bounds().Dy() / 6; y < image.Bounds().Dy()*2/3; y++ {
		for x := image.Bounds().Dx() / 6; x < image.Bounds().Dx(); x++ {
			seen[color.RGBAModel.Convert(image.At(x, y)).(color.RGBA)]++
		}
	}
	assert.Greater(t, seen[Colors[0]], 300)
	assert.Greater(t, seen[Colors[1]], 300)
}

func TestLossAgainstBytesRefuses(t *testing.T) {
	dir := t.TempDir()
	assert.Error(t, LossAgainstBytes(results(1), filepath.Join(dir, "missing", "loss.png")))

	silent := []train.Result{{Pattern: "dense", Curve: []train.Point{{Loss: 1}, {Loss: 0.5}}}}
	assert.ErrorIs(t, LossAgainstBytes(silent, filepath.Join(dir, "loss.png")), ErrNothingToDraw)
}

func TestSmoothSkipsWhatALogarithmCannotShow(t *testing.T) {
	var curve []train.Point
	for _, p := range [][2]float64{{0, 2}, {10, 0}, {100, 4}, {1000, math.NaN()}, {1000, 2}, {1001, 1}, {10000, 3}} {
		curve = append(curve, train.Point{SentBytes: p[0], Loss: p[1]})
	}
	points := smooth(curve, 2, func(p train.Point) float64 { return p.SentBytes })
	// The step at 1001 is too close to 1000 for a separate point, and is averaged into the point at 10000.
	require.Len(t, points, 3)
	for i, want := range [][2]float64{{100, 4}, {1000, 2}, {10000, 2}} {
		assert.InDelta(t, math.Log10(want[0]), points[i].X, 1e-12)
		assert.InDelta(t, math.Log10(want[1]), points[i].Y, 1e-12)
	}
	assert.Empty(t, smooth(nil, 5, nil))
}

func TestTickLabels(t *testing.T) {
	for v, want := range map[float64]string{1: "1 B", 1000: "1 kB", 2e5: "200 kB", 1e6: "1 MB", 5e9: "5 GB"} {
		assert.Equal(t, want, FormatBytes(v))
	}
	var labels []string
	for _, tick := range Decades(FormatNumber).Ticks(math.Log10(0.05), math.Log10(3)) {
		if tick.Label != "" {
			labels = append(labels, tick.Label)
		}
	}
	assert.Equal(t, []string{"0.05", "0.1", "0.2", "0.5", "1", "2"}, labels)
}

func TestTicksAreRoundAndMany(t *testing.T) {
	for _, high := range []float64{0.013, 0.4, 1, 7.3, 39.9, 41.2, 99, 123, 5000} {
		var labels []string
		for _, tick := range RoundTicks(0, high) {
			assert.LessOrEqual(t, tick.Value, high)
			if tick.Label != "" {
				labels = append(labels, tick.Label)
			}
		}
		assert.GreaterOrEqual(t, len(labels), 4, "up to %g: %q", high, labels)
		assert.LessOrEqual(t, len(labels), roundTicks+1, "up to %g: %q", high, labels)
	}
	var labels []string
	for _, tick := range RoundTicks(0, 41.2) {
		if tick.Label != "" {
			labels = append(labels, tick.Label)
		}
	}
	assert.Equal(t, []string{"0", "5", "10", "15", "20", "25", "30", "35", "40"}, labels)
}

// A legend leaves space between text and line for a reader's wider font.
func TestLegendHasRoom(t *testing.T) {
	const name = "gaussiank-reduce"
	for _, corner := range []vg.Length{Left, Right} {
		p := NewChart("", "", "", corner)
		require.NoError(t, AddCurves(p, []Curve{{
			Name:   name,
			Points: plotter.XYs{{X: 0, Y: 0}, {X: 1, Y: 1}},
			Style:  draw.LineStyle{Color: color.RGBA{R: 255, A: 255}, Width: 2},
		}}))
		canvas := vgimg.New(200, 40)
		p.Legend.Draw(draw.New(canvas))
		var text, line []int // columns
		image := canvas.Image()
		for x := range image.Bounds().Dx() {
			for y := range image.Bounds().Dy() {
				switch r, g, _, _ := image.At(x, y).RGBA(); {
				case r>>8 == 255 && g>>8 == 0:
					line = append(line, x)
				case r>>8 < 128:
					text = append(text, x)
				}
			}
		}
		require.NotEmpty(t, text)
		require.NotEmpty(t, line)
		if corner == Left {
			assert.Greater(t, slices.Min(text)-slices.Max(line), 10)
			continue
		}
		width := slices.Max(text) - slices.Min(text)
		assert.Greater(t, slices.Min(line)-slices.Max(text), width*15/100)
	}
}
