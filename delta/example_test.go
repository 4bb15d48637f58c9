package delta_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// weights returns a tensor of four bytes.
func weights(values ...byte) []delta.Tensor {
	return []delta.Tensor{{Name: "weights", DType: dtype.U8, Shape: []int{len(values)}, Memory: delta.Host(values)}}
}

// A trainer publishes versions of its weights, and a server keeps up with them.
func ExamplePublisher() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		if c.Rank() == 0 {
			trained, err := runtime.FromSlice(rt, []float32{1, 2, 3, 4})
			if err != nil {
				return err
			}
			defer trained.Free()
			tensor, err := delta.Of("weights", trained)
			if err != nil {
				return err
			}
			publisher := delta.NewPublisher(rt, c)
			defer publisher.Close()
			return publisher.Publish(ctx, 1, []delta.Tensor{tensor})
		}
		subscriber, err := delta.NewSubscriber(ctx, rt, c, delta.Config{})
		if err != nil {
			return err
		}
		defer subscriber.Close()
		if _, err := subscriber.Update(ctx); err != nil {
			return err
		}
		return subscriber.View(func(version uint64, tensors []delta.Tensor) error {
			n, err := tensors[0].Elements()
			if err != nil {
				return err
			}
			values, err := runtime.ToSlice[float32](tensors[0].Runtime())
			fmt.Println("version", version, "has", n, "weights:", values)
			return err
		})
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: version 1 has 4 weights: [1 2 3 4]
}

// Versions go through files, or any connection: what has changed since the version that the reader has. A reader that
// has another version gets a full copy.
func ExamplePublisher_WriteSince() {
	ctx := context.Background()
	rt := cpu.New()
	defer rt.Close()
	publisher := delta.NewPublisher(rt, nil)
	defer publisher.Close()
	subscriber, err := delta.NewSubscriber(ctx, rt, nil, delta.Config{Tensors: weights(1, 2, 3, 4), Version: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer subscriber.Close()
	for version, tensors := range [][]delta.Tensor{weights(1, 2, 3, 4), weights(1, 2, 3, 5), weights(1, 2, 3, 6)} {
		if err := publisher.Commit(ctx, uint64(version+1), tensors); err != nil {
			fmt.Println(err)
		}
	}
	var file bytes.Buffer
	if err := publisher.WriteSince(ctx, &file, 2); err != nil {
		fmt.Println(err)
	}
	_, err = subscriber.Read(ctx, &file)
	var other *delta.VersionError
	if errors.As(err, &other) {
		fmt.Println("have", other.Have, "need", other.Need)
	}
	file.Reset()
	if err := publisher.WriteSince(ctx, &file, other.Have); err != nil {
		fmt.Println(err)
	}
	version, err := subscriber.Read(ctx, &file)
	fmt.Println(version == publisher.Version(), publisher.Stat().Changed, err)
	// Output:
	// have 1 need 2
	// true 1 <nil>
}

// A late subscriber gets the latest version sent again.
func ExamplePublisher_Send() {
	again := func(ctx context.Context, p *delta.Publisher, more comm.Communicator) error {
		p.Rebind(more) // over which the late ones call Subscriber.Update
		return p.Send(ctx)
	}
	_ = again
}

// The changes between two states, with the text that a program keeps with them.
func ExampleDiff() {
	ctx := context.Background()
	before := weights(1, 2, 3, 4)
	d, err := delta.Diff(ctx, before, weights(1, 2, 9, 4), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := d.SetText([]byte("step 10"), []byte("step 20")); err != nil {
		fmt.Println(err)
	}
	var file bytes.Buffer
	if _, err := d.WriteTo(&file); err != nil {
		fmt.Println(err)
	}

	read, err := delta.Read(&file)
	if err != nil {
		fmt.Println(err)
		return
	}
	after := delta.Host(make([]byte, 4))
	err = read.Apply(ctx, before, func(delta.Tensor) (delta.Memory, error) { return after, nil }, nil)
	if err != nil {
		fmt.Println(err)
	}
	text, err := read.Text([]byte("step 10"))
	fmt.Printf("%v, %s, %d changed, %v\n", []byte(after), text, read.Stat().Changed, err)
	// Output: [1 2 9 4], step 20, 1 changed, <nil>
}
