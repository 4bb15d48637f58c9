package distributed_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// grow uses enough stack that Go moves it.
func grow(depth int) byte {
	var pad [1 << 10]byte
	pad[depth%len(pad)] = 1
	if depth == 0 {
		return pad[0]
	}
	return grow(depth-1) + pad[depth%len(pad)]
}

// A slice that the compiler would put on the stack of a rank is reduced where it
// is, however the stack moves before and after.
func TestAllReduceOfSliceOnTheStack(t *testing.T) {
	err := local.Run(context.Background(), 4, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		data := make([]float32, 4)
		for i := range data {
			data[i] = float32(i + 1)
		}
		x, err := cpu.Wrap(rt, data)
		if err != nil {
			return err
		}
		grow(100)
		if err := distributed.AllReduce(ctx, c, x, comm.Sum); err != nil {
			return err
		}
		grow(1000)
		for i, got := range data {
			assert.Equal(t, float32(4*(i+1)), got, "rank %d, element %d", c.Rank(), i)
		}
		if err := x.Free(); err != nil {
			return err
		}
		return rt.Close()
	})
	require.NoError(t, err)
}
