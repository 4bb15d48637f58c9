// Command powersgd trains with a compression of gradients that the library lacks: PowerSGD, which
// averages two thin factors instead of each matrix (Vogels, Karimireddy, Jaggi, "PowerSGD:
// Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
// https://arxiv.org/abs/1905.13727).
//
//	go run ./examples/powersgd
//	tutti cluster --rate 10mbit -- ./powersgd -json | tutti plot - --x seconds
//
// reducer.go is the part to copy: a [ddp.Reducer] in host memory. On a GPU it needs kernels of the
// program's own for the products of matrices and the orthogonalisation.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/examples/digits/softmax"
)

func main() {
	asJSON := flag.Bool("json", false, "print what was measured after each epoch, as tutti plot reads it")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	err := tutti.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		return train(ctx, r, *asJSON)
	})
	if err != nil {
		log.Fatal(err)
	}
}

// train compares trainings whose gradients have factors of some ranks, of which 0 is no compression.
func train(ctx context.Context, r tutti.Rank, asJSON bool) error {
	for _, rank := range []int{0, 4, 1} {
		var cfg ddp.Config
		if rank > 0 {
			cfg.Reducer = func(b ddp.Bucket) (ddp.Reducer, error) { return newPowerSGD(b, rank) }
		}
		result, err := softmax.Train(ctx, r, nil, cfg)
		if err != nil {
			return err
		}
		switch {
		case r.Comm.Rank() != 0: // one rank prints
		case asJSON:
			printCurve(fmt.Sprint("rank ", rank), result.Curve)
		default:
			fmt.Printf("rank %d (0: not compressed): %v\n", rank, result)
		}
	}
	return nil
}

// printCurve prints a line of JSON for each point.
func printCurve(name string, curve []softmax.Point) {
	for _, p := range curve {
		p.Name = name
		line, err := json.Marshal(p)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(string(line))
	}
}
