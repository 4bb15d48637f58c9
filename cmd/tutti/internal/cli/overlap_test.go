package cli

import (
	"bytes"
	"io"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/overlap"
)

func TestOverlapRefuses(t *testing.T) {
	for flags, want := range map[[2]string]string{
		{"--backend", "local"}: "local: bench overlap needs a backend with streams, such as nccl",
		{"--layers", "0"}:      "layers is 0, want a number in [1, ",
		{"--bucket", "0"}:      "bucket is 0",
		{"--ctas", "-1"}:       `"--ctas" flag: must be 0 or more`,
		{"--sms", "-1"}:        "sms is -1",
		{"--rounds", "0"}:      "rounds is 0",
	} {
		out := filepath.Join(t.TempDir(), "out")
		code, stdout, stderr := execute(t, "bench", "overlap", "--out", out, flags[0], flags[1])
		assert.Equal(t, exitUsage, code, flags)
		assert.Empty(t, stdout)
		assert.Contains(t, stderr, want)
		assert.NoDirExists(t, out)
	}
}

func TestOverlapWithoutGPUsSaysWhatIsMissing(t *testing.T) {
	found, err := backend.Find("nccl")
	require.NoError(t, err)
	if _, err := found.Probe(t.Context()); err == nil {
		t.Skip("this machine has GPUs and NCCL")
	}
	code, stdout, stderr := execute(t, "bench", "overlap", "--out", t.TempDir())
	assert.Equal(t, exitFailure, code)
	assert.Empty(t, stdout)
	assert.Contains(t, stderr, "not available")
}

// overlapFigures is a result as four GPUs give it.
func overlapFigures() *overlapResult {
	spans := []overlap.Span{{Kind: overlap.Forward, Name: "forward 0", End: 100}}
	return &overlapResult{Backend: "nccl", CTAs: 4, Result: overlap.Result{
		Device: "a GPU", Ranks: 4, Layers: 32, Width: 4096, Batch: 8192, GradientBytes: 1 << 30, Buckets: 35, Multiprocessors: 128,
		ComputeMS: 35.5, CommMS: 5, CommFlatMS: 4.5, CommBesideMS: 18, SequentialMS: 40.5, OverlappedMS: 36.25,
		Hidden: 0.8333, SlowdownMS: 0.5, TailMS: 0.25, TFLOPS: 734.6,
		Timelines: []overlap.Timeline{{Name: "one after the other", Total: 100, Spans: spans}, {Name: "overlapped", Total: 90, Spans: spans}},
	}}
}

func TestOverlapReport(t *testing.T) {
	var out bytes.Buffer
	r := overlapReport{json: io.Discard, text: &out, dir: &outDir{path: t.TempDir()}, result: overlapFigures()}
	require.NoError(t, r.finish())
	for _, text := range []string{
		"32 layers of 4096×4096 in bf16, batch 8192 on each of 4 × a GPU; 1G of gradients in 35 buckets",
		"35.50 ms  735 TFLOP/s", "4 CTAs; 128 multiprocessors", "hidden: 83.3 % of the communication",
		"the rest, 0.75 ms: compute is slower beside communication by 0.50 ms, and 0.25 ms come after the last product",
	} {
		assert.Contains(t, out.String(), text)
	}
	for _, ext := range []string{".png", ".svg"} {
		assert.FileExists(t, filepath.Join(r.dir.path, "overlap"+ext))
	}

	out.Reset()
	r.json, r.text = &out, io.Discard
	require.NoError(t, r.finish())
	lines := jsonLines(t, out.String())
	require.Len(t, lines, 1, "nothing but the object")
	assert.Subset(t, keys(lines[0]), []string{"backend", "device", "ranks", "layers", "width", "batch", "bucket_bytes", "buckets", "ctas", "sms",
		"compute_ms", "comm_ms", "comm_flat_ms", "comm_beside_ms", "sequential_ms", "overlapped_ms", "hidden", "slowdown_ms", "tail_ms", "tflops", "timelines"})

	out.Reset()
	require.NoError(t, (&overlapReport{json: &out, text: &out}).finish(), "a process without rank 0")
	assert.Empty(t, out.String())
}
