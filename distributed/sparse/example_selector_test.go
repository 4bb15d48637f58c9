package sparse_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// inTurn selects one entry after the other, whatever they hold.
type inTurn struct{}

// Select implements [sparse.Selector].
func (inTurn) Select(step int, sum, indices, values *runtime.Tensor) error {
	all, err := cpu.Slice[float32](sum)
	if err != nil {
		return err
	}
	numbers, err := cpu.Slice[int32](indices)
	if err != nil {
		return err
	}
	selected, err := cpu.Slice[float32](values)
	if err != nil {
		return err
	}
	for i := range numbers {
		numbers[i] = int32((step + i) % len(all))
		selected[i] = all[numbers[i]]
	}
	return nil
}

// String implements [sparse.Selector].
func (inTurn) String() string { return "in turn" }

// A program selects the entries itself. Other entries stay in the residual. After a step that a vote refused, the
// reduction goes on over another communicator.
func ExampleSelector() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		s, err := sparse.New(rt, c, 4, sparse.Config{
			Pattern:   sparse.TopkA,
			Density:   0.25,
			Selector:  inTurn{},
			NonFinite: sparse.FailNonFinite, // a NonFinitePolicy: an error instead of a skipped step
			Schedule:  sparse.Schedule{},    // the same density in all steps
		})
		if err != nil {
			return err
		}
		defer s.Close()
		gradient, err := runtime.FromSlice(rt, []float32{1, 2, 3, 4})
		if err != nil {
			return err
		}
		defer gradient.Free()
		errRefused := errors.New("refused")
		s.BeforeCommit(func(context.Context) error { return errRefused })
		if err := s.AllReduce(ctx, gradient); !errors.Is(err, errRefused) {
			return fmt.Errorf("the step is not refused: %w", err)
		}

		again, err := c.Split(ctx, 0, c.Rank())
		if err != nil {
			return err
		}
		defer again.Close()
		if err := s.Rebind(again); err != nil {
			return err
		}
		s.BeforeCommit(nil)
		if err := s.AllReduce(ctx, gradient); err != nil {
			return err
		}
		residual, err := s.Residual()
		if err != nil {
			return err
		}
		kept, err := runtime.ToSlice[float32](residual)
		if err != nil {
			return err
		}
		sent, err := runtime.ToSlice[float32](gradient)
		if err != nil {
			return err
		}
		if c.Rank() == 0 {
			fmt.Println(sent, "sent,", kept, "kept")
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [1 0 0 0] sent, [0 2 3 4] kept
}
