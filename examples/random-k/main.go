// Command random-k trains with a compression of gradients that the library lacks: of each bucket, a
// random tenth of the entries is averaged, the same ones on all ranks, and the others wait in a residual.
//
//	go run ./examples/random-k
//
// reducer.go is the part to copy: a [ddp.Reducer]. Overlap, accumulation, Join, clipping, the rollback
// of steps, checkpoints and lost ranks come with it; main_test.go tests them.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/examples/digits/softmax"
)

func main() {
	for _, density := range []float64{1, 0.1} {
		result, err := softmax.Train(context.Background(), ddp.Config{Reducer: func(b ddp.Bucket) (ddp.Reducer, error) {
			return newRandomK(b, density)
		}})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%3.0f %% of the entries: %v\n", 100*density, result)
	}
}
