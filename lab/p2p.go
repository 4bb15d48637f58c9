package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
	"github.com/tutti-go/tutti/cmd/tutti/lab/figure"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// peerSeries are the series that `lab p2p` compares.
var peerSeries = []struct {
	name      string
	base      bool // only NCCL
	symmetric bench.Choice
	graph     bool
}{
	{"p2p, graph", false, bench.Never, true},
	{"p2p, eager", false, bench.Never, false},
	{"NCCL, graph", true, bench.Never, true},
	{"NCCL, eager", true, bench.Never, false},
	{"NCCL windows, graph", true, bench.Always, true},
	{"NCCL windows, eager", true, bench.Always, false},
}

func newPeerMemory() *cobra.Command {
	cfg := bench.Config{
		Collective: bench.Collective{Op: comm.OpAllReduce},
		DType:      dtype.F32,
		Op:         comm.Sum,
		Places:     []bench.Place{bench.InPlace},
	}
	var flags *console.Measurement
	var dir console.OutDir
	cmd := &cobra.Command{
		Use:   "p2p",
		Short: "Set allreduce over peer memory against NCCL (needs GPUs)",
		Long: `p2p measures allreduce in place, over the memory of peers (--p2p of other
commands), over NCCL and over NCCL on windows, each captured in CUDA graphs and
eager, in one run. Times are microseconds of the GPU's clock, the slowest rank,
the median over rounds. Pictures (` + peerPicture + `.png and .svg) are written to
the --out directory.`,
		Example: `  lab p2p
  mpirun -n 8 lab p2p --max 64M --out /tmp/p2p`,
		Args: cobra.NoArgs,
	}
	flags = console.NewMeasurement(cmd.Flags(), console.NewGPUWorld(), 256, 1<<30)
	_ = cmd.Flags().MarkHidden("p2p")
	console.DTypeFlag(cmd.Flags(), &cfg.DType, "dtype", "element type", dtype.All()...)
	dir.Register(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var err error
		if cfg.Sizes, err = flags.Sizes(); err != nil {
			return err
		}
		cfg.Backend = flags.Backend
		cfg.Repeats = flags.Repeats
		cfg.Verify = flags.Verify
		flags.P2P = true
		measurements := make([]*bench.Measurement, len(peerSeries))
		for i, s := range peerSeries {
			cfg := cfg
			cfg.Graph = s.graph
			cfg.Symmetric = s.symmetric
			if measurements[i], err = bench.New(cfg); err != nil {
				return console.UsageError{Err: err}
			}
		}
		defer dir.Tidy()
		lines, text := console.Forms(cmd.OutOrStdout(), flags.JSON)
		r := peerReport{
			json:    lines,
			text:    text,
			dir:     &dir,
			results: make([][]bench.Result, len(peerSeries)),
		}
		progress := &console.Bars{Out: cmd.ErrOrStderr(), Pieces: 1}
		err = flags.Run(cmd, dir.Prepare, func(ctx context.Context, rank backend.Rank) error {
			return measurePeerSeries(ctx, rank, measurements, progress, r.add)
		})
		progress.Stop()
		return errors.Join(err, r.finish(flags.Verify))
	}
	return cmd
}

// measurePeerSeries measures all series on a rank, one after the other.
func measurePeerSeries(
	ctx context.Context,
	rank backend.Rank,
	measurements []*bench.Measurement,
	progress *console.Bars,
	add func(series int, results []bench.Result),
) error {
	base := rank.WithoutPeerMemory()
	for i, s := range peerSeries {
		measured := rank
		if s.base {
			measured = base
		}
		err := measurements[i].Run(ctx, measured, func(results []bench.Result) { add(i, results) })
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		if rank.Comm.Rank() == 0 {
			progress.Set("series", i+1, len(peerSeries))
		}
	}
	return nil
}

// peerPicture is the name of the pictures without extension.
const peerPicture = "p2p"

// peerReport shows rank 0's measurements.
type peerReport struct {
	json    io.Writer        // one line per result; io.Discard for none
	text    io.Writer        // for people; io.Discard for none
	dir     *console.OutDir  // of the pictures
	wrong   int64            // elements in all verified results
	results [][]bench.Result // by series
}

func (r *peerReport) add(series int, results []bench.Result) {
	for _, result := range results {
		r.results[series] = append(r.results[series], result)
		if result.Wrong != nil {
			r.wrong += *result.Wrong
		}
		console.WriteJSON(r.json, result)
	}
}

// finish prints the table, writes the pictures, and returns an error if results were wrong. It leaves out an
// incomplete series.
func (r *peerReport) finish(verified bool) error {
	if len(r.results[0]) == 0 {
		return nil
	}
	first := r.results[0][0]
	r.print(first, verified)
	title := fmt.Sprintf("Allreduce of %s on %d × %s", first.DType, first.Ranks, first.Device)
	err := r.dir.Draw(r.text, peerPicture, func(path string) error {
		p, err := figure.TimesAgainstSizes(r.curves(), title)
		if err != nil {
			return err
		}
		return picture.Save(p, path)
	})
	return errors.Join(err, console.WrongElements(r.wrong))
}

func (r *peerReport) curves() []figure.Curve {
	curves := make([]figure.Curve, len(peerSeries))
	for i, s := range peerSeries {
		curves[i] = figure.Curve{
			Name:   s.name,
			Color:  i / 2,
			Dashed: !s.graph,
			Points: r.results[i],
		}
	}
	return curves
}

// print prints the table in microseconds, with a line for each size.
func (r *peerReport) print(first bench.Result, verified bool) {
	fmt.Fprintf(r.text, "allreduce in place of %s over %s, microseconds on the device's clock; graphs hold %d calls\n",
		first.DType, backend.Counted(first.Ranks, "rank"), bench.GraphCalls)
	for rank, location := range first.Locations {
		fmt.Fprintf(r.text, "rank %d: %s\n", rank, location)
	}
	if first.HandOver != nil {
		fmt.Fprintf(r.text, "p2p: %s\n", console.HandOver(first))
	}
	fmt.Fprintln(r.text)
	header := table.Row{"bytes"}
	for _, s := range peerSeries {
		header = append(header, s.name)
	}
	t := console.NewTable()
	t.AppendHeader(header)
	for i, result := range r.results[0] {
		row := table.Row{console.FormatSize(result.Bytes)}
		for _, series := range r.results {
			if i < len(series) {
				row = append(row, console.FormatTime(series[i].Time))
			}
		}
		t.AppendRow(row)
	}
	console.PrintTable(r.text, t, console.AlignRight(1, len(header)))
	if verified {
		fmt.Fprintf(r.text, "\nwrong elements: %d\n", r.wrong)
	}
}
