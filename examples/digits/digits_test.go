package digits

import (
	"bytes"
	"compress/gzip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The class counts equal those in the documentation of the UCI repository's test part.
func TestLoadHasTheDocumentedCounts(t *testing.T) {
	s, err := Load()
	require.NoError(t, err)
	require.Equal(t, Images, s.Len())
	require.Len(t, s.Inputs, Images*Pixels)
	var counts [Classes]int
	for _, label := range s.Labels {
		counts[label]++
	}
	assert.Equal(t, [Classes]int{178, 182, 177, 183, 181, 182, 181, 179, 174, 180}, counts)
	assert.Equal(t, float32(0), slices.Min(s.Inputs))
	assert.Equal(t, float32(1), slices.Max(s.Inputs))
}

func TestSplitIsSeededAndCoversEverything(t *testing.T) {
	train, test, err := Split(1)
	require.NoError(t, err)
	assert.Equal(t, Images-TestImages, train.Len())
	assert.Equal(t, TestImages, test.Len())

	again, _, err := Split(1)
	require.NoError(t, err)
	assert.Equal(t, train, again, "the same seed must give the same split")
	other, _, err := Split(2)
	require.NoError(t, err)
	assert.NotEqual(t, train.Labels, other.Labels, "another seed must give another split")

	all, err := Load()
	require.NoError(t, err)
	assert.Equal(t, imageCounts(all), imageCounts(train, test), "no image may be lost or repeated")
}

// imageCounts counts the occurrences of each image in the sets.
func imageCounts(sets ...Set) map[[Pixels + 1]float32]int {
	counts := map[[Pixels + 1]float32]int{}
	for _, s := range sets {
		for i := range s.Len() {
			var key [Pixels + 1]float32
			copy(key[:], s.Image(i))
			key[Pixels] = float32(s.Labels[i])
			counts[key]++
		}
	}
	return counts
}

func TestParseNamesTheBadValue(t *testing.T) {
	row := bytes.Repeat([]byte("0,"), Pixels)
	for name, c := range map[string]struct{ data, want string }{
		"pixel too large": {"17," + string(row[2:]) + "3\n", "line 1, column 1"},
		"no such digit":   {string(row) + "10\n", "line 1, column 65"},
		"not a number":    {string(row) + "x\n", `"x"`},
		"short line":      {"1,2,3\n", "wrong number of fields"},
	} {
		t.Run(name, func(t *testing.T) {
			var gz bytes.Buffer
			w := gzip.NewWriter(&gz)
			_, err := w.Write([]byte(c.data))
			require.NoError(t, err)
			require.NoError(t, w.Close())
			_, err = parse(gz.Bytes())
			assert.ErrorContains(t, err, c.want)
		})
	}
	_, err := parse([]byte("not gzip"))
	assert.Error(t, err)
}
