package figure

import (
	"bytes"
	"image/png"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
	"github.com/tutti-go/tutti/cmd/tutti/lab/overlap"
)

func timelines() []overlap.Timeline {
	step := func(name string, total, reduce float64) overlap.Timeline {
		return overlap.Timeline{Name: name, Total: total, Spans: []overlap.Span{
			{Kind: overlap.Forward, Name: "forward 0", Start: 0, End: 10_000},
			{Kind: overlap.Backward, Name: "gradient 0", Start: 10_000, End: 30_000},
			{Kind: overlap.AllReduce, Name: "bucket 0", Start: reduce, End: reduce + 8_000},
		}}
	}
	return []overlap.Timeline{step("one after the other", 38_000, 30_000), step("overlapped", 30_000, 20_000)}
}

func TestTimelinesWritesBothFormats(t *testing.T) {
	dir := t.TempDir()
	for _, ext := range picture.Formats() {
		path := filepath.Join(dir, "overlap"+ext)
		require.NoError(t, Timelines(timelines(), "a step", path))
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		if ext == ".svg" {
			for _, text := range []string{"a step", "one after the other: 38.0 ms", "overlapped: 30.0 ms", "communication", "time (ms)", "allreduce"} {
				assert.Contains(t, string(data), text)
			}
			continue
		}
		image, err := png.Decode(bytes.NewReader(data))
		require.NoError(t, err)
		pixels := map[[3]uint32]int{}
		for y := range image.Bounds().Dy() {
			for x := range image.Bounds().Dx() {
				r, g, b, _ := image.At(x, y).RGBA()
				pixels[[3]uint32{r >> 8, g >> 8, b >> 8}]++
			}
		}
		count := func(k overlap.Kind) float64 {
			c := k.Color()
			return float64(pixels[[3]uint32{uint32(c.R), uint32(c.G), uint32(c.B)}])
		}
		// Areas are proportional to times; the legend adds a little.
		assert.InEpsilon(t, 2, count(overlap.Backward)/count(overlap.Forward), 0.1)
		assert.InEpsilon(t, 0.8, count(overlap.AllReduce)/count(overlap.Forward), 0.1)
	}
}

func TestTimelinesRefuses(t *testing.T) {
	dir := t.TempDir()
	assert.Error(t, Timelines(timelines(), "", filepath.Join(dir, "missing", "overlap.png")))
	assert.ErrorIs(t, Timelines(nil, "", filepath.Join(dir, "overlap.png")), picture.ErrNothingToDraw)
}
