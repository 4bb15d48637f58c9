package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/lab/cublas"
	"github.com/tutti-go/tutti/cmd/tutti/lab/figure"
	"github.com/tutti-go/tutti/cmd/tutti/lab/overlap"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// defaultCTAs is low enough to leave the products almost all multiprocessors, and high enough to reduce a layer's
// gradient in less time than its products take.
const defaultCTAs = 4

func newOverlap() *cobra.Command {
	cfg := overlap.Default()
	w := console.NewGPUWorld()
	ctas := defaultCTAs
	var dir console.OutDir
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "overlap",
		Short: "Hide communication behind a backward pass (needs a GPU)",
		Long: `overlap runs data-parallel training steps of a chain of linear layers in
bfloat16 on NVIDIA GPUs, and averages the gradients over the ranks: after the
backward pass, or bucket by bucket while it goes on, ordered by events. It
prints the time of both, on the devices' clocks, and the share of the
communication that was hidden:

  (compute + communication - overlapped) / communication

where communication is one allreduce of all gradients as a single buffer, with
the library's own settings and nothing beside it. With a sparse --pattern all
buckets are selected from, exchanged and merged alone; random numbers
take the place of gradients then, a copy each in all that computes. Products are
cuBLAS's, opened at run time (TUTTI_CUBLAS_LIB names another file).

Communication takes multiprocessors away from compute. --ctas says how many it
may take while products run: fewer are slower, but hidden communication has
time. Products then use the others. Pictures of a step on rank 0
(` + overlapPicture + `.png and .svg) are written to the --out directory.`,
		Example: `  lab overlap
  lab overlap --ctas 8 --bucket 4M
  lab overlap --pattern oktopk --density 0.01
  lab overlap --layers 8 --width 2048 --rounds 3 --json
  torchrun --nproc-per-node 4 --no-python lab overlap`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return console.UsageError{Err: err}
			}
			defer dir.Tidy()
			r := overlapReport{dir: &dir}
			r.json, r.text = console.Forms(cmd.OutOrStdout(), asJSON)
			progress := &console.Bars{Out: cmd.ErrOrStderr(), Pieces: 1}
			cfg.Progress = func(done, total int) {
				progress.Set("rounds", done, total)
			}
			err := w.Run(cmd, dir.Prepare, func(ctx context.Context, rank backend.Rank) error {
				result, err := runOverlap(ctx, rank, w.Backend, ctas, cfg)
				if err != nil || rank.Comm.Rank() > 0 {
					return err
				}
				r.result = &overlapResult{
					Backend: w.Backend,
					CTAs:    ctas,
					Result:  result,
				}
				r.result.CUBLAS, _, err = cublas.Version()
				return err
			})
			progress.Stop()
			return errors.Join(err, r.finish())
		},
	}
	flags := cmd.Flags()
	w.Register(flags)
	overlapFlags(flags, &cfg, &ctas)
	dir.Register(flags)
	flags.BoolVar(&asJSON, "json", false, "print one JSON object, the timelines included, instead of the table")
	return cmd
}

// overlapFlags adds the flags of the measurement.
func overlapFlags(flags *pflag.FlagSet, cfg *overlap.Config, ctas *int) {
	flags.IntVar(&cfg.Layers, "layers", cfg.Layers, "number of linear layers")
	flags.IntVar(&cfg.Width, "width", cfg.Width, "inputs and outputs of a layer")
	flags.IntVar(&cfg.Batch, "batch", cfg.Batch, "rows of a rank's input")
	flags.Var(console.SizeFlag(&cfg.BucketBytes), "bucket",
		"gradients that are reduced together; a larger layer is reduced on its own, the last one in parts of this size")
	flags.Var(console.NameFlag(&cfg.Pattern, console.ParsePattern), "pattern",
		"how buckets are reduced: "+console.PatternNames())
	flags.Float64Var(&cfg.Density, "density", cfg.Density,
		"part of the entries that a rank selects, with a sparse pattern")
	flags.IntVar(ctas, "ctas", *ctas, "thread blocks (CTAs) of communication beside products; 0 for the library's choice")
	console.Restrict(flags, "ctas", "0 or more", func() bool { return *ctas >= 0 })
	flags.IntVar(&cfg.Multiprocessors, "sms", 0,
		"multiprocessors of products beside communication; 0 for those that --ctas leaves")
	flags.IntVar(&cfg.Steps, "steps", cfg.Steps, "steps of a round, one after the other")
	flags.IntVar(&cfg.Rounds, "rounds", cfg.Rounds, "rounds, of which the median counts")
}

// runOverlap measures on one rank. A separate communicator with the same ranks works beside the products.
func runOverlap(
	ctx context.Context,
	rank backend.Rank,
	name string,
	ctas int,
	cfg overlap.Config,
) (_ overlap.Result, err error) {
	rt, isGPU := rank.Runtime.(*cuda.Runtime)
	if _, hasStreams := comm.As[comm.StreamSyncOps](rank.Comm); !isGPU || !hasStreams {
		return overlap.Result{}, &backend.OptionError{
			Backend: name,
			Reason:  "overlap needs a backend with streams, such as nccl",
		}
	}
	available := rt.Info().Multiprocessors
	if cfg.Multiprocessors > available || ctas >= available {
		return overlap.Result{}, console.Usagef("--sms %d and --ctas %d: %s has %d multiprocessors",
			cfg.Multiprocessors, ctas, rt.Name(), available)
	}
	if cfg.Multiprocessors == 0 && ctas > 0 {
		cfg.Multiprocessors = available - ctas
	}
	gpu, err := overlap.NewGPU(rt)
	if err != nil {
		return overlap.Result{}, err
	}
	defer func() {
		err = errors.Join(err, gpu.Close())
	}()
	r := overlap.Rank{
		Runtime: rt,
		Compute: gpu,
		Comm:    rank.Comm,
	}
	if ctas > 0 {
		if r.Beside, err = newBeside(ctx, rank, rt, ctas); err != nil {
			return overlap.Result{}, err
		}
		defer func() {
			err = errors.Join(err, comm.CloseAll(r.Beside, err))
		}()
	}
	return overlap.Run(ctx, r, cfg)
}

// newBeside makes a rank's separate communicator, which takes few multiprocessors. It is collective.
func newBeside(ctx context.Context, rank backend.Rank, rt *cuda.Runtime, ctas int) (comm.Communicator, error) {
	limited, cancel := rank.Within(ctx)
	defer cancel()
	c, err := nccl.From(limited, rank.Comm, rt, nccl.WithCTAs(ctas, ctas))
	if err != nil {
		return nil, err
	}
	return rank.Watch(ctx, c), nil
}

// overlapResult is one line of --json.
type overlapResult struct {
	Backend string `json:"backend"`
	CTAs    int    `json:"ctas"`   // 0: the library's choice
	CUBLAS  string `json:"cublas"` // its version
	overlap.Result
}

// overlapPicture is the name of the pictures without extension.
const overlapPicture = "overlap"

// overlapReport shows rank 0's measurement.
type overlapReport struct {
	json   io.Writer       // of the result's line; io.Discard for none
	text   io.Writer       // for people; io.Discard for none
	dir    *console.OutDir // of the pictures
	result *overlapResult  // nil in a process without rank 0
}

// finish prints the result and writes the pictures.
func (r *overlapReport) finish() error {
	if r.result == nil {
		return nil
	}
	console.WriteJSON(r.json, r.result)
	r.print()
	title := fmt.Sprintf("A step of %s (%s), rank 0 of %d × %s",
		backend.Counted(r.result.Layers, "layer"), patternText(r.result), r.result.Ranks, r.result.Device)
	if r.result.Ranks > 1 {
		title += fmt.Sprintf(": %.1f %% hidden", 100*r.result.Hidden)
	}
	return r.dir.Draw(r.text, overlapPicture, func(path string) error {
		return figure.Timelines(r.result.Timelines, title, path)
	})
}

func (r *overlapReport) print() {
	res := r.result
	fmt.Fprintf(r.text, "%s of %d×%d in bf16, batch %d on each of %d × %s; ",
		backend.Counted(res.Layers, "layer"), res.Width, res.Width, res.Batch, res.Ranks, res.Device)
	fmt.Fprintf(r.text, "%s of gradients in %s, %s; cuBLAS %s\n\n",
		console.FormatSize(res.GradientBytes), backend.Counted(res.Buckets, "bucket"), patternText(res), res.CUBLAS)
	t := console.NewTable()
	t.AppendHeader(table.Row{"step", "time", ""})
	for _, row := range []struct {
		label string
		ms    float64
		note  string
	}{
		{"compute alone", res.ComputeMS, fmt.Sprintf("%.0f TFLOP/s", res.TFLOPS)},
		{"communication alone, one buffer", res.CommFlatMS, oneBufferText(res)},
		{"communication alone, buckets", res.CommMS, ""},
		{"communication alone, as beside compute", res.CommBesideMS, besideText(res)},
		{"one after the other", res.SequentialMS, ""},
		{"overlapped", res.OverlappedMS, ""},
	} {
		t.AppendRow(table.Row{row.label, formatMS(row.ms), row.note})
	}
	console.PrintTable(r.text, t, console.AlignRight(2, 2), 3)
	fmt.Fprintln(r.text)
	if res.Ranks == 1 {
		fmt.Fprintln(r.text, "one rank has nothing to communicate")
		return
	}
	fmt.Fprintf(r.text, "hidden: %.1f %% of the communication\n", 100*res.Hidden)
	fmt.Fprintf(r.text, "the rest, %s: compute is slower beside communication by %s, and %s come after the last product\n",
		formatMS(res.OverlappedMS-res.ComputeMS), formatMS(res.SlowdownMS), formatMS(res.TailMS))
}

// patternText describes the reduction of buckets.
func patternText(res *overlapResult) string {
	if res.Pattern == sparse.Dense {
		return res.Pattern
	}
	return fmt.Sprintf("%s of %g %%", res.Pattern, 100*res.Density)
}

// oneBufferText says that a step of one buffer is dense although other steps are sparse.
func oneBufferText(res *overlapResult) string {
	if res.Pattern == sparse.Dense {
		return ""
	}
	return "dense"
}

// besideText describes the division of the multiprocessors.
func besideText(res *overlapResult) string {
	ctas := "the library's choice of"
	sms := "all"
	if res.CTAs > 0 {
		ctas = fmt.Sprint(res.CTAs)
	}
	if res.Multiprocessors > 0 {
		sms = fmt.Sprint(res.Multiprocessors)
	}
	return fmt.Sprintf("%s CTAs; %s multiprocessors for products", ctas, sms)
}

func formatMS(ms float64) string { return fmt.Sprintf("%.2f ms", ms) }
