package backend

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// noopBackend is a world of one rank (comm/noop).
type noopBackend struct{}

func (noopBackend) Name() string    { return "noop" }
func (noopBackend) Jobs() bool      { return false }
func (noopBackend) Summary() string { return "one rank, nothing to communicate" }

func (noopBackend) Probe(context.Context) (string, error) { return "always one rank", nil }

func (b noopBackend) Run(ctx context.Context, opts Options, body func(context.Context, Rank) error) error {
	if opts.Ranks > 1 {
		return &OptionError{Backend: b.Name(), Reason: fmt.Sprintf("has one rank, not %d", opts.Ranks)}
	}
	rt := cpu.New()
	c := noop.New(rt)
	return errors.Join(opts.onHost(ctx, c, rt, body), c.Close(), rt.Close())
}
