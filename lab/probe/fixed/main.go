// Command fixed measures the kernels of sums in fixed point on a GPU beside copies of as many bytes, and reproducible
// steps of one rank over NCCL beside plain ones:
//
//	go run -C lab ./probe/fixed
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

func main() {
	log.SetFlags(0)
	if err := measure(context.Background(), 26_200_000); err != nil {
		log.Fatal(err)
	}
}

// measure measures n elements.
func measure(ctx context.Context, n int) error {
	rt, err := cuda.Open(0)
	if err != nil {
		return err
	}
	defer rt.Close() //nolint:errcheck // the program ends
	kernels, err := kernel.Lookup(rt)
	if err != nil {
		return err
	}
	f := kernel.Fixed{N: n, Bits: 27}
	var tensors []*runtime.Tensor
	for _, dt := range []dtype.DType{dtype.F32, dtype.I32, dtype.F32} {
		t, err := runtime.New(rt, dt, n)
		if err != nil {
			return err
		}
		tensors = append(tensors, t)
	}
	exponents, err := runtime.New(rt, dtype.I8, f.Blocks())
	if err != nil {
		return err
	}
	if err := tensors[0].Fill(1.5); err != nil {
		return err
	}
	x, err := tensors[0].Ptr()
	if err != nil {
		return err
	}
	y, err := tensors[2].Ptr()
	if err != nil {
		return err
	}
	if f.Sums, err = tensors[1].Ptr(); err != nil {
		return err
	}
	if f.Exponents, err = exponents.Ptr(); err != nil {
		return err
	}
	copied := time.Duration(0)
	for _, c := range []struct {
		name  string
		bytes int // read and written, of an element
		call  func() error
	}{
		{"copy", 8, func() error { return rt.Copy(y, x, 4*n) }},
		{"raise", 4, func() error { return kernels.RaiseExponents(f, x, dtype.F32) }},
		{"store", 8, func() error { return kernels.StoreFixed(f, x, dtype.F32, false) }},
		{"add", 12, func() error { return kernels.StoreFixed(f, x, dtype.F32, true) }},
		{"load", 8, func() error { return kernels.LoadFixed(y, dtype.F32, f, 12, 0) }},
	} {
		took, err := median(ctx, rt, c.call)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		if c.name == "copy" {
			copied = took
		}
		fmt.Printf("%-6s %d elements %8.1f µs, %.2f of the bytes' time\n", c.name, n, microseconds(took),
			8*took.Seconds()/copied.Seconds()/float64(c.bytes))
	}
	return steps(ctx, rt, tensors[0])
}

// steps measures steps of one rank, of which each has one contribution.
func steps(ctx context.Context, rt *cuda.Runtime, gradient *runtime.Tensor) error {
	world, err := nccl.InProcess(ctx, []*cuda.Runtime{rt})
	if err != nil {
		return err
	}
	defer world[0].Close() //nolint:errcheck // the program ends
	params := []*runtime.Tensor{gradient}
	for _, contributions := range []int{0, 1, 12} {
		for _, noUndo := range []bool{false, true} {
			cfg := ddp.Config{Reproducible: contributions}
			cfg.NoUndo = noUndo
			g, err := ddp.New(ctx, rt, world[0], params, cfg)
			if err != nil {
				return err
			}
			took, err := median(ctx, rt, func() error { return g.ReduceAll(ctx, params) })
			if err := errors.Join(err, g.Close()); err != nil {
				return err
			}
			fmt.Printf("step of one rank, Reproducible %2d, NoUndo %-5v %8.1f µs\n", contributions, noUndo, microseconds(took))
		}
	}
	return nil
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// median returns the median time of a call, of 20 in a row that the host waits for.
func median(ctx context.Context, rt runtime.Runtime, call func() error) (time.Duration, error) {
	const calls = 20
	var times []time.Duration
	for range 11 {
		started := time.Now()
		for range calls {
			if err := call(); err != nil {
				return 0, err
			}
		}
		if err := rt.Synchronize(ctx); err != nil {
			return 0, err
		}
		times = append(times, time.Since(started)/calls)
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}
