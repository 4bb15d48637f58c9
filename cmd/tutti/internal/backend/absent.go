package backend

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// absent is a backend that this version of tutti does not contain. It keeps
// its place in the list, so that asking for it gives the reason.
type absent struct {
	name, summary, reason string
}

var ncclBackend = absent{
	name:    "nccl",
	summary: "NVIDIA GPUs",
	reason:  "package comm/nccl can be used from a program (docs/gpu.md), this command does not run on GPUs yet",
}

func (a absent) Name() string    { return a.name }
func (a absent) Summary() string { return a.summary }

func (a absent) Probe(context.Context) (string, error) {
	return "", fmt.Errorf("%s: %w: %s", a.name, comm.ErrUnavailable, a.reason)
}

func (a absent) Run(ctx context.Context, _ Options, _ func(context.Context, Rank) error) error {
	_, err := a.Probe(ctx)
	return err
}
