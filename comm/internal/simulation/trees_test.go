//go:build simulated

package simulation

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/trees"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sim"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// playTrees has ranks play trees of sub-communicators: half of the time over tcp, otherwise in one process or over
// links.
func playTrees(p *play) {
	size, workers := 1+p.IntN(4), 1+p.IntN(3)
	t := trees.Config{Seed: p.Seed, Workers: workers, Sum: dtype.I32}
	t.Open = workers * (2 + p.IntN(15))
	t.Operations = 30 * (1 + p.IntN(6))
	rt := cpu.New()
	part := func(ctx context.Context, c comm.Communicator) error {
		calls, err := t.Play(ctx, c, rt)
		p.Event("takes part in %d operations: %v", calls, err)
		return errors.Join(err, c.Close())
	}
	switch p.IntN(4) {
	case 0:
		world, err := local.New(size)
		if err != nil {
			p.fail("%v", err)
		}
		nodes := slices.Repeat([]*sim.Node{p.NewNode("all")}, size)
		p.ranks(nodes, func(ctx context.Context, rank int) error { return part(ctx, world[rank]) })
	case 1:
		nodes := p.nodes(size)
		n := newLinks(p, nodes)
		p.ranks(nodes, func(ctx context.Context, rank int) error { return part(ctx, n.join(rank)) })
	default:
		server := p.serve(store.Options{Size: size})
		nodes := p.nodes(size)
		conf := tcp.Config{WorldSize: size, TLS: secret, World: "w", Connections: p.IntN(4)}
		p.ranks(nodes, func(ctx context.Context, rank int) error {
			c, err := p.connect(ctx, nodes, rank, conf)
			if err != nil {
				return err
			}
			return part(ctx, c)
		})
		p.within(20*time.Second, "Close of the store", func() {
			if err := server.Close(); err != nil {
				p.fail("%v", err)
			}
		})
	}
	if err := rt.Close(); err != nil {
		p.fail("%v", err)
	}
}

// ranks runs body on nodes and expects it to succeed.
func (p *play) ranks(nodes []*sim.Node, body func(ctx context.Context, rank int) error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit/2)
	defer cancel()
	p.together(nodes, func(rank int) {
		if err := body(ctx, rank); err != nil {
			p.fail("rank %d: %v", rank, err)
		}
	})
}

// connect connects a rank to a world over tcp.
func (p *play) connect(ctx context.Context, nodes []*sim.Node, rank int, conf tcp.Config) (comm.Communicator, error) {
	d := store.Dialer{Addresses: []string{storeAt}, TLS: secret2, Name: strconv.Itoa(rank), Size: len(nodes)}
	kv, err := d.Dial(ctx)
	if err != nil {
		return nil, err
	}
	defer kv.Close() //nolint:errcheck // nobody needs it
	conf.Rank, conf.Listen = rank, nodes[rank].Host()
	return tcp.New(ctx, kv, conf)
}
