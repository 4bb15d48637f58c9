package tcp_test

import (
	"context"
	"fmt"
	"log"

	"github.com/tutti-go/tutti/comm/tcp"
)

// The communicator of the job that a launcher started: without one, a world of one rank.
func ExampleFromEnv() {
	ctx := context.Background()
	c, err := tcp.FromEnv(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	fmt.Println(c.Rank(), c.WorldSize())
	// Output: 0 1
}
