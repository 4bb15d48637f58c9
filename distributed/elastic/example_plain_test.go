package elastic_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A program with its own reduction votes itself: between the allreduce, which can be made again, and the update,
// which cannot. Here the job has one member, whose store is its own.
func ExamplePlain() {
	ctx := context.Background()
	server := store.NewServer(store.Options{})
	defer server.Close()
	rt := cpu.New()
	defer rt.Close()
	weights, err := runtime.FromSlice(rt, []float32{4})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer weights.Free()
	gradient, err := runtime.FromSlice(rt, []float32{1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer gradient.Free()

	m, err := elastic.Join(ctx, elastic.Config{
		Name: "a",
		Min:  1,
		Dial: func(context.Context) (store.Store, error) { return server.Local("a"), nil },
		Form: func(context.Context, store.Store, elastic.Place) (comm.Communicator, error) {
			return noop.New(rt), nil // of several members, tcp.New
		},
		Runtime: rt,
		Tensors: []*runtime.Tensor{weights},
	}, elastic.Plain{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer m.Close()
	step := func(e *elastic.Epoch) error {
		if err := distributed.AllReduce(ctx, e.Comm, gradient, comm.Avg); err != nil {
			return err
		}
		if err := m.Commit(ctx); err != nil {
			return err // the weights are as before
		}
		fmt.Println("step", m.Steps(), "of", e.Members) // and the update
		return nil
	}
	var failed error // of the last step
	for m.Steps() < 2 {
		e, err := m.Next(ctx, failed)
		if err != nil {
			fmt.Println(err)
			return
		}
		failed = step(e)
	}
	// Output:
	// step 1 of [a]
	// step 2 of [a]
}

// A launcher asks whether the others have made the last step before it starts a member again.
func ExampleEnded() {
	ctx := context.Background()
	client := store.NewServer(store.Options{}).Owner("launcher")
	defer client.Close()
	fmt.Println(elastic.Ended(ctx, client))
	// Output: false <nil>
}
