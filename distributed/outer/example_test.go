package outer_test

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Hosts of eight ranks: gradients are averaged within a host, parameters between hosts.
func ExampleNew_hosts() {
	train := func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime, parameters []*runtime.Tensor, cfg outer.Config) error {
		arrange := func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
			return distributed.NewMesh(ctx, c, distributed.Dim{Name: "host", Size: -1}, distributed.Dim{Name: "gpu", Size: 8})
		}
		mesh, err := arrange(ctx, c)
		if err != nil {
			return err
		}
		defer mesh.Close()
		host, err := mesh.Comm("gpu")
		if err != nil {
			return err
		}
		sync, err := ddp.New(ctx, rt, host, parameters, ddp.Config{}) // in each step, before the optimizer
		if err != nil {
			return err
		}
		defer sync.Close()
		cfg.Reduce.Mesh = arrange
		loop, err := outer.New(ctx, rt, c, parameters, cfg) // after it
		if err != nil {
			return err
		}
		return loop.Close()
	}
	_ = train // a job of several hosts calls it on each rank
}
