package local_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestFaults(t *testing.T) {
	for _, column := range []string{"local", faulttest.Checked} {
		t.Run(column, func(t *testing.T) {
			rt := cpu.New()
			defer func() { require.NoError(t, rt.Close()) }()
			b := ofThree(rt)
			b.Bubble = true
			faulttest.Run(t, column, b)
		})
	}
}

func TestSoak(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	faulttest.Soak(t, ofThree(rt))
}

func TestSoakOfTrees(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	faulttest.SoakTrees(t, ofThree(rt))
}

// ofThree makes worlds of three ranks.
func ofThree(rt *cpu.Runtime) faulttest.Backend {
	return faulttest.Backend{Each: func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error {
		return local.Run(ctx, 3, func(ctx context.Context, c comm.Communicator) error {
			r, err := faulttest.NewRank(c, rt)
			if err != nil {
				return err
			}
			return errors.Join(body(ctx, r), r.Free())
		})
	}}
}
