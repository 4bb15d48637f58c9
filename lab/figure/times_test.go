package figure

import (
	"bytes"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
)

func TestTimesAgainstSizes(t *testing.T) {
	var curves []Curve
	for i := range 6 {
		c := Curve{Name: string(rune('a' + i)), Color: i / 2, Dashed: i%2 == 1}
		for bytes := 256; bytes <= 1<<30; bytes *= 4 {
			c.Points = append(c.Points, bench.Result{Bytes: bytes, Time: float64(i+2) + float64(bytes)/3e5})
		}
		curves = append(curves, c)
	}
	dir := t.TempDir()
	for _, ext := range picture.Formats() {
		path := filepath.Join(dir, "times"+ext)
		drawn, err := TimesAgainstSizes(curves, "a title")
		require.NoError(t, err)
		require.NoError(t, picture.Save(drawn, path))
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		if ext == ".svg" {
			for _, text := range []string{"a title", "32 KiB", "1 GiB", "time of a call"} {
				assert.Contains(t, string(data), text)
			}
			continue
		}
		image, err := png.Decode(bytes.NewReader(data))
		require.NoError(t, err)
		seen := map[color.RGBA]bool{}
		for y := range image.Bounds().Dy() {
			for x := range image.Bounds().Dx() {
				seen[color.RGBAModel.Convert(image.At(x, y)).(color.RGBA)] = true
			}
		}
		for _, c := range curveColors[:3] {
			assert.True(t, seen[c], "a curve is missing")
		}
	}
	_, err := TimesAgainstSizes([]Curve{{Points: []bench.Result{{Bytes: 1, Time: 1}}}}, "")
	assert.ErrorIs(t, err, picture.ErrNothingToDraw)
}
