// Command overlap hides communication behind compute. Each GPU of this machine computes the gradients of some layers
// and adds each to the gradients of the other GPUs. First it does so sequentially, and then the compute stream
// continues while the communicator's stream reduces. The communicator orders the two streams; the host never waits.
// The program prints and draws the time of both ways, and of each half alone.
//
// reducer.go is the part to copy: it orders the two streams. worker.go gives it work to hide communication behind, a
// kernel (gradient.cu). The laboratory (lab/) measures a whole training step this way.
//
// The program runs its ranks by nccl.Run instead of tutti.Run, because its communicators limit their thread blocks,
// an option of NCCL's communicators alone, and their streams and symmetric memory are passed to code that needs NCCL.
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
		return // this is not rank 0's process
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

// run returns rank 0's steps, one for each way.
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
	}, nccl.WithCTAs(4, 4)) // a few thread blocks reduce fast enough beside compute, and leave it the rest of the GPU
	return steps, err
}

// outcome says which fraction of the communication is hidden: the time that overlap saves over compute plus
// communication, divided by the time of communication alone.
func outcome(gpus int, steps []step) string {
	if gpus == 1 {
		return "one GPU has nothing to communicate"
	}
	alone := steps[reduceOnly].total
	hidden := steps[computeOnly].total + alone - steps[overlapped].total
	return fmt.Sprintf("%.0f %% of the communication is hidden", 100*hidden.Seconds()/alone.Seconds())
}

func milliseconds(d time.Duration) float64 { return d.Seconds() * 1e3 }
