package main

import (
	"bytes"
	"io"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
)

// TestPeerReport shows figures as from two GPUs: of several sizes, and of one size, which gives no curve.
func TestPeerReport(t *testing.T) {
	for _, sizes := range [][]int{{256, 1 << 20}, {256}} {
		var json, text bytes.Buffer
		r := peerReport{json: &json, text: &text, dir: &console.OutDir{Path: t.TempDir()}, results: make([][]bench.Result, len(peerSeries))}
		for series := range peerSeries {
			for i, bytes := range sizes {
				wrong := int64(0)
				r.add(series, []bench.Result{{Ranks: 2, Bytes: bytes, DType: "f32", Device: "a GPU", Time: float64(100*series + i + 1), Wrong: &wrong}})
			}
		}
		require.NoError(t, r.finish(true))
		assert.Len(t, jsonLines[map[string]any](t, json.String()), len(peerSeries)*len(sizes))
		assert.Regexp(t, `(?m)^bytes .*NCCL windows, eager$`, text.String())
		assert.Regexp(t, `(?m)^ *256 +1\.000 +101\.00 +201\.00 +301\.00 +401\.00 +501\.00$`, text.String())
		assert.Contains(t, text.String(), "wrong elements: 0")
		for _, ext := range picture.Formats() {
			path := filepath.Join(r.dir.Path, peerPicture+ext)
			if len(sizes) > 1 {
				assert.Contains(t, text.String(), "wrote "+path)
				assert.FileExists(t, path)
			} else {
				assert.NoFileExists(t, path)
			}
		}
	}
	require.NoError(t, (&peerReport{json: io.Discard, text: io.Discard, results: make([][]bench.Result, len(peerSeries))}).finish(true), "a process without rank 0")
}
