package main

import (
	"encoding/xml"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const ms = time.Millisecond

// Two gradients of 3 ms, whose sums take 2 ms, take 10 ms sequentially and 8 ms overlapped.
func TestNewStep(t *testing.T) {
	assert.Equal(t, step{sequential, 10 * ms, []span{
		{compute, 0, 3 * ms}, {communication, 3 * ms, 5 * ms},
		{compute, 5 * ms, 8 * ms}, {communication, 8 * ms, 10 * ms},
	}}, newStep(sequential, []time.Duration{3 * ms, 8 * ms}, []time.Duration{5 * ms, 10 * ms}))
	assert.Equal(t, step{overlapped, 8 * ms, []span{
		{compute, 0, 3 * ms}, {communication, 3 * ms, 5 * ms},
		{compute, 3 * ms, 6 * ms}, {communication, 6 * ms, 8 * ms},
	}}, newStep(overlapped, []time.Duration{3 * ms, 6 * ms}, []time.Duration{5 * ms, 8 * ms}))

	// A sum waits for the previous one.
	waiting := newStep(overlapped, []time.Duration{3 * ms, 6 * ms}, []time.Duration{9 * ms, 15 * ms})
	assert.Equal(t, span{communication, 9 * ms, 15 * ms}, waiting.spans[3])
}

func TestOutcome(t *testing.T) {
	steps := []step{{way: computeOnly, total: 6 * ms}, {way: reduceOnly, total: 4 * ms}, {way: sequential, total: 10 * ms},
		{way: overlapped, total: 7 * ms}}
	assert.Equal(t, "75 % of the communication is hidden", outcome(2, steps))
	assert.Equal(t, "one GPU has nothing to communicate", outcome(1, steps))
}

// The picture is an XML document in which areas are proportional to times.
func TestDraw(t *testing.T) {
	computed, reduced := []time.Duration{3 * ms, 6 * ms}, []time.Duration{5 * ms, 8 * ms}
	var svg strings.Builder
	require.NoError(t, draw(&svg, "a title", []step{newStep(overlapped, computed, reduced)}))
	widths := map[string]float64{}
	for decoder := xml.NewDecoder(strings.NewReader(svg.String())); ; {
		token, err := decoder.Token()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		element, ok := token.(xml.StartElement)
		if !ok || element.Name.Local != "rect" {
			continue
		}
		attributes := map[string]string{}
		for _, a := range element.Attr {
			attributes[a.Name.Local] = a.Value
		}
		if width, err := strconv.ParseFloat(attributes["width"], 64); err == nil {
			widths[attributes["fill"]] += width
		}
	}
	assert.InEpsilon(t, 3.0/2, widths["#332288"]/widths["#cc6677"], 0.001)
	for _, text := range []string{"a title", "overlapped: 8.0 ms", "communication", "8 ms"} {
		assert.Contains(t, svg.String(), text)
	}
}
