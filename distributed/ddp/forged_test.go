package ddp

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/state"
)

// wide is a communicator of many ranks, so that a forged number of ranks needs a short list.
type wide struct{ comm.Communicator }

func (wide) WorldSize() int { return 1 << 20 }

// The state of a program's reducer may not be one of more ranks than there are, with checksums that are right: their
// list would fill the memory.
func TestForgedStateOfAReducer(t *testing.T) {
	comms, err := local.New(1)
	require.NoError(t, err)
	for _, size := range []int{engine.MaxRanks + 1, math.MaxInt32, math.MaxInt} {
		e := state.NewEncoder(customKind, 0)
		e.Int(0)
		e.Int(0)
		e.Int(size)
		c := &custom{b: Bucket{Comm: wide{comms[0]}}}
		_, err = c.PrepareRestore(t.Context(), e.Seal())
		assert.ErrorIs(t, err, comm.ErrArgument, "%d ranks", size)
	}
	require.NoError(t, comms[0].Close())
}
