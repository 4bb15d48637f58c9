// Command overlap hides communication behind compute. Each GPU of this machine
// computes the gradients of some layers and adds each to those of the other GPUs:
// first one after the other, then with the compute stream going on while the
// communicator's stream reduces. Events put the two streams in order; the host
// never waits. It prints both times and draws them in overlap.svg.
//
// reducer.go is the part to copy: how events order the two streams, by public
// packages alone. The rest, which uses internal ones, gives it products to hide
// communication behind, and measures.
//
// `tutti bench overlap` measures a whole training step this way.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/internal/cublas"
	"github.com/tutti-go/tutti/internal/overlap"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// A layer's gradient is the product of two matrices of batch rows.
const (
	layers = 16
	width  = 4096
	batch  = 16384
	// ctas is how many multiprocessors the communicator may take away from the
	// products.
	ctas = 4
)

func main() {
	if err := missing(); err != nil {
		fmt.Fprintln(os.Stderr, "this example needs two NVIDIA GPUs, NCCL and cuBLAS:", err)
		return
	}
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

// missing says what this machine lacks.
func missing() error {
	n, err := cuda.Count()
	if err == nil && n < 2 {
		err = fmt.Errorf("GPUs found: %d", n)
	}
	if err == nil {
		_, _, err = nccl.Version()
	}
	if err == nil {
		_, _, err = cublas.Version()
	}
	return err
}

func run() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	n, err := cuda.Count()
	if err != nil {
		return err
	}
	runtimes := make([]*cuda.Runtime, n)
	for i := range runtimes {
		if runtimes[i], err = cuda.Open(i); err != nil {
			return err
		}
		defer runtimes[i].Close()
	}
	world, err := nccl.Local(ctx, runtimes, nccl.WithCTAs(ctas, ctas))
	if err != nil {
		return err
	}
	timelines := make([][]overlap.Timeline, n)
	errs := make([]error, n)
	var ranks sync.WaitGroup
	for i, c := range world {
		ranks.Go(func() {
			if timelines[i], errs[i] = demonstrate(ctx, c); errs[i] != nil {
				cancel() // the others wait for this rank
			}
			errs[i] = errors.Join(errs[i], c.Close())
		})
	}
	ranks.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return report(n, timelines[0])
}

// report prints what happened on rank 0.
func report(ranks int, timelines []overlap.Timeline) error {
	reducing := 0.0 // while nothing ran beside it
	for _, s := range timelines[0].Spans {
		if s.Kind == overlap.AllReduce {
			reducing += s.End - s.Start
		}
	}
	fmt.Printf("%d GPUs, %d gradients of %d×%d in bf16\n", ranks, layers, width, width)
	for _, t := range timelines {
		fmt.Printf("%-20s %7.2f ms\n", t.Name, t.Total/1e3)
	}
	fmt.Printf("%.0f %% of %.2f ms of communication are hidden\n", 100*(timelines[0].Total-timelines[1].Total)/reducing, reducing/1e3)
	file, err := os.Create("overlap.svg")
	if err != nil {
		return err
	}
	fmt.Println("wrote overlap.svg")
	return errors.Join(overlap.WriteSVG(file, timelines), file.Close())
}
