// Command powersgd trains with a compression of gradients that the library lacks: PowerSGD, which
// averages two thin factors instead of each matrix (Vogels, Karimireddy, Jaggi, "PowerSGD:
// Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
// https://arxiv.org/abs/1905.13727).
//
//	go run ./examples/powersgd
//
// reducer.go is the part to copy: a [ddp.Reducer] in host memory. On a GPU it needs kernels of the
// program's own for the products of matrices and the orthogonalisation.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/examples/digits/softmax"
)

func main() {
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	for _, rank := range []int{0, 4, 1} {
		var cfg ddp.Config
		if rank > 0 {
			cfg.Reducer = func(b ddp.Bucket) (ddp.Reducer, error) { return newPowerSGD(b, rank) }
		}
		result, err := softmax.Train(context.Background(), cfg)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("rank %d (0: not compressed): %v\n", rank, result)
	}
}
