package comm_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
)

// streamed is a communicator with a stream.
type streamed struct {
	comm.Communicator
	comm.StreamSyncOps
}

func TestAsLooksThroughDecorators(t *testing.T) {
	rt := newRuntime(t)
	inner := &streamed{Communicator: noop.New(rt)}
	checked, err := comm.NewChecked(inner, rt)
	require.NoError(t, err)
	defer func() { assert.NoError(t, checked.Close()) }()
	outer := comm.NewMeter(checked)

	s, ok := comm.AsStreamSync(outer)
	require.True(t, ok)
	assert.Same(t, inner, s)
	k, ok := comm.As[*comm.Checked](outer)
	require.True(t, ok)
	assert.Same(t, checked, k)
	m, ok := comm.As[*comm.Meter](outer)
	require.True(t, ok)
	assert.Same(t, outer, m)
}

func TestAsFindsNothing(t *testing.T) {
	rt := newRuntime(t)
	_, ok := comm.AsStreamSync(comm.NewMeter(noop.New(rt)))
	assert.False(t, ok)
	_, ok = comm.AsStreamSync(nil)
	assert.False(t, ok)
}
