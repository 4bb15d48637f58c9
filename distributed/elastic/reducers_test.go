package elastic

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Gradients and Loop are trainers.
var (
	_ Trainer = (*ddp.Gradients)(nil)
	_ Trainer = (*outer.Loop)(nil)
	_ hasher  = (*outer.Loop)(nil)
)

// model makes steps by a Trainer.
type model interface {
	step(ctx context.Context, values, update *runtime.Tensor) error
}

// gradients train by a ddp.Gradients with a sparse and a dense bucket.
type gradients struct{ *ddp.Gradients }

func (g gradients) step(ctx context.Context, values, update *runtime.Tensor) error {
	if err := g.ReduceAll(ctx, []*runtime.Tensor{update}); err != nil {
		return err
	}
	return add(values, update)
}

// loop trains by an outer.Loop, of which each round has two steps.
type loop struct {
	*outer.Loop
	moved bool // by the inner optimizer, in a step that is not over
}

func (l *loop) step(ctx context.Context, values, update *runtime.Tensor) error {
	for round := l.Stats().Rounds; l.Stats().Rounds == round; {
		if !l.moved {
			if err := add(values, update); err != nil {
				return err
			}
			l.moved = true
		}
		if err := l.Step(ctx); err != nil {
			return err
		}
		l.moved = false
	}
	return nil
}

func add(values, update *runtime.Tensor) error {
	v, err := cpu.Slice[float32](values)
	u, failed := cpu.Slice[float32](update)
	for i := range v {
		v[i] += u[i]
	}
	return errors.Join(err, failed)
}

// TestReducers: members that come, leave and are killed, with ddp.Gradients and outer.Loop.
func TestReducers(t *testing.T) {
	reduce := ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}, DenseUpTo: -1}
	for _, kind := range []string{"ddp", "outer"} {
		t.Run(kind, func(t *testing.T) {
			form, log, dial := new(rooms).form, newReplay(), keepStore(t)
			said := logtest.Capture(t)
			var list []*trainee
			for _, name := range []string{"a", "b", "c", "d"} {
				cfg := Config{Name: name, Form: form, Dial: dial, Max: 3}
				cfg.limit = time.Minute // nobody is lost but the one that is killed
				a := newTrainee(t, log, cfg)
				alone := noop.New(a.rt)
				if kind == "ddp" {
					g, err := ddp.New(t.Context(), a.rt, alone, a.tensors[1:], reduce)
					require.NoError(t, err)
					a.trainer, a.model = g, gradients{g}
				} else {
					l, err := outer.New(t.Context(), a.rt, alone, a.tensors[:1], outer.Config{Every: 2, Momentum: 0.9, Reduce: reduce})
					require.NoError(t, err)
					a.trainer, a.model = l, &loop{Loop: l}
					a.cfg.Tensors = nil // in the middle of a window parameters differ
				}
				a.trainer.BeforeCommit(a.Commit)
				list = append(list, a)
			}
			// The order of arrival is not the test's to decide: rank 0 of three, whichever it is, is killed, and the
			// next one leaves.
			var lost, left atomic.Pointer[trainee]
			together(t, list, func(a *trainee, e *Epoch, made int) bool {
				switch first := e.Comm.Rank() == 0 && len(e.Members) == 3 && made == 5; {
				case first && lost.CompareAndSwap(nil, a):
					a.kill()
				case first && left.CompareAndSwap(nil, a):
					a.Leave()
				}
				return left.Load() != nil && len(e.Members) == 2 && made == 5
			})
			stayed := slices.DeleteFunc(slices.Clone(list), func(a *trainee) bool { return a == lost.Load() || a == left.Load() })
			require.Len(t, stayed, 2)
			require.Equal(t, stayed[0].Steps(), stayed[1].Steps())
			assert.Equal(t, stayed[0].values, stayed[1].values)
			assert.NotZero(t, stayed[0].values[0])
			// The fate of residuals is logged once each, by one member.
			gone := said.Lines("the residuals of lost members are gone")
			require.Len(t, gone, 1)
			assert.Contains(t, gone[0], "lost="+lost.Load().cfg.Name)
			handed := said.Lines("took over the residuals of a member that leaves")
			require.Len(t, handed, 1)
			assert.Contains(t, handed[0], "member="+left.Load().cfg.Name)
			assert.Empty(t, said.Lines("moved to fewer ranks"))
			for _, a := range list {
				_ = a.Close()
			}
		})
	}
}
