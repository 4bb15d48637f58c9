package outer_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Two ranks make two steps each with their own optimizers, then average how far their parameters have moved. All have
// the same parameters after that, as their hashes tell.
func ExampleLoop() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		weights := []float32{1, 1}
		parameters, err := cpu.Wrap(rt, weights)
		if err != nil {
			return err
		}
		defer parameters.Free()
		loop, err := outer.New(ctx, rt, c, []*runtime.Tensor{parameters}, outer.Config{Every: 2})
		if err != nil {
			return err
		}
		defer loop.Close()
		for range 2 {
			weights[c.Rank()] -= 0.5 // the inner optimizer's step
			if err := loop.Step(ctx); err != nil {
				return err
			}
		}
		hash, err := loop.Hash(ctx)
		if err != nil {
			return err
		}
		if c.Rank() == 0 {
			fmt.Println(weights, hash != 0)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [0.5 0.5] true
}

// Ranks agree by their own vote that an exchange counts. After one that was refused the loop goes on over another
// communicator, and the same step is made again.
func ExampleLoop_Rebind() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		weights := []float32{1, 1}
		parameters, err := cpu.Wrap(rt, weights)
		if err != nil {
			return err
		}
		defer parameters.Free()
		loop, err := outer.New(ctx, rt, c, []*runtime.Tensor{parameters}, outer.Config{Every: 1})
		if err != nil {
			return err
		}
		defer loop.Close()
		errRefused := errors.New("refused")
		loop.BeforeCommit(func(context.Context) error { return errRefused })
		weights[c.Rank()] = 0
		if err := loop.Step(ctx); !errors.Is(err, errRefused) {
			return fmt.Errorf("the step is not refused: %w", err)
		}

		again, err := c.Split(ctx, 0, c.Rank())
		if err != nil {
			return err
		}
		defer again.Close()
		if err := loop.Rebind(ctx, again); err != nil {
			return err
		}
		loop.BeforeCommit(nil)
		if err := loop.Step(ctx); err != nil {
			return err
		}
		residuals, err := loop.Residuals() // none where everything is sent
		if err != nil {
			return err
		}
		if c.Rank() == 0 {
			fmt.Println(weights, len(residuals))
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [0.5 0.5] 0
}
