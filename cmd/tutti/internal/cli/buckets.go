package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/dtype"
)

func newBenchBuckets() *cobra.Command {
	cfg := bench.BucketsConfig{
		Density:  0.01,
		Buckets:  8,
		Bytes:    4 << 20,
		Backward: 10 * time.Millisecond,
		Wire:     dtype.F32,
		Rounds:   7,
		Patterns: somePatterns(),
	}
	w := console.NewWorld()
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "buckets",
		Short: "Send buckets of gradients during a backward pass",
		Long: `buckets averages float32 gradients, one a bucket, by Gradients of package ddp:
when the backward pass is over (after), and each as soon as it is complete
(overlapped). hidden is the share of the reduction's time that overlap hides:

  (after - overlapped) / (after - backward)

Times are medians of a step on the slowest rank. The backward pass is a pause,
so that ranks that share processors, as on an emulated cluster, do not slow each
other down. A real one on GPUs is in examples/overlap.`,
		Example: `  tutti bench buckets --ranks 2
  tutti bench buckets --ranks 2 --pattern dense --wire bf16
  tutti cluster --rate 100mbit bench buckets --pattern oktopk --backward 20ms`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Backend = w.Backend
			if err := cfg.Validate(); err != nil {
				return console.UsageError{Err: err}
			}
			lines, text := console.Forms(cmd.OutOrStdout(), asJSON)
			first := true
			report := func(r bench.BucketsResult) {
				console.WriteJSON(lines, r)
				if first {
					printBucketsHeader(text, r)
				}
				first = false
				printBucketsLine(text, r)
			}
			return w.Run(cmd, nil, func(ctx context.Context, r backend.Rank) error {
				return bench.RunBuckets(ctx, r, cfg, report)
			})
		},
	}
	flags := cmd.Flags()
	w.Register(flags)
	patternsFlag(flags, &cfg.Patterns)
	flags.Float64Var(&cfg.Density, "density", cfg.Density, "part of the entries that a rank selects")
	flags.IntVar(&cfg.Buckets, "buckets", cfg.Buckets, "`number` of buckets")
	flags.Var(console.SizeFlag(&cfg.Bytes), "size", "size of a bucket: bytes, or with K, M, G")
	flags.DurationVar(&cfg.Backward, "backward", cfg.Backward, "time of the backward pass for a bucket")
	flags.BoolVar(&cfg.Views, "views", false, "compute gradients in the buckets, which saves a copy")
	console.DTypeFlag(flags, &cfg.Wire, "wire", "element type that the dense pattern sends",
		dtype.F32, dtype.F16, dtype.BF16)
	flags.IntVar(&cfg.Rounds, "rounds", cfg.Rounds, "steps of each kind, of which the median counts")
	flags.BoolVar(&asJSON, "json", false, "print one JSON object a line instead of the table")
	return cmd
}

func printBucketsHeader(out io.Writer, r bench.BucketsResult) {
	fmt.Fprintf(
		out,
		"# %s of %s over %s, backend %s, density %v\n",
		backend.Counted(r.Buckets, "bucket"),
		console.FormatSize(r.Bytes),
		backend.Counted(r.Ranks, "rank"),
		r.Backend,
		r.Density,
	)
	names := []any{"pattern", "backward (us)", "after (us)", "overlapped (us)", "hidden"}
	writeComment(out, fmt.Sprintf("%-15s %14s %14s %14s %8s", names...))
}

func printBucketsLine(out io.Writer, r bench.BucketsResult) {
	fmt.Fprintf(
		out,
		"  %-15s %14s %14s %14s %7.0f%%\n",
		r.Pattern,
		console.FormatTime(r.Backward),
		console.FormatTime(r.After),
		console.FormatTime(r.Overlapped),
		100*r.Hidden,
	)
}
