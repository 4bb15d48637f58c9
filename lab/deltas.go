package main

import (
	"encoding/csv"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/lab/deltas"
)

func newDeltas() *cobra.Command {
	var tutti program
	cmd := &cobra.Command{
		Use:   "deltas FILE...",
		Short: "Set deltas of checkpoints against zstd, xdelta3 and bsdiff",
		Long: `deltas measures how long the delta from each file of safetensors to the next
one is, and from the last one to the same tensors in another order, and to the
same with other metadata: by tutti delta diff, zstd -19 --patch-from, xdelta3 -9
and bsdiff. It prints CSV: bytes, of which the last column has tutti's over the
least of the others.`,
		Example: "  lab deltas step-1.safetensors step-2.safetensors",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return console.Usagef("which files?")
			}
			defer tutti.remove() //nolint:errcheck // nothing depends on it
			if err := tutti.prepare(cmd.Context()); err != nil {
				return err
			}
			results, err := deltas.Compare(cmd.Context(), tutti.path, args)
			if err != nil {
				return err
			}
			return printDeltas(cmd, results)
		},
	}
	tutti.register(cmd.Flags())
	return cmd
}

// printDeltas prints results as CSV.
func printDeltas(cmd *cobra.Command, results []deltas.Result) error {
	w := csv.NewWriter(cmd.OutOrStdout())
	header := append([]string{"old", "new", "weights", "changed"}, deltas.Tools...)
	lines := [][]string{append(header, "of the best other")}
	for _, r := range results {
		line := []string{r.Old, r.New, fmt.Sprint(r.Weights), fmt.Sprint(r.Changed)}
		best := r.Bytes[1]
		for _, n := range r.Bytes {
			line = append(line, fmt.Sprint(n))
		}
		for _, n := range r.Bytes[1:] {
			best = min(best, n)
		}
		lines = append(lines, append(line, fmt.Sprintf("%.2f", float64(r.Bytes[0])/float64(best))))
	}
	return w.WriteAll(lines)
}
