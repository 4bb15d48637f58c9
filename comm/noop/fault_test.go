package noop_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestFaults(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	faulttest.Run(t, "noop", alone(rt))
}

func TestSoak(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	faulttest.Soak(t, alone(rt))
}

func alone(rt *cpu.Runtime) faulttest.Backend {
	return faulttest.Backend{Each: func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error {
		c := noop.New(rt)
		r, err := faulttest.NewRank(c, rt)
		if err != nil {
			return err
		}
		return errors.Join(body(ctx, r), c.Close(), r.Free())
	}}
}
