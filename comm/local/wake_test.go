package local_test

import (
	"errors"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// TestSleeperHelpsWhoDoesNotWait lets rank 0 fall asleep in Sync, on one
// processor, before rank 1 submits its part of something large and then waits
// for rank 0 by other means than Sync.
func TestSleeperHelpsWhoDoesNotWait(t *testing.T) {
	const n = 1 << 20
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for name, calls := range map[string][2]func(c comm.Communicator, buf uintptr) error{
		"collective": {
			func(c comm.Communicator, b uintptr) error { return c.AllReduce(b, b, n, dtype.I32, comm.Sum) },
			func(c comm.Communicator, b uintptr) error { return c.AllReduce(b, b, n, dtype.I32, comm.Sum) },
		},
		"message": {
			func(c comm.Communicator, b uintptr) error { return c.Recv(b, n, dtype.I32, 1, 0) },
			func(c comm.Communicator, b uintptr) error { return c.Send(b, n, dtype.I32, 0, 0) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := within(t)
			_, addr := perRank(newMemory(t), 2, n, rankPlusOne)
			comms := world(t, 2)
			synced := make(chan error, 1)
			go func() { synced <- errors.Join(calls[0](comms[0], addr[0]), comms[0].Sync(ctx)) }()
			for range 1000 {
				runtime.Gosched() // until rank 0 sleeps; if it does not, the test only shows less
			}
			require.NoError(t, calls[1](comms[1], addr[1]))
			require.NoError(t, <-synced)
			require.NoError(t, comms[1].Sync(ctx))
		})
	}
}
