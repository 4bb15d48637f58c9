package main

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/lab/compare"
)

// fakes are programs that print the output of tutti and of Python with PyTorch: one line for each work, with a time
// that depends on the program and grows by 8 microseconds per run.
// microseconds more in each run.
const (
	fakeTutti = `#!/bin/sh
echo run >> "$0.runs"
late=$(($(wc -l < "$0.runs") / 7 * 8))
case "$*" in
*sparse*"dense --values f32,i8"*) echo '{"bytes":4194304,"place":"out-of-place","pattern":"dense","values":"f32","time_us":'$((40 + late))'}'
	echo '{"bytes":4194304,"place":"","pattern":"dense","values":"i8","time_us":'$((20 + late))'}' ;;
*sparse*topkA,topkAopt*) echo '{"bytes":4194304,"place":"","pattern":"topkA","values":"f32","time_us":'$((24 + late))'}' ;;
*sparse*) echo '{"bytes":4194304,"place":"","pattern":"oktopk","values":"f32","time_us":'$((50 + late))'}' ;;
*--p2p*) echo '{"bytes":1024,"place":"in-place","time_us":'$((2 + late))'}' ;;
*--symmetric=false*) echo '{"bytes":1024,"place":"in-place","time_us":'$((8 + late))'}' ;;
*) echo '{"bytes":1024,"place":"in-place","time_us":'$((6 + late))'}' ;;
esac
`
	fakePython = `#!/bin/sh
case "$*" in
*"import torch"*) echo PyTorch 2.x ;;
*eager*) echo '{"bytes":1024,"place":"in-place","time_us":15}'
	echo '{"bytes":4194304,"pattern":"dense","values":"f32","time_us":88}'
	echo '{"bytes":4194304,"pattern":"topkA","values":"f32","time_us":240}' ;;
*) echo '{"bytes":1024,"place":"in-place","time_us":9}' ;;
esac
`
)

// TestScoreboard lets programs take turns, compares their medians with NCCL's or PyTorch's, and prints them in 80
// columns.
func TestScoreboard(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("the programs are scripts of a shell")
	}
	dir := t.TempDir()
	cfg := compare.Scoreboard{GPUs: 2, Runs: 2, Max: 4 << 20, Tutti: filepath.Join(dir, "tutti"), Python: filepath.Join(dir, "python")}
	require.NoError(t, os.WriteFile(cfg.Tutti, []byte(fakeTutti), 0o700))
	_, _, missing, err := cfg.Run(t.Context())
	require.NoError(t, err)
	require.ErrorContains(t, missing, "PyTorch: "+cfg.Python+" does not import it")
	require.NoError(t, os.Remove(cfg.Tutti+".runs"))
	require.NoError(t, os.WriteFile(cfg.Python, []byte(fakePython), 0o700))
	turns := 0
	cfg.Progress = func(done, total int) { turns++; assert.Equal(t, []int{turns, 10}, []int{done, total}) }
	results, torch, missing, err := cfg.Run(t.Context())
	require.NoError(t, err)
	require.NoError(t, missing)
	assert.Equal(t, "PyTorch 2.x", torch)
	for _, r := range results {
		require.Len(t, r.Runs, 2)
		assert.InDelta(t, (r.Runs[0]+r.Runs[1])/2, r.Time, 1e-9)
	}
	var out bytes.Buffer
	printProvenance(&out, compare.Provenance{Date: time.Unix(0, 0), Runs: 2, Torch: torch}, []byte("tutti  v0\n"))
	assert.Contains(t, out.String(), "2 turns\nPyTorch 2.x\ntutti  v0\n")
	out.Reset()
	printComparison(&out, results, scoreboardCell)
	assert.Equal(t, `
bytes  what      NCCL  NCCL windows     tutti   PyTorch  PyTorch graph
────────────────────────────────────────────────────────────────────────
   1K  in-place    12      10 ×0.83   6 ×0.50  15 ×1.25        9 ×0.75
   4M  dense                         44 ×0.50        88
   4M  dense i8                            24
   4M  oktopk                              54
   4M  topkA                         28 ×0.12       240
`, "\n"+out.String())
}
