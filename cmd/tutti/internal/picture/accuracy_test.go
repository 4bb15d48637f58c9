package picture

import (
	"bytes"
	"image/png"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/train"
)

// trainings makes n results that rise from 50 to 98 % at different speeds, with setbacks.
func trainings(n int) []train.Result {
	var out []train.Result
	for i := range n {
		r := train.Result{Pattern: string(rune('a' + i)), Accuracy: 98, Target: 97}
		for test := 1; test <= 40; test++ {
			accuracy := 50 + 48*float64(test)/40
			if test%3 == 0 {
				accuracy -= 20
			}
			r.Tests = append(r.Tests, train.Test{Seconds: float64(test*(i+1)) / 10, Accuracy: accuracy})
		}
		seconds := r.Tests[39].Seconds
		r.TargetSeconds = &seconds
		out = append(out, r)
	}
	return out
}

func TestAccuracyAgainstTimeWritesBothFormats(t *testing.T) {
	dir := t.TempDir()
	all := trainings(10)
	all[9].TargetSeconds = nil
	for _, ext := range Formats() {
		path := filepath.Join(dir, "accuracy"+ext)
		require.NoError(t, AccuracyAgainstTime(all, "a title", path))
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		if ext == ".svg" {
			for _, text := range []string{"a title", "time since the start", "a (4 s to 97 %)", "j (not to 97 %)"} {
				assert.Contains(t, string(data), text)
			}
			assert.Equal(t, bytes.Count(data, []byte("font-family")), bytes.Count(data, []byte(",Arial,Helvetica,sans-serif;")))
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

func TestAccuracyWithoutTargetNamesTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "accuracy.svg")
	all := trainings(1)
	all[0].Target, all[0].TargetSeconds, all[0].Accuracy = 0, nil, 61.25
	require.NoError(t, AccuracyAgainstTime(all, "", path), "also where nothing comes near the usual axis")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Contains(t, string(data), "a (61.2 %)")
}

func TestAccuracyAgainstTimeRefuses(t *testing.T) {
	dir := t.TempDir()
	assert.Error(t, AccuracyAgainstTime(trainings(1), "", filepath.Join(dir, "missing", "accuracy.png")))
	once := []train.Result{{Pattern: "dense", Tests: []train.Test{{Seconds: 1, Accuracy: 90}}}}
	assert.ErrorIs(t, AccuracyAgainstTime(once, "", filepath.Join(dir, "accuracy.png")), ErrNothingToDraw)
	assert.ErrorIs(t, AccuracyAgainstTime(nil, "", filepath.Join(dir, "accuracy.png")), ErrNothingToDraw)
}
