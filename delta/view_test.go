package delta

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// gate holds who passes until it is opened, and tells that somebody has come.
type gate struct {
	come, opened chan struct{}
	first        sync.Once
}

func newGate() *gate { return &gate{come: make(chan struct{}), opened: make(chan struct{})} }

// pass returns an error if ctx ends before the gate is opened.
func (g *gate) pass(ctx context.Context) error {
	g.first.Do(func() { close(g.come) })
	select {
	case <-g.opened:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// gated is memory that is written when a gate is open.
type gated struct {
	elsewhere
	ctx  context.Context
	gate *gate // nil: open
}

func (g *gated) WriteAt(p []byte, at int64) (int, error) {
	if g.gate != nil {
		if err := g.gate.pass(g.ctx); err != nil {
			return 0, err
		}
	}
	return g.elsewhere.WriteAt(p, at)
}

// TestViewBesideSlowMemory: with Together, a subscriber has a version, and shows it, while another one is held in
// its memory, and that one commits it as well.
func TestViewBesideSlowMemory(t *testing.T) {
	const seed = 31
	r := rand.New(rand.NewPCG(seed, 0))
	old := newModel(r, "m")
	next := old.train(r, 0.1)
	g := newGate()
	// The limit is for versions of the library with the fault, in which nobody opens the gate.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := local.Run(ctx, 3, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		if c.Rank() == 0 {
			p := NewPublisher(rt, c)
			defer p.Close()
			if err := p.Commit(ctx, 1, old); err != nil {
				return err
			}
			return p.Publish(ctx, 2, next)
		}
		tensors := old.clone()
		if c.Rank() == 2 {
			for i := range tensors {
				tensors[i].Memory = &gated{elsewhere{tensors[i].Memory.(Host)}, ctx, g}
			}
		}
		s, err := NewSubscriber(ctx, rt, c, Config{Tensors: tensors, Version: 1, Together: true})
		if err != nil {
			return err
		}
		defer s.Close()
		if _, err := s.Update(ctx); err != nil {
			return err
		}
		if c.Rank() == 1 {
			select {
			case <-g.come: // the other one is in its memory
			case <-ctx.Done():
				return ctx.Err()
			}
			defer close(g.opened)
		}
		return s.checkShown(2, next)
	})
	require.NoError(t, err, "seed %d", seed)
}

// TestViewDuringVote: a subscriber shows the version before while another one has not voted.
func TestViewDuringVote(t *testing.T) {
	const seed = 32
	r := rand.New(rand.NewPCG(seed, 0))
	old := newModel(r, "m")
	next := old.train(r, 0.1)
	voting := newGate()
	slow := newGate()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := local.Run(ctx, 3, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		if c.Rank() == 0 {
			p := NewPublisher(rt, c)
			defer p.Close()
			if err := p.Commit(ctx, 1, old); err != nil {
				return err
			}
			return p.Publish(ctx, 2, next)
		}
		s, err := NewSubscriber(ctx, rt, c, Config{Tensors: old.clone(), Version: 1, Together: true})
		if err != nil {
			return err
		}
		defer s.Close()
		// The hook is called at the beginning of Update, before the message, and before the vote.
		steps := 0
		s.hook = func() error {
			steps++
			if steps < 3 {
				return nil
			}
			if c.Rank() == 1 {
				voting.first.Do(func() { close(voting.come) })
				return nil
			}
			return slow.pass(ctx)
		}
		if c.Rank() == 1 {
			var reading sync.WaitGroup
			defer reading.Wait()
			reading.Go(func() {
				defer close(slow.opened)
				for _, g := range []*gate{voting, slow} {
					select {
					case <-g.come:
					case <-ctx.Done():
						return
					}
				}
				assert.NoError(t, s.checkShown(1, old))
			})
		}
		version, err := s.Update(ctx)
		assert.Equal(t, uint64(2), version)
		return err
	})
	require.NoError(t, err, "seed %d", seed)
}

// TestAfterTheVote: a subscriber whose context ends when all have voted has the version, as the others do.
func TestAfterTheVote(t *testing.T) {
	const seed = 33
	r := rand.New(rand.NewPCG(seed, 0))
	old := newModel(r, "m")
	next := old.train(r, 0.1)
	err := local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		if c.Rank() == 0 {
			p := NewPublisher(rt, c)
			defer p.Close()
			if err := p.Commit(ctx, 1, old); err != nil {
				return err
			}
			return p.Publish(ctx, 2, next)
		}
		s, err := NewSubscriber(ctx, rt, c, Config{Tensors: old.clone(), Version: 1, Together: true})
		if err != nil {
			return err
		}
		defer s.Close()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		steps := 0
		s.hook = func() error {
			steps++
			if steps == 4 { // after the vote; see TestViewDuringVote
				cancel()
			}
			return nil
		}
		if _, err := s.Update(ctx); err != nil {
			return err
		}
		if ctx.Err() == nil {
			return errors.New("the context has not ended")
		}
		return s.checkShown(2, next)
	})
	require.NoError(t, err, "seed %d", seed)
}
