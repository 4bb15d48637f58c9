package main

import (
	"cmp"
	"fmt"
	"io"
	"os/exec"
	"time"

	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/lab/compare"
	"github.com/tutti-go/tutti/comm"
)

func newScoreboard() *cobra.Command {
	cfg := compare.Scoreboard{
		Runs:   5,
		Max:    1 << 30,
		Python: "python3",
	}
	var tutti program
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "scoreboard",
		Short: "Set tutti against NCCL and PyTorch (needs GPUs)",
		Long: `scoreboard measures on all GPUs of this machine, in one run, what others have
and what tutti has: allreduce in place of float32 by NCCL, by NCCL on registered
windows, over peer memory (--p2p of other commands), and by PyTorch, call by
call and captured in CUDA graphs; and averages of gradients, dense, as i8, and
of their largest 1 % with error feedback, as tutti's patterns do it and as one
writes it in PyTorch. Each is a process, or several (PyTorch: one a
GPU), and they take turns. A time is the median over the turns, each of which
measures as the other commands do: microseconds of the GPU's clock, the slowest
rank, the median over rounds. All but oktopk and "PyTorch" is in graphs. Ratios
are to NCCL in the same line, or to PyTorch where NCCL has no such thing.

What it ran on is printed with it. PyTorch is left out where it is missing.`,
		Example: `  lab scoreboard
  lab scoreboard --runs 2 --max 64M
  lab scoreboard --python /opt/venv/bin/python --json > today.jsonl`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return console.UsageError{Err: err}
			}
			gpus := backend.LookForGPUs()
			cfg.GPUs = len(gpus.Devices)
			if cfg.GPUs < 2 {
				return fmt.Errorf("%w: a scoreboard needs two GPUs, here %s", comm.ErrUnavailable, cmp.Or(gpus.NoGPU, "is one"))
			}
			defer tutti.remove() //nolint:errcheck // nothing depends on it
			if err := tutti.prepare(cmd.Context()); err != nil {
				return err
			}
			cfg.Tutti = tutti.path
			return measureScoreboard(cmd, cfg, asJSON)
		},
	}
	flags := cmd.Flags()
	tutti.register(flags)
	flags.Var(console.SizeFlag(&cfg.Max), "max", "largest size: bytes, or with K, M, G")
	flags.IntVar(&cfg.Runs, "runs", cfg.Runs, "turns of every program")
	flags.StringVar(&cfg.Python, "python", cfg.Python, "`program` that has PyTorch")
	flags.BoolVar(&asJSON, "json", false,
		"print JSON, first what it ran on, then an object a line: median, fastest and all runs")
	return cmd
}

// measureScoreboard measures, and prints the results and the machine.
func measureScoreboard(cmd *cobra.Command, cfg compare.Scoreboard, asJSON bool) error {
	begin, err := compare.Describe(cmd.Context(), cfg.Tutti, cfg.Runs)
	if err != nil {
		return err
	}
	info, err := exec.CommandContext(cmd.Context(), cfg.Tutti, "info").Output()
	if err != nil {
		return fmt.Errorf("tutti info: %w", err)
	}
	progress := &console.Bars{Out: cmd.ErrOrStderr(), Pieces: 1}
	cfg.Progress = func(done, total int) { progress.Set("turns", done, total) }
	results, torch, missing, err := cfg.Run(cmd.Context())
	progress.Stop()
	if missing != nil {
		fmt.Fprintf(cmd.ErrOrStderr(), "lab: left out: %v\n", missing)
	}
	if err != nil {
		return err
	}
	begin.Torch = torch
	lines, text := console.Forms(cmd.OutOrStdout(), asJSON)
	console.WriteJSON(lines, begin)
	printProvenance(text, begin, info)
	for _, r := range results {
		console.WriteJSON(lines, r)
	}
	printComparison(text, results, scoreboardCell)
	return nil
}

// printProvenance prints the time and the machine of a scoreboard, with the text of `tutti info`.
func printProvenance(out io.Writer, p compare.Provenance, info []byte) {
	fmt.Fprintf(out, "%s, %s\n", p.Date.Format(time.DateTime+" MST"), backend.Counted(p.Runs, "turn"))
	if p.Torch != "" {
		fmt.Fprintln(out, p.Torch)
	}
	fmt.Fprintf(
		out,
		"%s\nmicroseconds; in-place is allreduce, the other lines average a gradient; × to\n"+
			"NCCL in the same line, or to PyTorch\n",
		info,
	)
}

// scoreboardCell formats a time in three digits and its ratio, so that five cells fit a terminal.
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
