package backend

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// noopBackend is a world of one rank (comm/noop).
var noopBackend = Backend{
	Name:    "noop",
	Summary: "one rank, nothing to communicate",
	Probe:   probeNoop,
	Run:     runNoop,
}

func probeNoop(context.Context) (string, error) {
	return "always one rank", nil
}

func runNoop(ctx context.Context, opts Options, body func(context.Context, Rank) error) error {
	if opts.Ranks > 1 {
		return &OptionError{Backend: "noop", Reason: fmt.Sprintf("has one rank, not %d", opts.Ranks)}
	}
	rt := cpu.New()
	c := noop.New(rt)
	return errors.Join(opts.onHost(ctx, c, rt, body), c.Close(), rt.Close())
}
