package cli

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/internal/diagnose"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/printable"
)

func newDiagnose() *cobra.Command {
	var asJSON bool
	var timeline string
	cmd := &cobra.Command{
		Use:   "diagnose [DUMP...]",
		Short: "Explain from the ranks' flight records why a program hangs",
		Long: `diagnose reads the flight records of a job and names the rank that has not
joined the call that others wait for, and calls on which ranks disagree. DUMP is
a file tutti-record-RANK.json or a directory of them (default the current one).

With TUTTI_RECORD=1000 in their environment (the number of calls to keep), tutti
and programs that use tutti.Run or instrument.Run write these files to
TUTTI_RECORD_DIR, or to the current directory: when a wait fails, when a rank
aborts, and on the signals USR1 and TERM. An elastic job has a directory for
each epoch; diagnose reads the newest.

With --trace it also writes a timeline of all ranks on one clock, which
https://ui.perfetto.dev and chrome://tracing open.`,
		Example: `  TUTTI_RECORD=1000 mpirun -n 4 tutti train --backend mpi --timeout 60s
  tutti diagnose tutti-record-*.json
  tutti diagnose --trace timeline.json .
  tutti diagnose --json . | jq -r '.findings[].text'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				args = []string{"."}
			}
			records, stale, err := diagnose.ReadFiles(args)
			if err != nil {
				return err
			}
			if len(stale) > 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), console.Wrapped(cmd.ErrOrStderr(),
					"tutti: left out, as they are of another run: "+printable.Text(strings.Join(stale, ", "))))
			}
			lines, out := console.Forms(cmd.OutOrStdout(), asJSON)
			if dir := filepath.Dir(records[0].Name); strings.HasPrefix(filepath.Base(dir), dump.EpochDir) {
				fmt.Fprintf(out, "%s:\n\n", dir)
			}
			report := diagnose.Diagnose(records)
			console.WriteJSON(lines, report)
			for _, f := range report.Findings {
				fmt.Fprintln(out, console.Wrapped(out, f.Text))
			}
			failed := slices.ContainsFunc(report.States, func(s diagnose.State) bool {
				return s.Error != ""
			})
			switch {
			case len(report.Findings) > 0:
			case failed:
				fmt.Fprintln(out, "all ranks have called the same; the errors below have another cause")
			default:
				fmt.Fprintln(out, "nothing waits: all ranks have called the same")
			}
			fmt.Fprintln(out)
			t := console.NewTable()
			t.AppendHeader(table.Row{"rank", "last call", "done", "waits in", "error"})
			for _, s := range report.States {
				t.AppendRow(table.Row{label(s), s.Last, console.Yes[s.Done], s.Waits, s.Error})
			}
			console.PrintTable(out, t, console.AlignRight(1, 1), 2, 5)
			if timeline == "" {
				return nil
			}
			return writeTimeline(out, timeline, records)
		},
	}
	timelineFlag(cmd.Flags(), &timeline)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object instead of the table")
	return cmd
}

// label names a rank and its elastic member.
func label(s diagnose.State) string {
	rank := strconv.Itoa(s.Rank)
	if s.Name == "" {
		return rank
	}
	return fmt.Sprintf("%s (%s)", rank, s.Name)
}
