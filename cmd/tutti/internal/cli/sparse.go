package cli

import (
	"context"
	"errors"
	"slices"

	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
)

func newBenchSparse() *cobra.Command {
	cfg := bench.SparseConfig{
		Densities: []float64{0.01},
		DType:     dtype.F32,
		Patterns:  somePatterns(),
		Values:    []string{sparse.F32},
	}
	var flags *console.Measurement
	var wide bool
	cmd := &cobra.Command{
		Use:   "sparse",
		Short: "Average tensors by sending only their largest entries",
		Long: `sparse measures the sparse allreduce of tensors with normally distributed random
entries, new ones in every step. Residuals begin as they are after many steps.
The column sent is the bytes that a rank sends in a step, and dense is their
share of a dense allreduce. --wide adds the time of the exchange; its algbw and
busbw are those that a dense allreduce would need to take the same time. #wrong
counts elements that were lost between result and residuals, or that differ
between ranks. Without --pattern, f32 is measured along with other --values, for
comparison. On GPUs times are device times, without the copies of gradients
between steps; select and exchange (and merge, with --json) are measured step by
step. With --hosts, sent counts the bytes between hosts.`,
		Example: `  tutti bench sparse --ranks 4 --min 1M --max 64M
  tutti bench sparse --backend nccl --pattern all --min 100M --max 100M --graph
  tutti bench sparse --pattern all --density 0.001 --min 16M --max 16M --json
  tutti cluster --rate 100mbit bench sparse --values f32,i8 --min 16M --max 16M
  tutti cluster --hosts 2 --per-host 2 bench sparse --hosts 2`,
		Args: noArguments,
	}
	flags = console.NewMeasurement(cmd.Flags(), console.NewWorld(), 64<<10, 16<<20)
	patternsFlag(cmd.Flags(), &cfg.Patterns)
	valuesFlag(cmd.Flags(), &cfg.Values)
	console.DTypeFlag(cmd.Flags(), &cfg.DType, "dtype", "element type", dtype.F32, dtype.F16, dtype.BF16)
	densities := console.Value[[]float64]{
		Target: &cfg.Densities,
		Parse:  parseList,
		Format: formatList,
		Kind:   "parts",
	}
	cmd.Flags().Var(densities, "density", "parts of the entries that a rank selects, separated by commas")
	hostsFlag(cmd.Flags(), &cfg.Hosts)
	cmd.Flags().BoolVar(&cfg.NoUndo, "no-undo", false, "do not make steps transactions: keep nothing to roll them back")
	cmd.Flags().BoolVar(&cfg.Interleave, "interleave", false,
		"measure the patterns of a size alternately, for close comparisons; takes the memory of all at once")
	cmd.Flags().BoolVar(&cfg.Graph, "graph", false,
		"on GPUs: capture a step in a CUDA graph and replay it, where the pattern needs no number on the host")
	wideFlag(cmd.Flags(), &wide)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return runBenchSparse(cmd, cfg, flags, wide)
	}
	return cmd
}

// runBenchSparse measures and prints.
func runBenchSparse(cmd *cobra.Command, cfg bench.SparseConfig, flags *console.Measurement, wide bool) error {
	sizes, err := flags.Sizes()
	if err != nil {
		return err
	}
	cfg.Sizes = sizes
	if !cmd.Flags().Changed("pattern") && !slices.Contains(cfg.Values, sparse.F32) {
		cfg.Values = append([]string{sparse.F32}, cfg.Values...)
	}
	cfg.Backend = flags.Backend
	cfg.Repeats = flags.Repeats
	cfg.Verify = flags.Verify
	if err := cfg.Validate(); err != nil {
		return console.UsageError{Err: err}
	}
	var t tally
	lines, text := console.Forms(cmd.OutOrStdout(), flags.JSON)
	report := func(r bench.SparseResult) {
		if t.lines == 0 {
			printSparseHeader(text, r, wide)
		}
		printSparseLine(text, r, wide)
		console.WriteJSON(lines, r)
		t.add(r.Result)
	}
	err = flags.Run(cmd, nil, func(ctx context.Context, r backend.Rank) error {
		return bench.RunSparse(ctx, r, cfg, report)
	})
	return errors.Join(err, t.finish(text, flags.Verify))
}
