// Command relay sums over ranks that cannot reach each other. All ranks connect to a relay, which joins their
// connections. Their data stays encrypted on the relay: TLS and the job's secret are end to end.
//
//	relay -serve :9000                  # on a host that all reach
//	export RANK=0 WORLD_SIZE=2 MASTER_ADDR=rank0 MASTER_PORT=29500 TUTTI_SECRET=…
//	relay -relay host:9000 -name rank0  # and elsewhere RANK=1, -name rank1
package main

import (
	"context"
	"flag"
	"fmt"
	"log"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
)

func main() {
	listen := flag.String("serve", "", "be the relay, at this address")
	relay := flag.String("relay", "", "the address of the relay")
	name := flag.String("name", "", "the name of this rank at the relay")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	var err error
	if *listen != "" {
		err = serve(*listen)
	} else {
		err = tutti.Config{Network: network{*relay, *name}}.Run(context.Background(), sum)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// sum adds the ranks' numbers.
func sum(ctx context.Context, r tutti.Rank) error {
	tensor, err := runtime.FromSlice(r.Runtime, []float32{1, float32(r.Comm.Rank())})
	if err != nil {
		return err
	}
	defer tensor.Free()
	if err := distributed.AllReduce(ctx, r.Comm, tensor, comm.Sum); err != nil {
		return err
	}
	values, err := runtime.ToSlice[float32](tensor)
	fmt.Printf("rank %d of %d: %v\n", r.Comm.Rank(), r.Comm.WorldSize(), values)
	return err
}
