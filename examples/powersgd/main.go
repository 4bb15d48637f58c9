// Command powersgd trains with a compression of gradients that the library lacks. PowerSGD averages two thin factors
// instead of each matrix (Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
// Distributed Optimization", NeurIPS 2019, https://arxiv.org/abs/1905.13727).
//
//	go run ./examples/powersgd
//	tutti cluster --rate 10mbit -- ./powersgd -json | tutti plot - --x seconds
//
// reducer.go is the part to copy: a [ddp.Reducer] in host memory. On a GPU it would need kernels for the products of
// matrices and the orthogonalization.
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

// train compares trainings whose gradients have factors of different rank; 0 means no compression.
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

// printCurve prints one line of JSON per point.
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
