// Command overlap hides communication behind compute. Each GPU of this machine
// computes the gradients of some layers and adds each to those of the other GPUs:
// first one after the other, then with the compute stream going on while the
// communicator's stream reduces. The communicator puts the two streams in order;
// the host never waits. It prints how long both take, and each half alone.
//
// reducer.go is the part to copy: how the two streams are ordered. worker.go
// gives it something to hide communication behind, a kernel of its own (gradient.cu).
//
// The laboratory (lab/) measures a whole training step this way.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func main() {
	if err := missing(); err != nil {
		fmt.Fprintln(os.Stderr, "this example needs two NVIDIA GPUs and NCCL:", err)
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
	// Few thread blocks reduce fast enough beside compute, and leave it the rest
	// of the GPU.
	world, err := nccl.InProcess(ctx, runtimes, nccl.WithCTAs(4, 4))
	if err != nil {
		return err
	}
	comms := make([]comm.Communicator, n)
	for i, c := range world {
		comms[i] = c
	}
	measured := make([]times, n)
	err = comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) (err error) {
		measured[c.Rank()], err = demonstrate(ctx, world[c.Rank()])
		return err
	})
	if err != nil {
		return err
	}
	report(n, measured[0])
	return nil
}

// report prints what was measured on rank 0.
func report(ranks int, t times) {
	fmt.Printf("%d GPUs, %d gradients of %d×%d in float32\n", ranks, layers, width, width)
	for way, name := range wayNames {
		fmt.Printf("%-20s %7.2f ms\n", name, t[way].Seconds()*1e3)
	}
	hidden := t[sequential] - t[overlapped]
	fmt.Printf("%.0f %% of the communication are hidden\n", 100*hidden.Seconds()/t[reduceOnly].Seconds())
}
