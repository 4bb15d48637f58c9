package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/lab/compare"
)

func newCompare() *cobra.Command {
	cfg := compare.Config{
		Ranks: 2,
		Low:   8,
		High:  16 << 20,
		Step:  8,
		Runs:  5,
	}
	var tutti program
	var asJSON, best bool
	cmd := &cobra.Command{
		Use:   "compare",
		Short: "Set allreduce on the host against MPI_Allreduce in C",
		Long: `compare measures allreduce of float32 between goroutines (local) and processes
(mpi) of this machine, out of place and in place, beside a program in C that
calls MPI_Allreduce, under each of Open MPI and MPICH that is here with its
compiler wrapper, mpicc. The programs take turns, several times; a time is the
median of the runs, each of which is measured as by bench allreduce.
Microseconds, and as a ratio to C's: mpi's to that of its library, local's to
that of the first.

floor is what any allreduce takes at least: a cache line that goes from one
goroutine to another and one back, or reading every rank's buffer and writing
every rank's result once on all processors, whichever takes longer.

Nothing else should run beside it. Where something does, --best takes the
fastest run instead of the median.`,
		Example: `  lab compare
  lab compare --ranks 4 --max 256K
  lab compare --runs 15 --best --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runCompare(cmd, cfg, &tutti, asJSON, best)
		},
	}
	flags := cmd.Flags()
	tutti.register(flags)
	flags.IntVar(&cfg.Ranks, "ranks", cfg.Ranks, "number of `ranks`")
	flags.Var(console.SizeFlag(&cfg.Low), "min", "smallest size: bytes, or with K, M, G")
	flags.Var(console.SizeFlag(&cfg.High), "max", "largest size")
	flags.IntVar(&cfg.Step, "step", cfg.Step, "`factor` from one size to the next")
	flags.IntVar(&cfg.Runs, "runs", cfg.Runs, "turns of every program")
	flags.BoolVar(&best, "best", false, "show the fastest run, not the median")
	flags.BoolVar(&asJSON, "json", false,
		"print one JSON object a line instead of the table: median, fastest and all runs")
	return cmd
}

// runCompare measures and prints.
func runCompare(cmd *cobra.Command, cfg compare.Config, tutti *program, asJSON, best bool) error {
	if err := cfg.Validate(); err != nil {
		return console.UsageError{Err: err}
	}
	defer tutti.remove() //nolint:errcheck // nothing depends on it
	if err := tutti.prepare(cmd.Context()); err != nil {
		return err
	}
	cfg.Tutti = tutti.path
	progress := &console.Bars{Out: cmd.ErrOrStderr(), Pieces: 1}
	cfg.Progress = func(done, total int) { progress.Set("turns", done, total) }
	results, missing, err := compare.Run(cmd.Context(), cfg)
	progress.Stop()
	for _, reason := range missing {
		fmt.Fprintf(cmd.ErrOrStderr(), "lab: left out: %v\n", reason)
	}
	if err != nil {
		return err
	}
	lines, text := console.Forms(cmd.OutOrStdout(), asJSON)
	printComparison(text, results, func(r compare.Result) string {
		time := r.Time
		ratio := r.Ratio
		if best {
			time = r.Best
			ratio = r.BestRatio
		}
		cell := console.FormatTime(time)
		if ratio > 0 {
			cell += fmt.Sprintf(" %5s", fmt.Sprintf("×%.2f", ratio))
		}
		return cell
	})
	for _, r := range results {
		console.WriteJSON(lines, r)
	}
	return nil
}

// printComparison prints a line for each work, and a column for each subject.
func printComparison(out io.Writer, results []compare.Result, cell func(compare.Result) string) {
	var subjects []string
	header := table.Row{"bytes", "what"}
	for _, r := range results {
		if !slices.Contains(subjects, r.Subject) {
			subjects = append(subjects, r.Subject)
			header = append(header, strings.Replace(r.Subject, "/", "\n", 1))
		}
	}
	t := console.NewTable()
	t.AppendHeader(header)
	var row table.Row
	for i, r := range results {
		if i == 0 || r.Work != results[i-1].Work {
			row = table.Row{
				console.FormatSize(r.Bytes),
				strings.TrimSuffix(r.Work.String(), "-of-place"),
			}
			for range subjects {
				row = append(row, "")
			}
		}
		row[2+slices.Index(subjects, r.Subject)] = cell(r)
		if i == len(results)-1 || r.Work != results[i+1].Work {
			t.AppendRow(row)
		}
	}
	console.PrintTable(out, t, append(console.AlignRight(1, 1), console.AlignRight(3, len(header))...))
}
