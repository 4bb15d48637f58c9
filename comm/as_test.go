package comm_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/comm/noop"
)

// streamed is a communicator with a stream.
type streamed struct {
	comm.Communicator
	comm.StreamSyncOps
}

func TestAsLooksThroughDecorators(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	inner := &streamed{Communicator: noop.New(rt)}
	k, err := checked.New(t.Context(), inner, rt, 0)
	require.NoError(t, err)
	defer func() { assert.NoError(t, k.Close()) }()
	outer := metered.New(k)

	s, ok := comm.As[comm.StreamSyncOps](outer)
	require.True(t, ok)
	assert.Same(t, inner, s)
	found, ok := comm.As[*checked.Communicator](outer)
	require.True(t, ok)
	assert.Same(t, k, found)
	m, ok := comm.As[*metered.Communicator](outer)
	require.True(t, ok)
	assert.Same(t, outer, m)
}

func TestAsFindsNothing(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	_, ok := comm.As[comm.StreamSyncOps](metered.New(noop.New(rt)))
	assert.False(t, ok)
	_, ok = comm.As[comm.StreamSyncOps](nil)
	assert.False(t, ok)
}

// unordered is a communicator that adds in its own order.
type unordered struct{ comm.Communicator }

func (unordered) FixedOrder() bool { return false }

// A communicator keeps the order contract unless it says otherwise, behind decorators too.
func TestFixedOrder(t *testing.T) {
	c := noop.New(hosttest.NewRuntime(t))
	assert.True(t, comm.FixedOrder(metered.New(c)))
	assert.False(t, comm.FixedOrder(metered.New(unordered{c})))
}
