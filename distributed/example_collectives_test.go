package distributed_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// ranks runs the body of an example on two ranks. A program over machines has the same body in tutti.Run.
func ranks(body func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error) {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		return body(ctx, rt, c)
	})
	if err != nil {
		fmt.Println(err)
	}
}

// Rank 0 hands out the parts of a vector, and collects them again. AllGather collects them everywhere.
func ExampleScatter() {
	ranks(func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error {
		whole, err := runtime.FromSlice(rt, []float32{1, 2, 3, 4})
		if err != nil {
			return err
		}
		defer whole.Free()
		part, err := runtime.FromSlice(rt, make([]float32, 2))
		if err != nil {
			return err
		}
		defer part.Free()
		if err := distributed.Scatter(ctx, c, part, whole, 0); err != nil {
			return err
		}
		if err := part.Fill(float64(10 * (c.Rank() + 1))); err != nil {
			return err
		}
		if err := distributed.Gather(ctx, c, whole, part, 0); err != nil {
			return err
		}
		if err := distributed.AllGather(ctx, c, whole, part); err != nil {
			return err
		}
		if c.Rank() == 1 {
			values, err := runtime.ToSlice[float32](whole)
			fmt.Println(values, err)
		}
		return nil
	})
	// Output: [10 10 20 20] <nil>
}

// Each rank needs a part of the sum of all gradients only, as an optimizer does whose state is sharded.
// Reduce leaves the whole sum on one rank, which may broadcast what it makes of it.
func ExampleReduceScatter() {
	ranks(func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error {
		gradient, err := runtime.FromSlice(rt, []float32{1, 2, 3, 4})
		if err != nil {
			return err
		}
		defer gradient.Free()
		part, err := runtime.FromSlice(rt, make([]float32, 2))
		if err != nil {
			return err
		}
		defer part.Free()
		if err := distributed.ReduceScatter(ctx, c, part, gradient, comm.Sum); err != nil {
			return err
		}
		if err := distributed.Reduce(ctx, c, gradient, comm.Max, 0); err != nil {
			return err
		}
		if err := distributed.Broadcast(ctx, c, gradient, 0); err != nil {
			return err
		}
		if c.Rank() == 1 {
			sums, err := runtime.ToSlice[float32](part)
			if err != nil {
				return err
			}
			largest, err := runtime.ToSlice[float32](gradient)
			fmt.Println("rank 1 has", sums, "of the sum; the maximum is", largest, err)
		}
		return nil
	})
	// Output: rank 1 has [6 8] of the sum; the maximum is [1 2 3 4] <nil>
}

// Tokens go to the ranks of their experts. Equal numbers need no counts; otherwise the ranks tell each other theirs.
func ExampleAllToAllV() {
	ranks(func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error {
		counts := [][]int32{{1, 2}, {0, 1}}[c.Rank()] // how many tokens go to either rank
		tokens := [][]int32{{1, 2, 3}, {4}}[c.Rank()] // sorted by rank
		send, err := runtime.FromSlice(rt, counts)
		if err != nil {
			return err
		}
		defer send.Free()
		recv, err := runtime.FromSlice(rt, make([]int32, len(counts)))
		if err != nil {
			return err
		}
		defer recv.Free()
		if err := distributed.AllToAll(ctx, c, recv, send); err != nil {
			return err
		}
		expected, err := runtime.ToSlice[int32](recv)
		if err != nil {
			return err
		}
		src, err := runtime.FromSlice(rt, tokens)
		if err != nil {
			return err
		}
		defer src.Free()
		dst, err := runtime.FromSlice(rt, make([]int32, expected[0]+expected[1]))
		if err != nil {
			return err
		}
		defer dst.Free()
		recvCounts := []int{int(expected[0]), int(expected[1])}
		sendCounts := []int{int(counts[0]), int(counts[1])}
		if err := distributed.AllToAllV(ctx, c, dst, recvCounts, src, sendCounts); err != nil {
			return err
		}
		if c.Rank() == 1 {
			values, err := runtime.ToSlice[int32](dst)
			fmt.Println("rank 1 has tokens", values, err)
		}
		return nil
	})
	// Output: rank 1 has tokens [2 3 4] <nil>
}

// Ranks with different numbers of results collect all of them.
func ExampleAllGatherV() {
	ranks(func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error {
		results, err := runtime.FromSlice(rt, [][]float64{{0.5}, {0.25, 0.75}}[c.Rank()])
		if err != nil {
			return err
		}
		defer results.Free()
		all, err := runtime.FromSlice(rt, make([]float64, 3))
		if err != nil {
			return err
		}
		defer all.Free()
		if err := distributed.AllGatherV(ctx, c, all, results, []int{1, 2}); err != nil {
			return err
		}
		if c.Rank() == 0 {
			values, err := runtime.ToSlice[float64](all)
			fmt.Println(values, err)
		}
		return nil
	})
	// Output: [0.5 0.25 0.75] <nil>
}

// A pipeline passes activations on: rank 0 sends, rank 1 receives. Where both send and receive, SendRecv cannot
// deadlock.
func ExampleSend() {
	ranks(func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error {
		activations, err := runtime.FromSlice(rt, []float32{float32(c.Rank()), 0.5})
		if err != nil {
			return err
		}
		defer activations.Free()
		const tag = 7
		if c.Rank() == 0 {
			err = distributed.Send(ctx, c, activations, 1, tag)
		} else {
			err = distributed.Recv(ctx, c, activations, 0, tag)
		}
		if err != nil {
			return err
		}
		received, err := runtime.FromSlice(rt, make([]float32, 2))
		if err != nil {
			return err
		}
		defer received.Free()
		peer := 1 - c.Rank()
		if err := distributed.SendRecv(ctx, c, received, peer, activations, peer, tag); err != nil {
			return err
		}
		if c.Rank() == 0 {
			values, err := runtime.ToSlice[float32](received)
			fmt.Println("back at rank 0:", values, err)
		}
		return nil
	})
	// Output: back at rank 0: [0 0.5] <nil>
}

// Rank 0 hands each rank its settings, and every rank learns who the others are. The texts may have any lengths.
func ExampleScatterBytes() {
	ranks(func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error {
		var parts [][]byte
		if c.Rank() == 0 {
			parts = [][]byte{[]byte("train"), []byte("evaluate")}
		}
		role, err := distributed.ScatterBytes(ctx, rt, c, parts, 0)
		if err != nil {
			return err
		}
		roles, err := distributed.AllGatherBytes(ctx, rt, c, role)
		if err != nil {
			return err
		}
		if c.Rank() == 1 {
			fmt.Printf("%s, one of %s\n", role, roles)
		}
		return nil
	})
	// Output: evaluate, one of [train evaluate]
}
