package cli

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/compare"
	"github.com/tutti-go/tutti/comm"
)

// provenance is the first line of `tutti bench scoreboard --json`.
type provenance struct {
	Date time.Time `json:"date"`
	Runs int       `json:"runs"`
	// Torch is what PyTorch says of itself, "" where it was left out.
	Torch string      `json:"torch,omitempty"`
	Info  information `json:"info"`
}

func newBenchScoreboard() *cobra.Command {
	cfg := compare.Scoreboard{Runs: 5, Max: 1 << 30, Python: "python3"}
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "scoreboard",
		Short: "Set tutti against NCCL and PyTorch (needs GPUs)",
		Long: `scoreboard measures on all GPUs of this machine, in one run, what others have
and what tutti has: allreduce in place of float32 by NCCL, by NCCL on registered
windows, over peer memory (--p2p of other commands), and by PyTorch, call by
call and captured in CUDA graphs; and averages of gradients, dense, as i8, and
of their largest 1 % with error feedback, as tutti's patterns do it and as one
writes it in PyTorch. Each is a process of its own, or several (PyTorch: one a
GPU), and they take turns. A time is the median over the turns, each of which
measures as the other commands do: microseconds of the GPU's clock, the slowest
rank, the median over rounds. All but oktopk and "PyTorch" is in graphs. Ratios
are to NCCL in the same line, or to PyTorch where NCCL has no such thing.

What it ran on is printed with it. PyTorch is left out where it is missing.`,
		Example: `  tutti bench scoreboard
  tutti bench scoreboard --runs 2 --max 64M
  tutti bench scoreboard --python /opt/venv/bin/python --json > today.jsonl`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return usageError{err}
			}
			from := provenance{Date: time.Now().UTC().Truncate(time.Second), Runs: cfg.Runs, Info: collect(cmd)}
			if cfg.GPUs = len(from.Info.Devices); cfg.GPUs < 2 {
				return fmt.Errorf("%w: a scoreboard needs two GPUs, here %s", comm.ErrUnavailable, cmp.Or(from.Info.NoGPU, "is one"))
			}
			var err error
			if cfg.Self, err = os.Executable(); err != nil {
				return err
			}
			progress := &bars{out: cmd.ErrOrStderr(), pieces: 1}
			cfg.Progress = func(done, total int) { progress.set("turns", done, total) }
			results, torch, missing, err := cfg.Run(cmd.Context())
			progress.stop()
			if missing != nil {
				fmt.Fprintf(cmd.ErrOrStderr(), "tutti: left out: %v\n", missing)
			}
			if err != nil {
				return err
			}
			from.Torch = torch
			lines, text := forms(cmd.OutOrStdout(), asJSON)
			writeJSON(lines, from)
			from.print(text)
			for _, r := range results {
				writeJSON(lines, r)
			}
			printComparison(text, results, scoreboardCell)
			return nil
		},
	}
	flags := cmd.Flags()
	flags.Var(sizeFlag(&cfg.Max), "max", "largest size: bytes, or with K, M, G")
	flags.IntVar(&cfg.Runs, "runs", cfg.Runs, "turns of every program")
	flags.StringVar(&cfg.Python, "python", cfg.Python, "`program` that has PyTorch")
	flags.BoolVar(&asJSON, "json", false, "print JSON, first what it ran on, then an object a line: median, fastest and all runs")
	return cmd
}

// print says what a scoreboard is of.
func (p provenance) print(out io.Writer) {
	fmt.Fprintf(out, "%s, tutti %s, %s, %s\n", p.Date.Format(time.DateTime+" MST"), p.Info.Version, p.Info.Go, backend.Counted(p.Runs, "turn"))
	fmt.Fprintf(out, "%s, %s\n", p.Info.CPU, backend.Counted(p.Info.Cores, "logical core"))
	if p.Torch != "" {
		fmt.Fprintln(out, p.Torch)
	}
	printGPUs(out, p.Info.GPUs, p.Info.CUBLAS)
	fmt.Fprintln(out, "\nmicroseconds; in-place is allreduce, the other lines average a gradient; × to\nNCCL in the same line, or to PyTorch")
}

// scoreboardCell is a time in three digits and its ratio, so that five of them fit a terminal.
func scoreboardCell(r compare.Result) string {
	cell := fmt.Sprintf("%.3g", r.Time)
	if r.Time >= 1000 {
		cell = fmt.Sprintf("%.0f", r.Time)
	}
	if r.Ratio > 0 {
		cell += fmt.Sprintf(" ×%.2f", r.Ratio)
	}
	return cell
}
