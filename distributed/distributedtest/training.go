package distributedtest

import (
	"bytes"
	"errors"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// testMany reduces and broadcasts tensors of several types together, and moves bytes
// and metrics.
func testMany(r *rank) error {
	var tensors []*runtime.Tensor
	for i, dt := range []dtype.DType{dtype.F32, dtype.I32, dtype.BF16, dtype.F32, dtype.U8} {
		t, err := r.tensor(dt, make([]float32, []int{1, 0, 1000, 30, 7}[i]))
		if err != nil {
			return err
		}
		tensors = append(tensors, t)
	}
	fill := func() error {
		for i, t := range tensors {
			if err := t.Fill(float64(i + r.rank)); err != nil {
				return err
			}
		}
		return nil
	}
	same := func(what string, want func(i int) int) error {
		if err := r.c.Sync(r.ctx); err != nil {
			return err
		}
		for i, t := range tensors {
			values, err := r.read(t)
			if err != nil {
				return err
			}
			for j, x := range values {
				if x != float32(want(i)) {
					return fmt.Errorf("%s: tensor %d has %v at %d, want %d", what, i, x, j, want(i))
				}
			}
		}
		return nil
	}
	err := errors.Join(fill(), distributed.AllReduceAll(r.ctx, r.c, tensors, comm.Sum))
	if err == nil {
		err = same("allreduce", func(i int) int { return r.size*i + r.size*(r.size-1)/2 })
	}
	if err != nil {
		return err
	}
	text := func(rank int) []byte { return bytes.Repeat([]byte{byte(rank)}, rank*100%301) }
	for root := range r.size {
		err := errors.Join(fill(), distributed.BroadcastAll(r.ctx, r.c, tensors, root))
		if err == nil {
			err = same("broadcast", func(i int) int { return i + root })
		}
		if err != nil {
			return err
		}
		one, err := distributed.BroadcastBytes(r.ctx, r.rt, r.c, text(r.rank), root)
		if err != nil || !bytes.Equal(one, text(root)) {
			return fmt.Errorf("broadcast of %d bytes from %d: %d bytes, %w", len(text(root)), root, len(one), err)
		}
		all, err := distributed.GatherBytes(r.ctx, r.rt, r.c, text(r.rank), root)
		if r.rank != root && err == nil && all == nil {
			all, err = distributed.AllGatherBytes(r.ctx, r.rt, r.c, text(r.rank))
		} else if err == nil {
			_, err = distributed.AllGatherBytes(r.ctx, r.rt, r.c, text(r.rank))
		}
		if err != nil || len(all) != r.size {
			return fmt.Errorf("gathered bytes of %d ranks: %w", len(all), err)
		}
		for rank, b := range all {
			if !bytes.Equal(b, text(rank)) {
				return fmt.Errorf("gathered %d bytes of rank %d, want %d", len(b), rank, len(text(rank)))
			}
		}
	}
	average, err := distributed.AverageMetrics(r.ctx, r.rt, r.c, float64(r.rank), 1, float64(r.rank))
	if err == nil && r.size > 1 && (average[0] != 1 || math.Abs(average[1]-float64(2*r.size-1)/3) > 1e-12) {
		err = fmt.Errorf("averages %v", average)
	}
	return err
}

// testTraining has ranks with fewer and fewer batches, each of three passes.
func testTraining(r *rank) error {
	for _, cfg := range []ddp.Config{
		{},
		{Rebuild: true, BucketBytes: 5000, FirstBucketBytes: 100},
		{Wire: dtype.BF16},
		{Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}},
	} {
		cfg.Uneven = true
		if err := r.unevenEpochs(cfg); err != nil {
			return fmt.Errorf("%+v: %w", cfg, err)
		}
	}
	return nil
}

func (r *rank) unevenEpochs(cfg ddp.Config) error {
	var gradients []*runtime.Tensor
	for _, n := range []int{1, 3000, 40, 0} {
		t, err := r.tensor(dtype.F32, make([]float32, n))
		if err != nil {
			return err
		}
		gradients = append(gradients, t)
	}
	g, err := ddp.New(r.ctx, r.rt, r.c, gradients, cfg)
	if err != nil {
		return err
	}
	updates := 0
	update := func() error { // in step s, the ranks before size-s have three times s+1
		step := updates % r.size
		updates++
		if err := r.c.Sync(r.ctx); err != nil {
			return err
		}
		want := float64((r.size - step) * 3 * (step + 1))
		for i := range gradients {
			values, err := r.read(g.Result(i))
			if err != nil {
				return err
			}
			for j, x := range values {
				if math.Abs(float64(x)*float64(r.size)-want) > want/100 {
					return fmt.Errorf("update %d: gradient %d has %v at %d, want %v", updates, i, x, j, want/float64(r.size))
				}
			}
		}
		return nil
	}
	const epochs = 2
	for range epochs {
		for step := range r.size - r.rank {
			for pass := range 3 {
				for i, t := range gradients {
					if err := t.Fill(float64(step + 1)); err != nil {
						return err
					}
					if pass == 2 {
						continue
					}
					if err := g.Accumulate(i, t); err != nil {
						return err
					}
				}
			}
			if err := g.ReduceAll(r.ctx, gradients); err != nil {
				return err
			}
			if err := update(); err != nil {
				return err
			}
		}
		if err := g.Join(r.ctx, gradients, update); err != nil {
			return err
		}
	}
	if updates != epochs*r.size {
		return fmt.Errorf("%d updates, want %d", updates, epochs*r.size)
	}
	return errors.Join(g.Close(), r.free())
}
