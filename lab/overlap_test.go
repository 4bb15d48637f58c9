package main

import (
	"bytes"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/lab/overlap"
	"github.com/tutti-go/tutti/comm"
)

func TestOverlapNeedsStreams(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	stdout, _, err := execute(t, "overlap", "--backend", "local", "--out", out)
	assert.ErrorContains(t, err, "local: overlap needs a backend with streams, such as nccl")
	assert.Empty(t, stdout)
	assert.NoDirExists(t, out)
}

func TestOverlapWithoutGPUsSaysWhatIsMissing(t *testing.T) {
	found, err := backend.Find("nccl")
	require.NoError(t, err)
	if _, err := found.Probe(t.Context()); err == nil {
		t.Skip("this machine has GPUs and NCCL")
	}
	stdout, _, err := execute(t, "overlap", "--out", t.TempDir())
	assert.ErrorIs(t, err, comm.ErrUnavailable)
	assert.Empty(t, stdout)
}

// overlapFigures is a result as from four GPUs.
func overlapFigures() *overlapResult {
	spans := []overlap.Span{{Kind: overlap.Forward, Name: "forward 0", End: 100}}
	return &overlapResult{Backend: "nccl", CTAs: 4, CUBLAS: "13.1.0", Result: overlap.Result{
		Device: "a GPU", Ranks: 4, Layers: 32, Width: 4096, Batch: 8192, GradientBytes: 1 << 30, Buckets: 35, Multiprocessors: 128,
		ComputeMS: 35.5, CommMS: 5, CommFlatMS: 4.5, CommBesideMS: 18, SequentialMS: 40.5, OverlappedMS: 36.25,
		Hidden: 0.8333, SlowdownMS: 0.5, TailMS: 0.25, TFLOPS: 734.6,
		Timelines: []overlap.Timeline{{Name: "one after the other", Total: 100, Spans: spans}, {Name: "overlapped", Total: 90, Spans: spans}},
	}}
}

func TestOverlapReport(t *testing.T) {
	var out bytes.Buffer
	r := overlapReport{json: io.Discard, text: &out, dir: &console.OutDir{Path: t.TempDir()}, result: overlapFigures()}
	require.NoError(t, r.finish())
	for _, text := range []string{
		"32 layers of 4096×4096 in bf16, batch 8192 on each of 4 × a GPU; 1G of gradients in 35 buckets", "cuBLAS 13.1.0\n",
		"35.50 ms  735 TFLOP/s", "4 CTAs; 128 multiprocessors", "hidden: 83.3 % of the communication",
		"the rest, 0.75 ms: compute is slower beside communication by 0.50 ms, and 0.25 ms come after the last product",
	} {
		assert.Contains(t, out.String(), text)
	}
	for _, ext := range []string{".png", ".svg"} {
		assert.FileExists(t, filepath.Join(r.dir.Path, "overlap"+ext))
	}

	out.Reset()
	r.json, r.text = &out, io.Discard
	require.NoError(t, r.finish())
	lines := jsonLines[map[string]any](t, out.String())
	require.Len(t, lines, 1, "nothing but the object")
	assert.Subset(t, slices.Collect(maps.Keys(lines[0])), []string{"backend", "device", "ranks", "layers", "width", "batch", "bucket_bytes", "buckets", "ctas", "sms", "cublas",
		"compute_ms", "comm_ms", "comm_flat_ms", "comm_beside_ms", "sequential_ms", "overlapped_ms", "hidden", "slowdown_ms", "tail_ms", "tflops", "timelines"})

	out.Reset()
	require.NoError(t, (&overlapReport{json: &out, text: &out}).finish(), "a process without rank 0")
	assert.Empty(t, out.String())
}
