package tcp_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestConformance(t *testing.T) {
	for _, connections := range []int{1, 3} {
		t.Run(fmt.Sprintf("connections=%d", connections), func(t *testing.T) {
			rt := cpu.New()
			defer func() { require.NoError(t, rt.Close()) }()
			commtest.Run(t, commtest.Backend{
				Name:         "tcp",
				Sizes:        map[int][]int{1: {1, 2, 5}, 3: {3}}[connections],
				LateMismatch: true,
				Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
					return run(ctx, size, func(c *tcp.Config) { c.Connections = connections }, func(ctx context.Context, c comm.Communicator) error {
						return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
					})
				},
			})
		})
	}
}

// ofThree makes worlds of three ranks.
func ofThree(rt *cpu.Runtime) faulttest.Backend {
	return faulttest.Backend{Each: func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error {
		return run(ctx, 3, nil, func(ctx context.Context, c comm.Communicator) error {
			r, err := faulttest.NewRank(c, rt)
			if err != nil {
				return err
			}
			return errors.Join(body(ctx, r), r.Free())
		})
	}}
}

func TestSoak(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	faulttest.Soak(t, ofThree(rt))
}
