package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench COLLECTIVE",
		Short: "Measure collectives: time, bandwidth and wrong elements",
		Long: `bench measures a collective over a range of sizes, including the smallest and
the largest, and prints a table; --wide prints the table of nccl-tests. Time is
the duration of one call on the slowest rank, until its result is available, as
the median of the rounds; on GPUs it is the device time of queued calls. algbw
is size over time. busbw is the bandwidth of a link by the factors of
nccl-tests, which makes different numbers of ranks comparable. One rank has no
busbw: N/A, and null with --json. #wrong counts elements that differ from an
independent reference, over all ranks. If the backend does not support what you
ask for, such as graphs or a reduction of a type, the exit code is 2.`,
		Example: `  tutti bench allreduce --ranks 2
  tutti bench alltoall --min 64K --max 16M --step 2 --dtype bf16
  tutti bench sparse --pattern oktopk --density 0.01 --min 1M
  tutti bench allreduce --backend nccl --max 1G --graph
  tutti bench allreduce --backend nccl --p2p
  mpirun -n 2 tutti bench allreduce --backend mpi --json`,
	}
	for _, k := range bench.Collectives() {
		addGroup(cmd, "Collectives:", newBenchCollective(k))
	}
	addGroup(cmd, "Gradients:", newBenchSparse(), newBenchBuckets())
	onlySubcommands(cmd, "collective")
	return cmd
}

// wideFlag adds the flag for a table that does not fit 80 columns.
func wideFlag(flags *pflag.FlagSet, wide *bool) {
	flags.BoolVar(wide, "wide", false, "print all columns of nccl-tests, in lines of 140 characters")
}

// tally accumulates results for the lines below a table and the exit code.
type tally struct {
	lines  int     // of the table
	wrong  int64   // elements
	busBW  float64 // sum over the lines with a bandwidth, in 10^9 bytes per second
	linked bool    // there were several ranks
}

// add adds a result.
func (t *tally) add(r bench.Result) {
	t.lines++
	if r.BusBW != nil {
		t.busBW += *r.BusBW
		t.linked = true
	}
	if r.Wrong != nil {
		t.wrong += *r.Wrong
	}
}

// finish prints the lines below a table and returns the error of [console.WrongElements].
func (t *tally) finish(text io.Writer, verified bool) error {
	if t.lines == 0 {
		return nil
	}
	fmt.Fprintln(text, "#")
	if verified {
		fmt.Fprintf(text, "# Wrong elements   : %d\n", t.wrong)
	}
	if t.linked {
		fmt.Fprintf(text, "# Avg bus bandwidth: %.4g GB/s\n", t.busBW/float64(t.lines))
	} else {
		fmt.Fprintln(text, "# Avg bus bandwidth: N/A, as there is one rank")
	}
	return console.WrongElements(t.wrong)
}

// about describes a collective for the help.
var about = map[string]string{
	"allreduce":     "Every rank gets the reduction of all ranks' elements",
	"allgather":     "Every rank gets all ranks' elements",
	"reducescatter": "Every rank gets its part of the reduction of all ranks' elements",
	"alltoall":      "Every rank sends a part to every other",
	"broadcast":     "Every rank gets rank 0's elements",
	"sendrecv":      "Every rank sends to the next and receives from the one before",
}

// collectiveBench is the command that measures one collective.
type collectiveBench struct {
	cfg       bench.Config         // what to measure
	flags     *console.Measurement // common to all such commands
	inPlace   bool                 // --in-place
	symmetric bool                 // --symmetric
	wide      bool                 // --wide
}

func newBenchCollective(k bench.Collective) *cobra.Command {
	b := &collectiveBench{cfg: bench.Config{
		Collective: k,
		DType:      dtype.F32,
		Op:         comm.Sum,
	}}
	name := k.String()
	cmd := &cobra.Command{
		Use:   name,
		Short: about[name],
		Example: fmt.Sprintf(
			`  tutti bench %[1]s --ranks 2
  tutti bench %[1]s --ranks 8 --min 1M --max 1M --dtype f16 --json`,
			name,
		),
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := b.configure(cmd); err != nil {
				return err
			}
			return b.run(cmd)
		},
	}
	b.register(cmd.Flags())
	return cmd
}

// register adds the flags.
func (b *collectiveBench) register(flags *pflag.FlagSet) {
	b.flags = console.NewMeasurement(flags, console.NewWorld(), 8, 64<<20)
	console.DTypeFlag(flags, &b.cfg.DType, "dtype", "element type", dtype.All()...)
	if b.cfg.Collective.Reduces() {
		op := console.Value[comm.ReduceOp]{
			Target: &b.cfg.Op,
			Parse:  reductions.Parse,
			Format: comm.ReduceOp.String,
			Kind:   "name",
		}
		flags.Var(op, "op", "reduction: "+console.JoinNames(reductions.All()))
	}
	if len(b.cfg.Collective.Places()) > 1 {
		flags.BoolVar(&b.inPlace, "in-place", false, "measure in place only, not both forms")
	}
	flags.BoolVar(&b.cfg.Graph, "graph", false,
		fmt.Sprintf("measure calls captured in CUDA graphs of %d (nccl)", bench.GraphCalls))
	flags.BoolVar(&b.symmetric, "symmetric", true,
		"allocate buffers by the communicator where it can (nccl: registered windows), instead of by the runtime")
	wideFlag(flags, &b.wide)
}

// configure makes the configuration from the flags.
func (b *collectiveBench) configure(cmd *cobra.Command) error {
	sizes, err := b.flags.Sizes()
	if err != nil {
		return err
	}
	b.cfg.Sizes = sizes
	b.cfg.Backend = b.flags.Backend
	b.cfg.Repeats = b.flags.Repeats
	b.cfg.Verify = b.flags.Verify
	switch {
	case !b.symmetric:
		b.cfg.Symmetric = bench.Never
	case cmd.Flags().Changed("symmetric"):
		b.cfg.Symmetric = bench.Always
	}
	b.cfg.Places = b.cfg.Collective.Places()
	if b.inPlace {
		b.cfg.Places = []bench.Place{bench.InPlace}
	}
	return nil
}

// run measures and prints.
func (b *collectiveBench) run(cmd *cobra.Command) error {
	measurement, err := bench.New(b.cfg)
	if err != nil {
		return console.UsageError{Err: err}
	}
	var t tally
	lines, text := console.Forms(cmd.OutOrStdout(), b.flags.JSON)
	report := func(results []bench.Result) {
		if t.lines == 0 {
			printHeader(text, results, b.wide)
		}
		for _, r := range results {
			t.add(r)
			console.WriteJSON(lines, r)
		}
		printLine(text, results, b.wide)
	}
	err = b.flags.Run(cmd, nil, func(ctx context.Context, r backend.Rank) error {
		return measurement.Run(ctx, r, report)
	})
	return errors.Join(err, t.finish(text, b.flags.Verify))
}
