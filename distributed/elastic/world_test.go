package elastic

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// conf is what all members of the tests know.
var conf = func() *tls.Config {
	c, err := store.TLS([]byte("a secret of tests"), "elastic")
	if err != nil {
		panic(err)
	}
	return c
}()

// overTCP forms communicators of comm/tcp.
func overTCP(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
	return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf, Listen: "localhost", Silence: time.Second})
}

// rooms forms communicators of comm/local.
type rooms struct {
	mu    sync.Mutex
	rooms map[string]*room
}

type room struct {
	comms []comm.Communicator
	here  int
	full  chan struct{}
}

func (r *rooms) form(ctx context.Context, _ store.Store, p Place) (comm.Communicator, error) {
	r.mu.Lock()
	if r.rooms == nil {
		r.rooms = map[string]*room{}
	}
	mine := r.rooms[p.World]
	if mine == nil {
		comms, err := local.New(p.Size)
		if err != nil {
			r.mu.Unlock()
			return nil, err
		}
		mine = &room{comms: comms, full: make(chan struct{})}
		r.rooms[p.World] = mine
	}
	if mine.here++; mine.here == p.Size {
		close(mine.full)
		delete(r.rooms, p.World)
	}
	r.mu.Unlock()
	select {
	case <-mine.full:
		return mine.comms[p.Rank], nil
	case <-ctx.Done():
		return nil, errors.Join(comm.ContextError(ctx), mine.comms[p.Rank].Close())
	}
}

// trainee is a member of a test, which adds up dense gradients.
type trainee struct {
	*Member
	rt       *cpu.Runtime
	values   []float32
	gradient []float32
	tensors  [2]*runtime.Tensor
	steps    uint64
	log      *replay
}

// replay notes which members made which step.
type replay struct {
	mu    sync.Mutex
	steps map[uint64][]string
}

func (r *replay) note(t *testing.T, step uint64, members []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if before, ok := r.steps[step]; ok {
		require.Equal(t, before, members, "step %d", step)
	}
	r.steps[step] = members
}

const length = 257

// contribution is a member's gradient: integers, so that sums do not depend on their order.
func contribution(name string, step uint64, i int) float32 {
	h := uint64(i)*31 + step*17
	for _, b := range []byte(name) {
		h = (h ^ uint64(b)) * 0x9e3779b97f4a7c15
		h ^= h >> 32
	}
	return float32(h % 7)
}

// newTrainee makes a member. change may change its configuration.
func newTrainee(t *testing.T, log *replay, cfg Config) *trainee {
	a := &trainee{rt: cpu.New(), values: make([]float32, length), gradient: make([]float32, length), log: log}
	for i, values := range [][]float32{a.values, a.gradient} {
		var err error
		a.tensors[i], err = cpu.Wrap(a.rt, values)
		require.NoError(t, err)
	}
	cfg.TLS, cfg.Runtime, cfg.Tensors = conf, a.rt, a.tensors[:1]
	if cfg.Min == 0 {
		cfg.Min = 1
	}
	cfg.Bind = func(context.Context, *Epoch) error { return nil }
	cfg.Save = func(context.Context) ([]byte, error) { return binary.LittleEndian.AppendUint64(nil, a.steps), nil }
	cfg.Load = func(_ context.Context, state []byte) error { a.steps = binary.LittleEndian.Uint64(state); return nil }
	var err error
	a.Member, err = Join(t.Context(), cfg)
	require.NoError(t, err)
	return a
}

// step makes one.
func (a *trainee) step(ctx context.Context, t *testing.T, e *Epoch) error {
	for i := range a.gradient {
		a.gradient[i] = contribution(a.cfg.Name, a.steps, i)
	}
	if err := distributed.AllReduce(ctx, e.Comm, a.tensors[1], comm.Sum); err != nil {
		return err
	}
	if err := e.Comm.Sync(ctx); err != nil {
		return err
	}
	if err := a.Commit(ctx); err != nil {
		return err
	}
	a.log.note(t, a.steps, e.Members)
	for i, g := range a.gradient {
		a.values[i] += g
	}
	a.steps++
	return nil
}

// run makes steps until done says so, of an epoch and how many steps were made in it.
func (a *trainee) run(ctx context.Context, t *testing.T, done func(e *Epoch, made int) bool) error {
	last, made := (*Epoch)(nil), 0
	return a.Run(ctx, func(ctx context.Context, e *Epoch) error {
		if e != last {
			last, made = e, 0
		}
		if done(e, made) {
			return io.EOF
		}
		err := a.step(ctx, t, e)
		if err == nil {
			made++
		}
		return err
	})
}

// check compares the values with those of the members that made each step.
func (a *trainee) check(t *testing.T) {
	want := make([]float32, length)
	for step := range a.steps {
		require.NotEmpty(t, a.log.steps[step], "step %d", step)
		for _, name := range a.log.steps[step] {
			for i := range want {
				want[i] += contribution(name, step, i)
			}
		}
	}
	require.Equal(t, want, a.values)
	require.Equal(t, a.steps, a.Steps())
}

// kill ends a member as a process that is killed.
func (a *trainee) kill() {
	a.end()
	a.gone.Wait()
	if a.server != nil {
		_ = a.server.Close()
	}
}

// over runs a test over both kinds of communicators.
func over(t *testing.T, test func(t *testing.T, form func(context.Context, store.Store, Place) (comm.Communicator, error))) {
	t.Run("tcp", func(t *testing.T) { test(t, overTCP) })
	t.Run("local", func(t *testing.T) { test(t, new(rooms).form) })
}

func name(i int) string { return fmt.Sprintf("member %d", i) }
