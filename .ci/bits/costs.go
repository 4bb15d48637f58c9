package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/runtime"
)

// costing holds the settings of -costs.
type costing struct {
	steps int    // of each kind
	kinds string // names, separated by commas
	bytes string // lengths of gradients in KiB, separated by commas
}

// hosts arranges the ranks as two hosts with half of them each.
func hosts(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
	host := distributed.Dim{Name: "host", Size: 2}
	rank := distributed.Dim{Name: "rank", Size: c.WorldSize() / 2}
	return distributed.NewMesh(ctx, c, host, rank)
}

// costs prints the time of reproducible steps and of other steps with the same options.
func (b *bits) costs(c costing) error {
	kinds := map[string]ddp.Config{
		"plain":  {},
		"NoUndo": {Config: sparse.Config{NoUndo: true}},
		"clip":   {Config: sparse.Config{ClipNorm: 1}},
		"shard":  {Shard: true},
		"mesh":   {Mesh: hosts},
	}
	ranks := b.Comm.WorldSize()
	fmt.Fprintf(b.out, "medians of %d steps in µs: with no, %d and %d contributions\n", c.steps, ranks, contributions)
	for name := range strings.SplitSeq(c.kinds, ",") {
		kind, ok := kinds[name]
		if !ok {
			return fmt.Errorf("there is no kind %q of steps", name)
		}
		if name == "mesh" && ranks%2 != 0 {
			continue
		}
		for length := range strings.SplitSeq(c.bytes, ",") {
			kib, err := strconv.Atoi(length)
			if err != nil {
				return err
			}
			if err := b.cost(name, kind, kib<<10, c.steps); err != nil {
				return fmt.Errorf("%s of %d KiB: %w", name, kib, err)
			}
		}
	}
	return nil
}

// cost alternates steps of one configuration without and with reproducibility.
func (b *bits) cost(name string, cfg ddp.Config, bytes, steps int) (err error) {
	n := bytes / dtype.F32.Size()
	t, err := runtime.New(b.Runtime, dtype.F32, n)
	if err != nil {
		return err
	}
	params := []*runtime.Tensor{t}
	defer t.Free() //nolint:errcheck // the program ends
	var syncs []*ddp.Gradients
	for _, count := range []int{0, b.Comm.WorldSize(), contributions} {
		cfg.Reproducible = count
		g, err := ddp.New(b.ctx, b.Runtime, b.Comm, params, cfg)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, g.Close()) }()
		syncs = append(syncs, g)
	}
	gradient := reference.Tile(b.numbers(b.Comm.Rank(), 3), 0, bytes)
	times := make([][]time.Duration, len(syncs))
	for i := range steps + 1 {
		for j, g := range syncs {
			if err := b.write(t, gradient); err != nil {
				return err
			}
			if err := b.Comm.Barrier(b.ctx); err != nil {
				return err
			}
			started := time.Now()
			if err := g.ReduceAll(b.ctx, params); err != nil {
				return err
			}
			if err := b.Comm.Sync(b.ctx); err != nil {
				return err
			}
			if i > 0 { // the first step allocates and compares
				times[j] = append(times[j], time.Since(started))
			}
		}
	}
	var middle []float64
	for _, all := range times {
		slices.Sort(all)
		middle = append(middle, float64(all[len(all)/2].Nanoseconds())/1000)
	}
	fmt.Fprintf(b.out, "%-7s %6d KiB %8.0f %8.0f %8.0f  ratios %.2f %.2f\n", name, bytes>>10,
		middle[0], middle[1], middle[2], middle[1]/middle[0], middle[2]/middle[0])
	return nil
}
