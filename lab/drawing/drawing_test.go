package drawing

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The pictures in docs are drawn from the data in lab/results.
func TestPicturesAreOfTheData(t *testing.T) {
	for _, p := range pictures {
		t.Run(p.file, func(t *testing.T) {
			svg, err := p.draw(filepath.Join("..", "results", p.data))
			require.NoError(t, err)
			requireXML(t, svg)
			drawn, err := os.ReadFile(filepath.Join("..", "..", "docs", p.file))
			require.NoError(t, err)
			assert.Equal(t, string(drawn), svg, "go run -C lab . pictures draws it anew")
		})
	}
}

func TestPlaces(t *testing.T) {
	c := &Chart{X: Axis{Min: 10, Max: 1000, Log: true}, Y: Axis{Min: 80, Max: 100}}
	assert.InDeltaMapValues(t,
		map[string]float64{"x": (left + right) / 2, "y": (top + bottom) / 2},
		map[string]float64{"x": c.place(Point{100, 90}).X, "y": c.place(Point{100, 90}).Y}, 1e-9)
	assert.Equal(t, Point{left, bottom}, c.place(Point{1, 3}), "beyond both ends")
	c = &Chart{X: Axis{Max: 10}, Y: Axis{Max: 1}}
	points := []Point{{0, 0}, {10, 1}}
	assert.Equal(t, "M60.0,305.0L585.0,50.0", c.path(Curve{Points: points}))
	assert.Equal(t, "M60.0,305.0L585.0,305.0L585.0,50.0", c.path(Curve{Points: points, Steps: true}))
}

// Data that is missing, cut off or another's is an error, and no picture.
func TestBadData(t *testing.T) {
	for _, p := range pictures {
		for _, text := range []string{"", "{\"target_s\": 1}\n", "{\"tests\": [", "a,b\n", "bytes,a,b,c,d\n1 mile,1,2,3,4\n"} {
			path := filepath.Join(t.TempDir(), filepath.Base(p.data))
			require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
			_, err := p.draw(path)
			assert.ErrorContains(t, err, filepath.Base(p.data), "%s of %q", p.file, text)
		}
		_, err := p.draw(filepath.Join(t.TempDir(), "missing"))
		assert.ErrorIs(t, err, os.ErrNotExist)
	}
}

func requireXML(t *testing.T, text string) {
	t.Helper()
	decoder := xml.NewDecoder(strings.NewReader(text))
	for {
		_, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(t, err)
	}
}
