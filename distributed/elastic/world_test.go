package elastic

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

type dialer = func(context.Context) (store.Store, error)

// keepStore keeps a store for the members of a test, which are in its process.
func keepStore(t *testing.T) dialer {
	server := store.NewServer(store.Options{})
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	return func(context.Context) (store.Store, error) { return server.Local("a member"), nil }
}

// conf is what all members of the tests know.
var conf = func() *tls.Config {
	c, err := store.TLS([]byte("a secret of tests"), "elastic")
	if err != nil {
		panic(err)
	}
	return c
}()

// silence is the silence of members of TestChurn, and of TCP.
var silence = time.Second

// overTCP forms communicators of comm/tcp.
func overTCP(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
	return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf, Listen: "localhost", Silence: silence})
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

// trainee is a member of a test, which adds up gradients that a sparse.Reducer reduces.
type trainee struct {
	*Member
	rt      *cpu.Runtime
	values  []float32
	update  []float32
	tensors [2]*runtime.Tensor
	reducer *sparse.Reducer
	model   model // of tests of others, instead
	steps   uint64
	log     *replay

	guard  sync.Mutex
	comms  []comm.Communicator
	killed bool
}

// replay notes who made which step, and what came of it.
type replay struct {
	mu     sync.Mutex
	steps  map[uint64]made
	joined map[string]bool // by epoch and name
	left   map[string]bool // in order, by the last epoch that they took part in, and name
	tell   func(said)      // what is noted, of a process that is not the test's, or nil
}

type made struct {
	epoch   uint64
	members []string
	result  []float32
}

// said is what a member notes: that it has joined, or made a step.
type said struct {
	Joined string
	Step   uint64
	Epoch  uint64
	Names  []string
	Result []float32
}

func newReplay() *replay {
	return &replay{steps: map[uint64]made{}, joined: map[string]bool{}, left: map[string]bool{}, tell: func(said) {}}
}

func (r *replay) join(epoch uint64, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.joined[within(epoch, name)] = true
	r.tell(said{Joined: name, Epoch: epoch})
}

func (r *replay) note(t *testing.T, step, epoch uint64, members []string, result []float32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := made{epoch, members, slices.Clone(result)}
	if before, ok := r.steps[step]; ok {
		assert.Equal(t, before, now, "step %d", step)
	}
	r.steps[step] = now
	r.tell(said{Step: step, Epoch: epoch, Names: members, Result: now.result})
}

func within(epoch uint64, name string) string { return fmt.Sprintf("%d %s", epoch, name) }

// repeat makes the same steps without faults, and compares what comes of each and what the members have in the end.
func (r *replay) repeat(t *testing.T, until uint64, end []*trainee) {
	reducers, values := map[string]*sparse.Reducer{}, make([]float32, length)
	rt := cpu.New()
	residual := func(name string) []float32 {
		x, err := reducers[name].Residual()
		require.NoError(t, err)
		own, err := cpu.Slice[float32](x)
		require.NoError(t, err)
		return own
	}
	balance := make([]float32, length) // what was computed, and neither sent nor lost
	var comms []comm.Communicator
	var last made
	for step := range until {
		now, ok := r.steps[step]
		require.True(t, ok, "step %d", step)
		if now.epoch != last.epoch {
			for _, c := range comms {
				require.NoError(t, c.Close())
			}
			var err error
			comms, err = local.New(len(now.members))
			require.NoError(t, err)
			leaves := func(name string) bool { return r.left[within(last.epoch, name)] }
			for n := range 2 * len(last.members) { // those that leave first: whoever has their residuals may be lost
				i := n % len(last.members)
				name, left := last.members[i], n < len(last.members)
				if leaves(name) != left || slices.Contains(now.members, name) && !r.joined[within(now.epoch, name)] {
					continue
				}
				if left {
					heir := i
					for n := range last.members { // of all that leave the first
						if !leaves(last.members[heir%len(last.members)]) {
							break
						}
						if heir++; n == len(last.members)-1 {
							heir = 0
						}
					}
					to := residual(last.members[heir%len(last.members)])
					for j, x := range residual(name) {
						to[j] += x
					}
				} else {
					for j, x := range residual(name) {
						balance[j] -= x
					}
				}
				require.NoError(t, reducers[name].Close())
				delete(reducers, name)
			}
			for rank, name := range now.members {
				if reducers[name] == nil {
					reducers[name], err = sparse.New(rt, comms[rank], length, reduction)
					require.NoError(t, err)
				} else {
					require.NoError(t, reducers[name].Rebind(comms[rank]))
				}
			}
		}
		results := make([][]float32, len(comms))
		require.NoError(t, inStep(t.Context(), comms, func(ctx context.Context, c comm.Communicator) error {
			own := make([]float32, length)
			for i := range own {
				own[i] = contribution(now.members[c.Rank()], step, i)
			}
			x, err := cpu.Wrap(rt, own)
			if err != nil {
				return err
			}
			results[c.Rank()] = own
			return errors.Join(reducers[now.members[c.Rank()]].AllReduce(ctx, x), x.Free())
		}))
		require.Equal(t, results[0], now.result, "step %d of epoch %d: %v", step, now.epoch, now.members)
		for i, x := range results[0] {
			values[i] += x
			balance[i] -= float32(math.Round(float64(x) * float64(len(comms))))
			for _, name := range now.members {
				balance[i] += contribution(name, step, i)
			}
		}
		last = now
	}
	for _, name := range last.members {
		for i, x := range residual(name) {
			balance[i] -= x
		}
	}
	assert.Equal(t, make([]float32, length), balance, "residuals")
	for _, a := range end {
		assert.Equal(t, values, a.values, a.cfg.Name)
		x, err := a.reducer.Residual()
		require.NoError(t, err)
		own, err := cpu.Slice[float32](x)
		require.NoError(t, err)
		assert.Equal(t, residual(a.cfg.Name), own, a.cfg.Name)
		assert.Equal(t, until, a.Steps())
	}
	for i, name := range last.members {
		assert.NoError(t, errors.Join(reducers[name].Close(), comms[i].Close()))
	}
	assert.NoError(t, rt.Close())
}

// inStep runs body on all ranks, and leaves the communicators open.
func inStep(ctx context.Context, comms []comm.Communicator, body func(ctx context.Context, c comm.Communicator) error) error {
	errs := make([]error, len(comms))
	var all sync.WaitGroup
	for i, c := range comms {
		all.Go(func() { errs[i] = body(ctx, c) })
	}
	all.Wait()
	return errors.Join(errs...)
}

var reduction = sparse.Config{Pattern: sparse.TopkA, Density: 0.1}

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

// newTrainee makes a member.
func newTrainee(t *testing.T, log *replay, cfg Config) *trainee {
	a := &trainee{rt: cpu.New(), values: make([]float32, length), update: make([]float32, length), log: log}
	for i, values := range [][]float32{a.values, a.update} {
		var err error
		a.tensors[i], err = cpu.Wrap(a.rt, values)
		require.NoError(t, err)
	}
	cfg.Runtime = a.rt
	cfg.Tensors = a.tensors[:1]
	cfg.Min = max(cfg.Min, 1)
	var err error
	a.reducer, err = sparse.New(a.rt, noop.New(a.rt), length, reduction)
	require.NoError(t, err)
	form := cfg.Form
	cfg.Form = func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
		c, err := form(ctx, kv, p)
		a.guard.Lock()
		defer a.guard.Unlock()
		if err == nil && a.killed {
			comm.AbortAll(c, context.Canceled)
		} else if err == nil {
			a.comms = append(a.comms, c)
		}
		return c, err
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a.Member, err = Join(ctx, cfg, a)
	require.NoError(t, err)
	return a
}

// Rebind implements Trainer.
func (a *trainee) Rebind(_ context.Context, c comm.Communicator) error { return a.reducer.Rebind(c) }

// BeforeCommit implements Trainer.
func (a *trainee) BeforeCommit(vote func(ctx context.Context) error) { a.reducer.BeforeCommit(vote) }

// Residuals implements Trainer. It notes who leaves, as the members ask for residuals then.
func (a *trainee) Residuals() ([]*runtime.Tensor, error) {
	for _, rank := range a.epoch.leaves {
		a.log.mu.Lock()
		a.log.left[within(a.epoch.Number, a.epoch.Members[rank])] = true
		a.log.mu.Unlock()
	}
	r, err := a.reducer.Residual()
	return []*runtime.Tensor{r}, err
}

// SharedState implements Trainer.
func (a *trainee) SharedState(ctx context.Context) ([]byte, error) {
	shared, err := a.reducer.SharedState(ctx)
	return append(binary.LittleEndian.AppendUint64(nil, a.steps), shared...), err
}

// Restore implements Trainer.
func (a *trainee) Restore(ctx context.Context, states ...[]byte) error {
	a.steps = binary.LittleEndian.Uint64(states[0])
	return a.reducer.Restore(ctx, states[0][8:])
}

// altered is a trainer of which a test wants something else.
type altered struct {
	Trainer
	save func(ctx context.Context) ([]byte, error)            // instead of SharedState, unless nil
	load func(ctx context.Context, states ...[]byte) error    // of Restore
	bind func(ctx context.Context, c comm.Communicator) error // of Rebind
}

func (a *altered) SharedState(ctx context.Context) ([]byte, error) {
	if a.save != nil {
		return a.save(ctx)
	}
	return a.Trainer.SharedState(ctx)
}

func (a *altered) Restore(ctx context.Context, states ...[]byte) error {
	if a.load != nil {
		return a.load(ctx, states...)
	}
	return a.Trainer.Restore(ctx, states...)
}

func (a *altered) Rebind(ctx context.Context, c comm.Communicator) error {
	if a.bind != nil {
		return a.bind(ctx, c)
	}
	return a.Trainer.Rebind(ctx, c)
}

// step makes one.
func (a *trainee) step(ctx context.Context, t *testing.T, e *Epoch) error {
	if e.Joined {
		a.log.join(e.Number, a.cfg.Name)
	}
	for i := range a.update {
		a.update[i] = contribution(a.cfg.Name, a.steps, i)
	}
	if a.model != nil {
		err := a.model.step(ctx, a.tensors[0], a.tensors[1])
		if err == nil {
			a.log.note(t, a.Steps(), e.Number, e.Members, a.values)
		}
		return err
	}
	if err := a.reducer.AllReduce(ctx, a.tensors[1]); err != nil {
		return err
	}
	a.log.note(t, a.steps, e.Number, e.Members, a.update)
	for i, x := range a.update {
		a.values[i] += x
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

// kill ends a member in the middle of whatever it does: its connections are gone, as those of a process that is killed.
func (a *trainee) kill() {
	a.guard.Lock()
	a.killed = true
	for _, c := range a.comms {
		comm.AbortAll(c, context.Canceled)
	}
	a.guard.Unlock()
	a.end()
	a.gone.Wait()
}

// dead reports whether the member was killed.
func (a *trainee) dead() bool {
	a.guard.Lock()
	defer a.guard.Unlock()
	return a.killed
}

// over runs a test over both kinds of communicators.
func over(t *testing.T, test func(t *testing.T, form func(context.Context, store.Store, Place) (comm.Communicator, error))) {
	t.Run("tcp", func(t *testing.T) { test(t, overTCP) })
	t.Run("local", func(t *testing.T) { test(t, new(rooms).form) })
}

func name(i int) string { return fmt.Sprintf("member %d", i) }
