package compare

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
)

// Scoreboard describes a comparison on a machine's GPUs.
type Scoreboard struct {
	GPUs   int    // number of GPUs, each with one rank
	Runs   int    // turns of each subject; the median counts
	Max    int    // largest size in bytes
	Tutti  string // the path of the tutti command
	Python string // interpreter that has PyTorch
	// Progress is called after each turn; nil for no calls.
	Progress func(done, total int)
}

// The sizes of a scoreboard come from [bench.Sizes]. They are of float32: of allreduces, and of gradients of which 1
// % is sent.
const (
	leastAllReduce, allReduceStep = 1 << 10, 16
	leastGradient, gradientStep   = 4 << 20, 25
	mostGradient                  = 400 << 20
)

// Subjects of a scoreboard.
const (
	overNCCL, overWindows, overPeers = "NCCL", "NCCL windows", "tutti"
	inTorch, inTorchGraphs           = "PyTorch", "PyTorch graph"
)

//go:embed torch/scoreboard.py
var torchProgram []byte

// Validate returns an error that names the first invalid setting.
func (s Scoreboard) Validate() error {
	switch {
	case s.Runs < 1 || s.Runs > mostRuns:
		return fmt.Errorf("%d runs are not in [1, %d]", s.Runs, mostRuns)
	case s.Max < leastGradient:
		return fmt.Errorf("largest size %d is less than the smallest gradient's, %d bytes", s.Max, leastGradient)
	}
	return nil
}

// sizeFlags returns bench's flags for sizes from low to high by a factor.
func sizeFlags(low, high, factor int) []string {
	return []string{
		"--min", strconv.Itoa(low),
		"--max", strconv.Itoa(high),
		"--step", strconv.Itoa(factor),
	}
}

// Run measures and returns the results by work and subject, and PyTorch's description of itself. If PyTorch is not
// available, it is left out; missing has the reason.
func (s Scoreboard) Run(ctx context.Context) (results []Result, torch string, missing, err error) {
	common := []string{"--backend", "nccl", "--ranks", strconv.Itoa(s.GPUs), "--json", "--verify=false"}
	allReduce := slices.Concat(
		common,
		sizeFlags(leastAllReduce, s.Max, allReduceStep),
		[]string{"--graph", "--in-place"},
	)
	gradients := slices.Concat(
		common,
		sizeFlags(leastGradient, min(s.Max, mostGradient), gradientStep),
		[]string{"--p2p", "--no-undo"},
	)
	tutti := func(collective string, flags []string, extra ...string) []string {
		return slices.Concat([]string{s.Tutti, "bench", collective}, flags, extra)
	}
	subjects := []subject{
		{name: overNCCL, turn: programs(tutti("allreduce", allReduce, "--symmetric=false"))},
		{name: overWindows, against: []string{overNCCL}, turn: programs(tutti("allreduce", allReduce, "--symmetric"))},
		{
			name:    overPeers,
			against: []string{overNCCL, inTorch},
			turn: programs(
				tutti("allreduce", allReduce, "--p2p", "--symmetric=false"),
				tutti("sparse", gradients, "--graph", "--pattern", "dense", "--values", "f32,i8"),
				tutti("sparse", gradients, "--graph", "--pattern", "topkA,topkAopt"),
				tutti("sparse", gradients, "--pattern", "oktopk"),
			),
		},
	}
	torch, missing = TorchVersion(ctx, s.Python)
	if missing == nil {
		dir, err := os.MkdirTemp("", "tutti-scoreboard-")
		if err != nil {
			return nil, "", nil, err
		}
		defer os.RemoveAll(dir) //nolint:errcheck // nothing depends on it
		script := filepath.Join(dir, "scoreboard.py")
		if err := os.WriteFile(script, torchProgram, 0o600); err != nil {
			return nil, "", nil, err
		}
		subjects = append(subjects, s.torchSubjects(script)...)
	}
	for i := range subjects {
		subjects[i].ranks = s.GPUs
	}
	results, failed, err := inTurns(ctx, subjects, s.Runs, s.Progress)
	return results, torch, missing, errors.Join(append(failed, err)...)
}

// TorchVersion returns PyTorch's description of itself, or an error if python cannot import it.
func TorchVersion(ctx context.Context, python string) (string, error) {
	const printVersion = "import torch; nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else (); " +
		"print('PyTorch', torch.__version__, *(['with NCCL', '.'.join(map(str, nccl))] if nccl else []))"
	version, err := exec.CommandContext(ctx, python, "-c", printVersion).Output()
	if err != nil {
		return "", fmt.Errorf("PyTorch: %s does not import it: %w", python, err)
	}
	return strings.TrimSpace(string(version)), nil
}

// torchSubjects returns a subject for each mode of a PyTorch program.
func (s Scoreboard) torchSubjects(script string) []subject {
	program := func(mode string) []string {
		return []string{
			s.Python,
			"-m",
			"torch.distributed.run",
			"--standalone",
			"--nproc_per_node",
			strconv.Itoa(s.GPUs),
			script,
			mode,
			list(leastAllReduce, s.Max, allReduceStep),
			list(leastGradient, min(s.Max, mostGradient), gradientStep),
		}
	}
	return []subject{
		{name: inTorch, against: []string{overNCCL}, turn: programs(program("eager"))},
		{name: inTorchGraphs, against: []string{overNCCL}, turn: programs(program("graph"))},
	}
}

// list formats sizes as JSON.
func list(low, high, step int) string {
	sizes, _ := bench.Sizes(low, high, step) // the sizes are valid
	text, _ := json.Marshal(sizes)
	return string(text)
}

// programs is the turn of a subject that consists of several programs.
func programs(commands ...[]string) func(context.Context) ([]measured, error) {
	return func(ctx context.Context) (all []measured, err error) {
		for _, args := range commands {
			lines, err := run(ctx, args[0], nil, args[1:]...)
			if err != nil {
				return nil, err
			}
			all = append(all, lines...)
		}
		return all, nil
	}
}
