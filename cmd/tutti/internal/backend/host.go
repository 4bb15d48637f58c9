package backend

import (
	"context"
	"errors"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// host averages gradients among the ranks of a host, each of which reduces an equal share.
type host struct {
	mesh *distributed.Mesh     // of hosts, and of the ranks within a host
	comm *metered.Communicator // of the ranks of this host

	// The last step's traffic among these ranks.
	sent int64 // bytes
	took time.Duration

	// The gradient with its padding, and views of it.
	padded   *runtime.Tensor
	gradient *runtime.Tensor
	padding  *runtime.Tensor

	share *runtime.Tensor // this rank's, in separate memory: MPI has no reduce-scatter in place
}

// newHost prepares for gradients of n elements. It takes over the mesh unless it returns an error.
func newHost(rt runtime.Runtime, mesh *distributed.Mesh, n int, dt dtype.DType) (*host, error) {
	c, err := mesh.Comm("rank")
	if err != nil {
		return nil, err
	}
	h := &host{mesh: mesh, comm: metered.New(c)}
	ranks := c.WorldSize()
	share := (n + ranks - 1) / ranks
	h.padded, err = runtime.New(rt, dt, share*ranks)
	if err != nil {
		return nil, err
	}
	h.gradient, err = h.padded.Slice(0, 0, n)
	if err == nil {
		h.padding, err = h.padded.Slice(0, n, share*ranks)
	}
	if err == nil {
		h.share, err = runtime.New(rt, dt, share)
	}
	if err != nil {
		return nil, errors.Join(err, h.free())
	}
	return h, nil
}

// allReduce averages a gradient within the host, averages each rank's share between hosts, and gathers the shares.
func (h *host) allReduce(ctx context.Context, t *runtime.Tensor, between *sparse.Reducer) error {
	before := h.comm.Totals().SentBytes
	started := time.Now()
	if err := h.gradient.CopyFrom(t); err != nil {
		return err
	}
	if err := h.padding.Fill(0); err != nil {
		return err
	}
	if err := distributed.ReduceScatter(ctx, h.comm, h.share, h.padded, comm.Avg); err != nil {
		return err
	}
	took := time.Since(started)
	if err := between.AllReduce(ctx, h.share); err != nil {
		return err
	}
	gathering := time.Now()
	if err := distributed.AllGather(ctx, h.comm, h.padded, h.share); err != nil {
		return err
	}
	h.sent = h.comm.Totals().SentBytes - before
	h.took = took + time.Since(gathering)
	return t.CopyFrom(h.gradient)
}

// free frees the memory.
func (h *host) free() error {
	var errs []error
	for _, t := range []*runtime.Tensor{h.gradient, h.padding, h.share, h.padded} {
		if t != nil {
			errs = append(errs, t.Free())
		}
	}
	return errors.Join(errs...)
}

// close closes the communicators, which may still write to the memory, and then frees it.
func (h *host) close() error {
	return errors.Join(h.mesh.Close(), h.free())
}
