package ddp_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// handOver hands over a gradient, as a backward pass of a program does.
//
//go:noinline
func handOver(ctx context.Context, g *ddp.Gradients, gradient *runtime.Tensor) error {
	return g.Ready(ctx, 0, gradient)
}

// Flight records say where the program has handed over the gradient for which the communication worker makes a call.
func TestCallersOfTheWorker(t *testing.T) {
	for name, cfg := range map[string]ddp.Config{
		"sparse":       {Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}, DenseUpTo: -1},
		"reproducible": {Reproducible: 2},
	} {
		t.Run(name, func(t *testing.T) {
			recorders := make([]*record.Recorder, 2)
			err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
				r := record.New(c, 1000, "")
				recorders[c.Rank()] = r
				rt := cpu.New()
				defer rt.Close() //nolint:errcheck // nothing is lost
				parameters, err := cpu.Wrap(rt, make([]float32, 1000))
				if err != nil {
					return err
				}
				defer parameters.Free() //nolint:errcheck // nothing is lost
				gradient, err := cpu.Wrap(rt, make([]float32, 1000))
				if err != nil {
					return err
				}
				defer gradient.Free() //nolint:errcheck // nothing is lost
				g, err := ddp.New(ctx, rt, r, []*runtime.Tensor{parameters}, cfg)
				if err != nil {
					return err
				}
				defer g.Close() //nolint:errcheck // nothing is lost
				step := func() {
					err = errors.Join(err, handOver(ctx, g, gradient), g.Wait(ctx))
				}
				least := math.Inf(1) // of some runs: others allocate as well
				for range 10 {
					if c.Rank() == 0 {
						least = min(least, testing.AllocsPerRun(5, step))
						continue
					}
					for range 6 { // AllocsPerRun adds one
						step()
					}
				}
				if c.Rank() == 0 {
					assert.Zero(t, least, "allocations")
				}
				return err
			})
			require.NoError(t, err)
			calls := 0
			for _, r := range recorders {
				for _, stack := range stacks(t, r) {
					times := strings.Count(stack, "ddp_test.handOver caller_test.go")
					assert.LessOrEqual(t, times, 1, stack)
					if strings.Contains(stack, "newWorker") {
						calls++
						assert.Equal(t, 1, times, stack)
					}
				}
			}
			assert.GreaterOrEqual(t, calls, 4, "one of each rank in each step")
		})
	}
}

// stacks are the stacks of the calls that a rank has made, a line each.
func stacks(t *testing.T, r *record.Recorder) (list []string) {
	var text bytes.Buffer
	require.NoError(t, r.WriteJSON(&text))
	var d struct {
		Entries []struct {
			Frames []struct {
				Name     string `json:"name"`
				Filename string `json:"filename"`
				Line     int    `json:"line"`
			} `json:"frames"`
		} `json:"entries"`
	}
	require.NoError(t, json.Unmarshal(text.Bytes(), &d))
	for _, e := range d.Entries {
		var stack strings.Builder
		for _, f := range e.Frames {
			fmt.Fprintf(&stack, "%s %s:%d; ", f.Name, f.Filename[strings.LastIndex(f.Filename, "/")+1:], f.Line)
		}
		list = append(list, stack.String())
	}
	return list
}
