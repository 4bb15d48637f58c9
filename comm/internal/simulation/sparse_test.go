//go:build simulated

package simulation

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sim"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// playSparse makes sparse steps, some of which fail. After an error the gradient and the residual are unchanged. The
// input of all ranks is in the results and the residuals.
func playSparse(p *play) {
	const n, steps = 64, 6
	node := p.NewNode("all")
	size := []int{2, 4}[p.IntN(2)] // a power of two, so that averages are exact
	patterns := slices.DeleteFunc(sparsity.Patterns(), func(name string) bool { return name == sparse.Dense })
	config := sparse.Config{Pattern: patterns[p.IntN(len(patterns))], Density: 0.1}
	world, err := local.New(size)
	if err != nil {
		p.fail("%v", err)
	}
	fails := p.Chance(2)
	victim, at := p.IntN(size), p.Between(0, 3*time.Millisecond)
	if fails {
		sim.AfterFunc(at, func() { world[victim].Abort(errors.New("a rank has had enough")) })
	}
	total, left := make([]float64, n), make([]float64, n)
	var mu sim.Mutex
	p.together(slices.Repeat([]*sim.Node{node}, size), func(rank int) {
		rt := cpu.New()
		s, err := sparse.New(rt, world[rank], n, config)
		if err != nil {
			p.fail("%s: %v", config.Pattern, err)
		}
		residual := func() []float32 {
			t, err := s.Residual()
			if err != nil {
				p.fail("%v", err)
			}
			ptr, err := t.Ptr()
			if err != nil {
				p.fail("%v", err)
			}
			return append([]float32(nil), hostmem.Slice[float32](ptr, t.Len())...)
		}
		ctx := context.Background()
		for step := range steps {
			g := make([]float32, n)
			for i := range g {
				g[i] = float32(value(p.Seed, step, rank, i))
			}
			given, before := slices.Clone(g), residual()
			t, err := cpu.Wrap(rt, g)
			if err != nil {
				p.fail("%v", err)
			}
			p.Event("step %d of %s", step, config.Pattern)
			err = s.AllReduce(ctx, t)
			_ = t.Free()
			if err != nil {
				p.Event("%v", err)
				if !fails || !errors.Is(err, comm.ErrBroken) && !errors.Is(err, comm.ErrPeerFailed) {
					p.fail("rank %d, step %d: %v", rank, step, err)
				}
				if !slices.Equal(g, given) || !slices.Equal(residual(), before) {
					p.fail("rank %d: a part of step %d, which failed, is done: %v", rank, step, err)
				}
				break
			}
			mu.Lock()
			for i := range g {
				total[i] += float64(given[i])
				left[i] += float64(g[i])
			}
			mu.Unlock()
		}
		mu.Lock()
		for i, x := range residual() {
			left[i] += float64(x)
		}
		mu.Unlock()
		if err := s.Close(); err != nil && !fails {
			p.fail("%v", err)
		}
		if err := world[rank].Close(); err != nil && !fails {
			p.fail("%v", err)
		}
		if err := rt.Close(); err != nil && !fails {
			p.fail("%v", err)
		}
	})
	if !fails && !slices.Equal(total, left) {
		p.fail("%s: ranks put in %v, and got or kept %v", config.Pattern, total, left)
	}
}
