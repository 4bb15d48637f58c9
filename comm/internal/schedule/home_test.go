package schedule

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/poll"
)

// TestWaitsHaveAHome: a wait has the home of its rank from its first pause on, also after something has moved.
func TestWaitsHaveAHome(t *testing.T) {
	e := New(Config{Check: backend.Check{WorldSize: 1}, MaxTag: 1 << 20})
	home := poll.NewHome(0, 1)
	e.SetHome(home)
	var w watch
	idle, err := e.drain(&w, comm.OpAllReduce)
	require.NoError(t, err)
	require.True(t, idle)
	assert.Same(t, home, w.pace.Home)
	w.goOn()
	assert.Same(t, home, w.pace.Home)
}
