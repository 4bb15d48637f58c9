package main

import (
	"context"
	"net"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func pipe() (net.Conn, net.Conn, error) {
	a, b := net.Pipe()
	return a, b, nil
}

func TestConformance(t *testing.T) {
	for name, connect := range map[string]func() (net.Conn, net.Conn, error){"tcp": loopback, "pipe": pipe} {
		t.Run(name, func(t *testing.T) {
			rt := cpu.New()
			defer func() {
				if err := rt.Close(); err != nil {
					t.Error(err)
				}
			}()
			commtest.Run(t, commtest.Backend{
				Name:  "wire",
				Sizes: []int{1, 2, 3, 5},
				Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
					comms, err := world(size, connect)
					if err != nil {
						return err
					}
					return comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) error {
						return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
					})
				},
			})
		})
	}
}
