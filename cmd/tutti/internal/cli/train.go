package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/cluster"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
	"github.com/tutti-go/tutti/cmd/tutti/internal/train"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/sparsity"
)

// trainCommand has the flags of the train command.
type trainCommand struct {
	cfg    train.Config   // of the trainings
	world  console.World  // the ranks that train
	dir    console.OutDir // of the pictures
	asJSON bool           // --json
	mix    float64        // --outer-mix
	trace  string         // file of the timeline, "" for none
}

func newTrain() *cobra.Command {
	t := &trainCommand{cfg: train.Default(), world: console.NewWorld()}
	t.cfg.Patterns = sparsity.Patterns()
	cmd := &cobra.Command{
		Use:   "train",
		Short: "Train a small network on real data with each pattern",
		Long: `train trains a multilayer perceptron (64 inputs, one hidden layer, 10 outputs)
on the UCI optical digits, 1,797 real images of 8×8 pixels that are built into
the command. Every rank computes the gradient of its part of each batch, and the
pattern averages the gradients. A table shows test accuracy and bytes sent for
each pattern, and when it reached the --target. Pictures of the
loss against bytes and time, and of the accuracy against time, go to
the --out directory (` + lossPicture + `, ` + timePicture + `, ` + accuracyPicture + `, .png
and .svg). With --backend nccl, GPUs average the gradients and the host does the
rest. With --text, the network predicts each byte of a file from the eight
before it.

With --outer, ranks train alone and average their weights after the given
number of steps, by the same patterns, which sends far fewer bytes in far fewer
rounds. With --hosts as well, the ranks of one host average each gradient.

The same seed gives the same result in every run. Momentum and learning rate are
applied before the exchange, so entries that are sent late include them.`,
		Example: `  tutti train
  tutti train --pattern dense,oktopk --ranks 8 --density 0.05
  tutti train --pattern topkA --no-error-feedback
  mpirun -n 4 tutti train --backend mpi
  tutti train --backend nccl
  tutti train --pattern oktopk --values f32,i8,i2
  tutti cluster --rate 100mbit train --hidden 4096 --target 97
  tutti cluster --rate 100mbit train --hidden 2048 --target 97 --outer 11 \
      --density 0.05 --pattern dense,topkA
  tutti launch -n 4 --min 2 --restarts 9 train --elastic --pattern oktopk
  tutti train --text /usr/local/go/doc/go_spec.html --epochs 1 --batch 256
  tutti train --reproducible 12 --batch 48 --json | jq -r .hash
  tutti train --outer 10 --pattern chunked --values i2 --density 0.05 \
      --beside dense,oktopk
  tutti train --json | jq -r '[.pattern, .accuracy, .ratio_to_dense] | @tsv'`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := t.configure(cmd); err != nil {
				return err
			}
			return t.run(cmd)
		},
	}
	t.register(cmd.Flags())
	return cmd
}

// configure makes the configuration from the flags.
func (t *trainCommand) configure(cmd *cobra.Command) error {
	cfg := &t.cfg
	cfg.Outer.Nesterov = cfg.Outer.Momentum > 0
	if cfg.Reproducible > 0 && !cmd.Flags().Changed("pattern") {
		cfg.Patterns = []string{sparse.Dense}
	}
	if cfg.Outer.Every == 0 {
		err := excluded(cmd, "for an outer loop, which --outer makes",
			"outer-lr", "outer-momentum", "outer-decay", "outer-fragments", "outer-delay", "outer-mix")
		if err != nil {
			return err
		}
	}
	if cfg.Outer.Delay == 0 {
		err := excluded(cmd, "for parts that arrive later, which --outer-delay makes", "outer-mix")
		if err != nil {
			return err
		}
	} else {
		cfg.Outer.Mix = t.mix
		if t.mix == 0 {
			cfg.Outer.Mix = outer.NoMix
		}
	}
	cfg.Backend = t.world.Backend
	cfg.Network = os.Getenv(cluster.NetworkVariable)
	if err := cfg.Validate(); err != nil {
		return console.UsageError{Err: err}
	}
	if !cfg.Elastic {
		return nil
	}
	cfg.Backend = "tcp"
	err := excluded(cmd, "not for --elastic, whose members tutti launch starts", "backend", "ranks", "p2p", "timeout")
	if err != nil {
		return err
	}
	return excluded(cmd, "not for --elastic: set TUTTI_RECORD=1000, and see tutti diagnose --trace", "trace")
}

// run trains and reports.
func (t *trainCommand) run(cmd *cobra.Command) error {
	bars := &console.Bars{
		Out:    cmd.ErrOrStderr(),
		Pieces: len(t.cfg.Runs()),
	}
	r := trainReport{dir: &t.dir, bars: bars}
	r.json, r.text = console.Forms(cmd.OutOrStdout(), t.asJSON)
	if t.cfg.Elastic {
		// The directory is not tidied: another member may be about to write to it.
		err := t.dir.Prepare()
		if err == nil {
			err = train.RunElastic(cmd.Context(), t.cfg, &r)
		}
		bars.Stop()
		return errors.Join(err, r.finish())
	}
	defer t.dir.Tidy()
	var note bytes.Buffer // rank 0's message about the timeline
	err := t.world.Run(cmd, t.dir.Prepare, func(ctx context.Context, rank backend.Rank) error {
		train := func(ctx context.Context, rank backend.Rank) error {
			return train.Run(ctx, rank, t.cfg, &r)
		}
		if t.trace == "" {
			return train(ctx, rank)
		}
		return withTimeline(ctx, rank, &note, t.trace, train)
	})
	bars.Stop()
	err = errors.Join(err, r.finish())
	_, _ = note.WriteTo(r.text)
	return err
}

// register adds the flags.
func (t *trainCommand) register(flags *pflag.FlagSet) {
	t.world.Register(flags)
	patternsFlag(flags, &t.cfg.Patterns)
	valuesFlag(flags, &t.cfg.Values)
	flags.Float64Var(&t.cfg.Density, "density", t.cfg.Density, "part of the gradient that a sparse pattern selects")
	hostsFlag(flags, &t.cfg.Hosts)
	flags.BoolVar(&t.cfg.NoErrorFeedback, "no-error-feedback", false,
		"discard the residual instead of keeping it for the next step")
	flags.IntVar(&t.cfg.WarmupSteps, "warmup-steps", t.cfg.WarmupSteps, "number of dense steps at the beginning")
	flags.IntVar(&t.cfg.Reproducible, "reproducible", 0,
		"`microbatches` of a step, which give the same weights to the last bit for any number of ranks")
	flags.IntVar(&t.cfg.ReproducibleBits, "reproducible-bits", 0,
		"precision of a microbatch's gradient, in `bits`; 0 is as many as their number allows")
	t.registerOuter(flags)
	flags.BoolVar(&t.cfg.Elastic, "elastic", false, "let members come and go, under tutti launch --min")
	flags.DurationVar(&t.cfg.Patience, "patience", t.cfg.Patience,
		"with --elastic: how long a live member may keep the others waiting before they go on without it; 0s means 10m")
	flags.StringVar(&t.cfg.Text, "text", "", "`file` whose bytes the network predicts, instead of the digits")
	flags.BoolVar(&t.cfg.Turned, "turned", false,
		"turn and mirror images at random and add noise, which makes them harder to recognize")
	flags.IntVar(&t.cfg.Epochs, "epochs", t.cfg.Epochs, "how often each training image is seen")
	flags.IntVar(&t.cfg.Batch, "batch", t.cfg.Batch, "images of a step, over all ranks")
	flags.IntVar(&t.cfg.Hidden, "hidden", t.cfg.Hidden, "width of the hidden layer")
	flags.Float64Var(&t.cfg.LearningRate, "lr", t.cfg.LearningRate,
		"highest learning rate: it rises to this in the first epoch and falls along a cosine")
	flags.Float64Var(&t.cfg.Momentum, "momentum", t.cfg.Momentum, "momentum of each rank")
	flags.Float64Var(&t.cfg.Target, "target", t.cfg.Target, "test accuracy in `percent`: say when it was reached")
	flags.Uint64Var(&t.cfg.Seed, "seed", t.cfg.Seed,
		"seed of the data split, the initial weights and the order of the images")
	t.dir.Register(flags)
	timelineFlag(flags, &t.trace)
	flags.BoolVar(&t.asJSON, "json", false, "print one JSON object for each pattern instead of the table")
}

// registerOuter adds the flags of the outer loop.
func (t *trainCommand) registerOuter(flags *pflag.FlagSet) {
	o := &t.cfg.Outer
	flags.IntVar(&o.Every, "outer", o.Every,
		"number of `steps` between averages of the weights, which replace those of gradients")
	flags.Var(namesFlag("pattern", &t.cfg.Beside, sparsity.Patterns(), sparse.Auto), "beside",
		"patterns that average gradients in every step, before those with --outer, for comparison")
	flags.Float64Var(&o.LearningRate, "outer-lr", o.LearningRate,
		"learning rate of the outer optimizer: 0.7 with a momentum")
	flags.Float64Var(&o.Momentum, "outer-momentum", o.Momentum,
		"momentum (Nesterov's) of the outer optimizer: 0.9 with dense averages")
	flags.Float64Var(&o.Decay, "outer-decay", o.Decay, "factor of the residual after a round")
	flags.IntVar(&o.Fragments, "outer-fragments", o.Fragments, "parts of the weights that take turns")
	flags.IntVar(&o.Delay, "outer-delay", o.Delay, "`steps` until a part arrives, which hide its exchange")
	flags.Float64Var(&t.mix, "outer-mix", 0.5,
		"`share` of its weights that a rank keeps when a part arrives after --outer-delay; 0 drops these steps")
	console.Restrict(flags, "outer-lr", "a positive number", func() bool {
		return o.LearningRate > 0 && !math.IsInf(o.LearningRate, 1)
	})
	console.Restrict(flags, "outer-momentum", "in [0, 1)", func() bool {
		return o.Momentum >= 0 && o.Momentum < 1
	})
	console.Restrict(flags, "outer-decay", "in (0, 1]", func() bool {
		return o.Decay > 0 && o.Decay <= 1
	})
	console.Restrict(flags, "outer-fragments", "1 or more", func() bool {
		return o.Fragments >= 1
	})
	console.Restrict(flags, "outer-delay", "0 or more", func() bool { return o.Delay >= 0 })
	console.Restrict(flags, "outer-mix", "in [0, 1)", func() bool {
		return t.mix >= 0 && t.mix < 1
	})
}

// Names of the pictures without extension.
const (
	lossPicture     = "loss-vs-bytes"
	timePicture     = "loss-vs-time"
	accuracyPicture = "accuracy-vs-time"
)

// trainReport collects the results on rank 0 and shows them.
type trainReport struct {
	json, text io.Writer       // one of them is discarded
	dir        *console.OutDir // of the pictures
	bars       *console.Bars   // of the steps
	results    []train.Result  // in the order of the patterns
}

// Step implements [train.Observer].
func (r *trainReport) Step(name string, step, steps int) {
	r.bars.Set(name, step, steps)
}

// Finished implements [train.Observer].
func (r *trainReport) Finished(result train.Result) {
	r.results = append(r.results, result)
	console.WriteJSON(r.json, result)
}

// finish prints the table and draws the completed trainings, even if some are missing. A process without rank 0 has
// nothing to show.
func (r *trainReport) finish() error {
	if len(r.results) == 0 {
		return nil
	}
	r.printTable()
	if r.results[0].Ranks == 1 {
		return nil // nothing is sent
	}
	return errors.Join(
		r.dir.Draw(r.text, lossPicture, func(path string) error {
			return picture.LossAgainstBytes(r.results, path)
		}),
		r.dir.Draw(r.text, timePicture, func(path string) error {
			return picture.LossAgainstTime(r.results, path)
		}),
		r.dir.Draw(r.text, accuracyPicture, func(path string) error {
			return picture.AccuracyAgainstTime(r.results, "Test accuracy against time: "+r.world(), path)
		}))
}

// world describes the ranks, such as "4 ranks on 4 hosts, 1gbit".
func (r *trainReport) world() string {
	first := r.results[0]
	if first.Network == "" {
		return ranksOn(first.Ranks, first.Hosts)
	}
	text := backend.Counted(first.Ranks, "rank") + " on " + first.Network
	if first.Hosts > 0 {
		text += ", dense within hosts"
	}
	return text
}

func (r *trainReport) printTable() {
	t := console.NewTable()
	target := r.results[0].Target
	header := table.Row{
		"pattern", "test\nacc.\n(%)", "test\nloss", "sent\n\n(B)", "of\ndense\n(%)",
		"comm.\n\n(s)", "total\n\n(s)",
	}
	if target > 0 {
		header = append(header, fmt.Sprintf("to %g %%\n\n(s, steps)", target))
	}
	t.AppendHeader(header)
	for _, result := range r.results {
		row := table.Row{
			result.Name(),
			fmt.Sprintf("%.2f", result.Accuracy),
			fmt.Sprintf("%.4f", result.Loss),
			fmt.Sprintf("%.0f", result.SentBytes),
			fmt.Sprintf("%.2f", 100*result.RatioToDense),
			fmt.Sprintf("%.2f", result.CommSeconds),
			fmt.Sprintf("%.2f", result.TotalSeconds),
		}
		switch {
		case result.TargetSeconds != nil:
			row = append(row, fmt.Sprintf("%.2f, %d", *result.TargetSeconds, *result.TargetStep))
		case target > 0:
			row = append(row, "never")
		}
		t.AppendRow(row)
	}
	console.PrintTable(r.text, t, console.AlignRight(2, len(header)), 1)
	fmt.Fprintf(r.text, "%s; bytes are a rank's in a step, on average\n", r.world())
}
