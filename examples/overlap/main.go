// Command overlap hides communication behind compute. Each GPU of this machine computes the gradients of some layers
// and adds each to those of the other GPUs: first one after the other, then with the compute stream going on while the
// communicator's stream reduces. The communicator puts the two streams in order; the host never waits. It prints how
// long both take, and each half alone, and draws them.
//
// reducer.go is the part to copy: how the two streams are ordered. worker.go gives it something to hide communication
// behind, its own kernel (gradient.cu). The laboratory (lab/) measures a whole training step this way.
//
// It runs its ranks by nccl.Run instead of tutti.Run: its communicators have few thread blocks, which is an option of
// NCCL's communicators alone, and are handed to code that needs NCCL's streams and symmetric memory.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func main() {
	path := flag.String("out", "overlap.svg", "file for the picture")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	gpus, err := cuda.Count()
	if err != nil || gpus == 0 {
		fmt.Fprintln(os.Stderr, "this example needs NVIDIA GPUs:", cmp.Or(err, errors.New("the driver shows none")))
		return
	}
	steps, err := run(gpus)
	if err != nil {
		log.Fatal(err)
	}
	if steps == nil {
		return // rank 0 is another process of a job
	}
	fmt.Printf("GPUs: %d; %d gradients of %d×%d in float32\n", gpus, layers, width, width)
	for _, s := range steps {
		fmt.Printf("%-20s %7.2f ms\n", s.way, milliseconds(s.total))
	}
	fmt.Println(outcome(gpus, steps))
	err = atomicfile.Write(*path, func(w io.Writer) error {
		return draw(w, outcome(gpus, steps), steps[sequential:])
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("wrote", *path)
}

// run returns the steps of rank 0, one for each way.
func run(gpus int) ([]step, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var steps []step
	err := nccl.Run(ctx, gpus, func(ctx context.Context, c *nccl.Comm) error {
		measured, err := demonstrate(ctx, c)
		if c.Rank() == 0 {
			steps = measured
		}
		return err
	}, nccl.WithCTAs(4, 4)) // few thread blocks reduce fast enough beside compute, and leave it the rest of the GPU
	return steps, err
}

// outcome says which share of the communication is hidden: what an overlapped step does not take longer than computing
// alone, as a share of communicating alone.
func outcome(gpus int, steps []step) string {
	if gpus == 1 {
		return "one GPU has nothing to communicate"
	}
	alone := steps[reduceOnly].total
	hidden := steps[computeOnly].total + alone - steps[overlapped].total
	return fmt.Sprintf("%.0f %% of the communication is hidden", 100*hidden.Seconds()/alone.Seconds())
}

func milliseconds(d time.Duration) float64 { return d.Seconds() * 1e3 }
