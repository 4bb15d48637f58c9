package tcp

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// Run connects this process's rank as [Config.FromEnv] does, runs body for it as [comm.Run] does, and closes
// the communicator. An error of body ends the waits of the other ranks with [comm.ErrPeerFailed].
func (c Config) Run(ctx context.Context, body func(ctx context.Context, c comm.Communicator) error) error {
	world, err := c.FromEnv(ctx)
	if err != nil {
		return err
	}
	return comm.Run(ctx, []comm.Communicator{world}, body)
}
