package wire

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Four ranks average a vector.
func Example() {
	rt := cpu.New()
	defer rt.Close()
	err := comm.Run(context.Background(), world(4, rt, net.Pipe), func(ctx context.Context, c comm.Communicator) error {
		gradient := []float32{1, 2, float32(c.Rank())}
		tensor, err := cpu.Wrap(rt, gradient)
		if err == nil {
			defer tensor.Free()
			err = distributed.AllReduce(ctx, c, tensor, comm.Avg)
		}
		fmt.Println("rank", c.Rank(), "has", gradient)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Unordered output:
	// rank 0 has [1 2 1.5]
	// rank 1 has [1 2 1.5]
	// rank 2 has [1 2 1.5]
	// rank 3 has [1 2 1.5]
}

// loopback connects two ends over TCP.
func loopback() (net.Conn, net.Conn) {
	listener, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		panic(err)
	}
	defer listener.Close()
	a, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		panic(err)
	}
	b, err := listener.Accept()
	if err != nil {
		panic(err)
	}
	return a, b
}

func TestConformance(t *testing.T) {
	conformance(t, net.Pipe, world, 0, sizes([]int{1, 2}, 3)...)
}

func TestConformanceTCP(t *testing.T) {
	conformance(t, loopback, decorated, 1000, sizes([]int{2}, 3)...) // the long run was over pipes
}

// sizes are those of the ordinary run, and one more with TUTTI_EXTENDED set. Three ranks over pipes are also what the
// tests of the suite itself begin with.
func sizes(ordinary []int, extended int) []int {
	if os.Getenv("TUTTI_EXTENDED") != "" {
		return append(ordinary, extended)
	}
	return ordinary
}

// foreign is a communicator that does not embed comm.Methods: it has only the methods of the contract.
type foreign struct{ comm.Wrapped }

// decorated is a world of foreign communicators in decorators, which forward calls as values.
func decorated(size int, rt *cpu.Runtime, connect func() (net.Conn, net.Conn)) []comm.Communicator {
	comms := world(size, rt, connect)
	for rank, c := range comms {
		comms[rank] = metered.New(foreign{comm.Wrap(c)})
	}
	return comms
}

func conformance(
	t *testing.T, connect func() (net.Conn, net.Conn),
	world func(size int, rt *cpu.Runtime, connect func() (net.Conn, net.Conn)) []comm.Communicator,
	calls int, sizes ...int,
) {
	rt := cpu.New()
	defer func() {
		if err := rt.Close(); err != nil {
			t.Error(err)
		}
	}()
	commtest.Run(t, commtest.Backend{
		Name:  "wire",
		Sizes: sizes,
		Calls: calls,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return comm.Run(ctx, world(size, rt, connect), func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
			})
		},
	})
}
