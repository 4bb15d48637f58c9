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
		Ranks:  []int{2, 4, 8, 16},
		Low:    8,
		High:   64 << 20,
		Step:   8,
		Runs:   5,
		Python: "python3",
	}
	var tutti program
	var asJSON, best bool
	cmd := &cobra.Command{
		Use:   "compare",
		Short: "Set allreduce on the host against MPI_Allreduce in C and gloo",
		Long: `compare measures allreduce of float32, out of place and in place, between
goroutines (local) and processes of this machine: over TCP (tcp, and shared
where these ranks may share memory) and over each of Open MPI and MPICH that is
here (mpi). Beside them it measures a program in C that calls MPI_Allreduce,
where a library has its compiler wrapper, mpicc, and PyTorch over gloo where it
is installed. The programs take turns, several times, for each number of ranks;
a time is the median of the turns, each of which is measured as by bench
allreduce. Microseconds, and as a ratio: mpi's to C with its library, tcp's to
gloo, the others' to C with the first library. What is missing here is left
out, and what fails as well.

bound is with a processor or more for each rank alone (tutti launch --bind, and
mpirun --bind-to core of Open MPI), where there are as many.

floor is what any allreduce takes at least: a cache line that goes from one
goroutine to another and one back, or reading every rank's buffer and writing
every rank's result once on all processors, whichever takes longer.

Nothing else should run beside it. Where something does, --best takes the
fastest run instead of the median. An interrupt prints the turns until then.`,
		Example: `  lab compare
  lab compare --ranks 4 --max 256K
  lab compare --ranks 2,4,8,16 --runs 3 --json > today.jsonl
  lab compare --runs 15 --best --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runCompare(cmd, cfg, &tutti, asJSON, best)
		},
	}
	flags := cmd.Flags()
	tutti.register(flags)
	flags.IntSliceVar(&cfg.Ranks, "ranks", cfg.Ranks, "`numbers` of ranks, with commas between")
	flags.StringVar(&cfg.Python, "python", cfg.Python, "`program` that has PyTorch")
	flags.Var(console.SizeFlag(&cfg.Low), "min", "smallest size: bytes, or with K, M, G")
	flags.Var(console.SizeFlag(&cfg.High), "max", "largest size")
	flags.IntVar(&cfg.Step, "step", cfg.Step, "`factor` from one size to the next")
	flags.IntVar(&cfg.Runs, "runs", cfg.Runs, "turns of every program")
	flags.BoolVar(&best, "best", false, "show the fastest run, not the median")
	flags.BoolVar(&asJSON, "json", false,
		"print JSON, first what it ran on, then an object a line: median, fastest and all runs")
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
	ran, err := compare.Describe(cmd.Context(), cfg.Tutti, cfg.Runs)
	if err != nil {
		return err
	}
	ran.Torch, _ = compare.TorchVersion(cmd.Context(), cfg.Python) // missing has the reason of an error
	progress := &console.Bars{Out: cmd.ErrOrStderr(), Pieces: 1}
	cfg.Progress = func(done, total int) { progress.Set("turns", done, total) }
	results, missing, err := compare.Run(cmd.Context(), cfg)
	progress.Stop()
	for _, reason := range missing {
		fmt.Fprintf(cmd.ErrOrStderr(), "lab: left out: %v\n", reason)
	}
	lines, text := console.Forms(cmd.OutOrStdout(), asJSON)
	console.WriteJSON(lines, ran)
	fmt.Fprintln(text, ran)
	for _, r := range results {
		console.WriteJSON(lines, r)
	}
	for _, ranks := range cfg.Ranks {
		column := slices.Clone(results)
		column = slices.DeleteFunc(column, func(r compare.Result) bool { return r.Ranks != ranks })
		fmt.Fprintf(text, "\n%d ranks, µs\n", ranks)
		printComparison(text, column, comparisonCell(best))
	}
	return err
}

// comparisonCell formats a time and its ratio, of the median or of the fastest run.
func comparisonCell(best bool) func(compare.Result) string {
	return func(r compare.Result) string {
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
	}
}

// printComparison prints a line for each work and a column for each subject.
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
