package elastic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	goruntime "runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// quick are the times of members that wait in vain.
func quick(cfg Config) Config {
	cfg.Silence, cfg.limit = 400*time.Millisecond, time.Second
	return cfg
}

// bubble runs a test of members that have their store in the process, where time stands while any of them goes on.
func bubble(t *testing.T, f func(t *testing.T)) {
	defer goruntime.GOMAXPROCS(goruntime.GOMAXPROCS(1)) // no rank spins by that clock
	synctest.Test(t, f)
}

// together runs members until done says so, and returns when all have ended.
func together(t *testing.T, list []*trainee, done func(a *trainee, e *Epoch, made int) bool) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for _, a := range list {
		all.Go(func() {
			err := a.run(ctx, t, func(e *Epoch, made int) bool { time.Sleep(time.Millisecond); return done(a, e, made) })
			if !a.dead() {
				assert.NoError(t, err, a.cfg.Name)
			}
		})
	}
	all.Wait()
	require.NoError(t, ctx.Err())
}

// TestOneOfThree: one of three goes on without the others, and another joins it.
func TestOneOfThree(t *testing.T) { bubble(t, oneOfThree) }

func oneOfThree(t *testing.T) {
	form, log, dial := new(rooms).form, newReplay(), keepStore(t)
	var list []*trainee
	for _, name := range []string{"a", "b", "c", "d"} {
		list = append(list, newTrainee(t, log, quick(Config{Name: name, Form: form, Dial: dial, Max: 3})))
	}
	together(t, list, func(a *trainee, e *Epoch, made int) bool {
		if a.cfg.Name < "c" && len(e.Members) == 3 && made == 3 {
			a.kill()
		}
		return len(e.Members) == 2 && min(e.Members[0], e.Members[1]) == "c" && made == 5
	})
	log.repeat(t, list[2].steps, list[2:])
	for _, a := range list[2:] {
		assert.NoError(t, a.Close())
	}
}

// TestLeaverAlone: a member that has lost the others when it is to leave makes no step alone, which these would not have.
func TestLeaverAlone(t *testing.T) { bubble(t, leaverAlone) }

func leaverAlone(t *testing.T) {
	form, log, dial := new(rooms).form, newReplay(), keepStore(t)
	a := newTrainee(t, log, quick(Config{Name: "a", Form: form, Dial: dial}))
	b := newTrainee(t, log, quick(Config{Name: "b", Form: form, Dial: dial}))
	var all sync.WaitGroup
	all.Go(func() { _ = b.run(t.Context(), t, func(*Epoch, int) bool { return false }) })
	var failed error
	for failed == nil {
		e, err := a.Next(t.Context(), nil)
		require.NoError(t, err)
		if len(e.Members) == 2 {
			b.kill()
		}
		failed = a.step(t.Context(), t, e)
	}
	all.Wait()
	a.Leave()
	e, err := a.Next(t.Context(), failed)
	require.ErrorIs(t, err, ErrLeft, "%+v", e)
	require.NoError(t, a.Close())
}

// TestLeaverWaits: a member that leaves stays until the one that is to go on, and is out of the store's reach, is back.
func TestLeaverWaits(t *testing.T) { bubble(t, leaverWaits) }

func leaverWaits(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer func() { assert.NoError(t, server.Close()) }()
	form, log := new(rooms).form, newReplay()
	var cut, back atomic.Bool
	var tries atomic.Int32
	session := make(chan store.Store, 2)
	join := func(name string) *trainee {
		dial := func(context.Context) (store.Store, error) {
			kv := server.Local(name)
			if name == "b" && cut.Load() {
				if tries.Add(1) < 3 {
					return nil, errors.Join(comm.ErrPeerFailed, kv.Close())
				}
				back.Store(true)
			} else if name == "b" {
				session <- kv
			}
			return kv, nil
		}
		return newTrainee(t, log, quick(Config{Name: name, Form: form, Dial: dial}))
	}
	a, b := join("a"), join("b")
	var all sync.WaitGroup
	all.Go(func() {
		assert.NoError(t, b.run(t.Context(), t, func(e *Epoch, made int) bool { return back.Load() && len(e.Members) == 1 && made == 1 }))
	})
	assert.NoError(t, a.run(t.Context(), t, func(e *Epoch, _ int) bool {
		if len(e.Members) == 2 && !cut.Swap(true) {
			assert.NoError(t, (<-session).Close())
			a.Leave()
		}
		return false
	}))
	assert.True(t, back.Load(), "nobody has the state")
	all.Wait()
	log.repeat(t, b.steps, []*trainee{b})
	assert.NoError(t, errors.Join(a.Close(), b.Close()))
}

// TestReplaceAll: all members leave when as many wait to join as there may be. They are gone when the others have the
// state, and their residuals are not lost.
func TestReplaceAll(t *testing.T) {
	for most := range 3 {
		most++
		form, log, dial := new(rooms).form, newReplay(), keepStore(t)
		var old, fresh []*trainee
		join := func() *trainee {
			cfg := Config{Name: name(len(old) + len(fresh)), Form: form, Dial: dial, Min: most, Max: most}
			cfg.Silence = 10 * time.Second
			cfg.limit = time.Minute // nobody leaves because a wait lasts
			return newTrainee(t, log, cfg)
		}
		var all sync.WaitGroup
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		run := func(a *trainee, done func(e *Epoch, made int) bool) {
			all.Go(func() { assert.NoError(t, a.run(ctx, t, done), "%s of %d", a.cfg.Name, most) })
		}
		trained := make(chan bool, most)
		for range most {
			old = append(old, join())
		}
		for _, a := range old {
			run(a, func(_ *Epoch, made int) bool {
				if made == 3 {
					trained <- true
				}
				return false
			})
		}
		<-trained
		for range most {
			fresh = append(fresh, join())
			run(fresh[len(fresh)-1], func(e *Epoch, made int) bool {
				return made == 3 && len(e.Members) == most && !slices.ContainsFunc(old, func(a *trainee) bool { return slices.Contains(e.Members, a.cfg.Name) })
			})
		}
		require.NoError(t, old[0].wait(ctx, func() (bool, error) {
			v, _ := old[0].look()
			waiting := 0
			for _, s := range v.present {
				if s.Standing == joining {
					waiting++
				}
			}
			return waiting == most, nil
		}))
		for _, a := range old {
			a.Leave()
		}
		all.Wait()
		require.NoError(t, ctx.Err())
		log.repeat(t, fresh[0].steps, fresh)
		for _, a := range slices.Concat(old, fresh) {
			assert.NoError(t, a.Close())
		}
	}
}

// TestLeaveWhileWaiting: a member that waits for others, or for room, leaves at once, and one that has the state after five times Silence.
func TestLeaveWhileWaiting(t *testing.T) { bubble(t, leaveWhileWaiting) }

func leaveWhileWaiting(t *testing.T) {
	form, log, dial := new(rooms).form, newReplay(), keepStore(t)
	join := func(name string) *trainee {
		return newTrainee(t, log, quick(Config{Name: name, Form: form, Dial: dial, Min: 2, Max: 2}))
	}
	a := join("a")
	next := func(a *trainee, failed error) <-chan error {
		ended := make(chan error, 1)
		go func() {
			_, err := a.Next(t.Context(), failed)
			ended <- err
		}()
		return ended
	}
	ended := next(a, nil)
	a.Leave()
	require.ErrorIs(t, <-ended, ErrLeft, "too few")
	require.NoError(t, a.Close())

	b, c := join("b"), join("c")
	first, second := next(b, nil), next(c, nil)
	require.NoError(t, errors.Join(<-first, <-second))
	d := join("d")
	ended = next(d, nil)
	d.Leave()
	require.ErrorIs(t, <-ended, ErrLeft, "no room")
	require.NoError(t, d.Close())
	c.kill()
	ended = next(b, context.Canceled)
	b.Leave()
	require.ErrorIs(t, <-ended, ErrLeft, "it has the state, and too few are here")
	require.NoError(t, b.Close())
}

// TestLastLeave: the last member leaves in order, and so do all in one boundary.
func TestLastLeave(t *testing.T) {
	for _, names := range [][]string{{"a"}, {"a", "b"}} {
		over(t, func(t *testing.T, form former) {
			log, dial := newReplay(), keepStore(t)
			var list []*trainee
			for _, name := range names {
				list = append(list, newTrainee(t, log, Config{Name: name, Form: form, Dial: dial, Min: len(names)}))
			}
			together(t, list, func(a *trainee, _ *Epoch, made int) bool {
				if made == 3 {
					a.Leave()
				}
				return false
			})
			for _, a := range list {
				assert.EqualValues(t, 4, a.steps)
				assert.NoError(t, a.Close())
			}
		})
	}
}

// TestAllLeaveAtABoundary: members that are told to leave when another one has left, and too few stay for an epoch with the next vote, do not wait.
func TestAllLeaveAtABoundary(t *testing.T) {
	form, log, dial := new(rooms).form, newReplay(), keepStore(t)
	var list []*trainee
	for _, name := range []string{"a", "b", "c"} {
		list = append(list, newTrainee(t, log, Config{Name: name, Form: form, Dial: dial, Min: 3, limit: time.Minute}))
	}
	for _, a := range list[:2] {
		go func() {
			assert.NoError(t, a.wait(t.Context(), func() (bool, error) {
				v, _ := a.look()
				return a.status.Standing.waits() && slices.ContainsFunc(v.present, func(s status) bool { return s.Standing == leaving }), nil
			}))
			a.Leave()
		}()
	}
	together(t, list, func(a *trainee, _ *Epoch, made int) bool {
		if a == list[2] && made == 3 {
			a.Leave()
		}
		return false
	})
	for _, a := range list {
		assert.NoError(t, a.Close())
	}
}

// TestEnded: a member for whom there was no room, and one that comes later, find that the others have made the last step, and
// make none.
func TestEnded(t *testing.T) { bubble(t, ended) }

func ended(t *testing.T) {
	form, log, dial := new(rooms).form, newReplay(), keepStore(t)
	join := func(name string) *trainee {
		return newTrainee(t, log, quick(Config{Name: name, Form: form, Dial: dial, Min: 2, Max: 2}))
	}
	list := []*trainee{join("a"), join("b")}
	waiting := make(chan *trainee, 1)
	together(t, list, func(a *trainee, _ *Epoch, _ int) bool {
		if a == list[0] && a.steps == 5 && len(waiting) == 0 {
			waiting <- join("c")
		}
		return a.steps == 6
	})
	assert.Len(t, log.steps, 6)
	kv, err := dial(t.Context())
	require.NoError(t, err)
	over, err := Ended(t.Context(), kv.(*store.Client))
	require.NoError(t, err)
	assert.True(t, over)
	for _, a := range list {
		assert.NoError(t, a.Close())
	}
	for _, late := range []*trainee{<-waiting, join("d")} {
		_, err := late.Next(t.Context(), nil)
		require.ErrorIs(t, err, ErrEnded)
		err = late.Run(t.Context(), func(context.Context, *Epoch) error { return errors.New("a step after the last one") })
		require.ErrorIs(t, err, ErrEnded)
		assert.ErrorContains(t, err, "has not trained")
		assert.NoError(t, late.Close())
	}
}

// TestEndedWithout: a member that the others have lost, and that comes back when they have made the last step, does not
// have the job's state, and Run says so. One that has made all steps, and sees the end by the others' absence, has it.
func TestEndedWithout(t *testing.T) { bubble(t, endedWithout) }

func endedWithout(t *testing.T) {
	form, log, dial := new(rooms).form, newReplay(), keepStore(t)
	var list []*trainee
	for _, name := range []string{"a", "b", "c"} {
		list = append(list, newTrainee(t, log, quick(Config{Name: name, Form: form, Dial: dial, Min: 1})))
	}
	a, b, c := list[0], list[1], list[2]
	ended := make(chan struct{})
	var lost error // of c
	var all sync.WaitGroup
	all.Go(func() {
		lost = c.run(t.Context(), t, func(e *Epoch, made int) bool {
			if len(e.Members) == 3 && made == 2 {
				comm.AbortAll(e.Comm, comm.ErrPeerFailed)
				<-ended // as a process that was stopped
			}
			return false
		})
	})
	var others sync.WaitGroup
	whole := false // a has seen all three
	others.Go(func() {
		assert.NoError(t, a.run(t.Context(), t, func(e *Epoch, made int) bool {
			whole = whole || len(e.Members) == 3
			return whole && len(e.Members) == 2 && made == 3
		}))
		assert.NoError(t, a.Close())
	})
	others.Go(func() { // b waits for a, which is gone
		assert.NoError(t, b.run(t.Context(), t, func(*Epoch, int) bool { return false }))
		assert.NoError(t, b.Close())
	})
	others.Wait()
	close(ended)
	all.Wait()
	assert.Equal(t, a.values, b.values)
	assert.NotEqual(t, a.values, c.values)
	require.ErrorIs(t, lost, ErrEnded)
	assert.ErrorContains(t, lost, "does not have its result")
	assert.NoError(t, c.Close())
}

// TestLostWithoutResiduals: of a trainer that has no residuals, none is said to be gone.
func TestLostWithoutResiduals(t *testing.T) {
	rt := cpu.New()
	said := logtest.Capture(t)
	e := &Epoch{Comm: noop.New(rt), record: &record{Lost: []string{"b"}}}
	require.NoError(t, (&Member{trainer: Plain{}}).sayLost(e))
	assert.Empty(t, said.Lines("residuals of lost members"))
	residual, err := runtime.New(rt, dtype.F32, 4)
	require.NoError(t, err)
	defer residual.Free()
	require.NoError(t, residual.Fill(1))
	require.NoError(t, (&Member{trainer: hoarder{residual: residual}}).sayLost(e))
	assert.Len(t, said.Lines("residuals of lost members"), 1)
}

// TestLostConnection: the io.EOF of a connection is no end of a job.
func TestLostConnection(t *testing.T) {
	tries := 0
	m, err := Join(t.Context(), Config{Name: "a", Min: 1, Dial: keepStore(t), Form: new(rooms).form}, Plain{})
	require.NoError(t, err)
	require.NoError(t, m.Run(t.Context(), func(context.Context, *Epoch) error {
		if tries++; tries == 1 {
			return fmt.Errorf("%w: connection lost: %w", comm.ErrPeerFailed, io.EOF)
		}
		return io.EOF
	}))
	assert.Equal(t, 2, tries)
	require.NoError(t, m.Close())
}

// TestEnvironment: a bound that is no number is named.
func TestEnvironment(t *testing.T) {
	for name, text := range map[string]string{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "TUTTI_RANK": "0", "TUTTI_WORLD_SIZE": "1", "TUTTI_LOCAL_RANK": "0",
		"TUTTI_LOCAL_WORLD_SIZE": "1", "TUTTI_SECRET": "abcdefghijklmnopqrstuvwxyz", env.Min: "2", env.Max: "four"} {
		t.Setenv(name, text)
	}
	_, err := FromEnv(Config{})
	require.ErrorIs(t, err, rendezvous.ErrEnvironment)
	assert.ErrorContains(t, err, `TUTTI_MAX="four" is no count`)
}

// TestRefused: a member with other terms, and one with a name that is taken, are refused, also if the store was not in reach when
// they joined; a name can be had again.
func TestRefused(t *testing.T) {
	logged := logtest.Capture(t)
	bubble(t, func(t *testing.T) {
		server, form, log := store.NewServer(store.Options{}), new(rooms).form, newReplay()
		var here atomic.Bool
		dial := func(context.Context) (store.Store, error) { return server.Local("a member"), nil }
		late := newTrainee(t, log, quick(Config{Name: "late", Terms: "v2", Form: form, Dial: func(ctx context.Context) (store.Store, error) {
			if here.Load() {
				return dial(ctx)
			}
			return nil, errors.New("not in reach")
		}}))
		_, err := late.Next(t.Context(), nil)
		require.ErrorIs(t, err, ErrStore)
		a := newTrainee(t, log, quick(Config{Name: "a", Terms: "v1", Form: form, Dial: dial}))
		for here.Store(true); errors.Is(err, ErrStore); {
			_, err = late.Next(t.Context(), nil)
		}
		require.ErrorIs(t, err, comm.ErrMismatch)
		cfg := a.cfg
		cfg.limit = 30 * time.Second
		_, err = Join(t.Context(), cfg, Plain{})
		require.ErrorIs(t, err, ErrIdentity)
		cfg.Name, cfg.Terms = "b", "v2"
		_, err = Join(t.Context(), cfg, Plain{})
		require.ErrorIs(t, err, comm.ErrMismatch)
		assert.ErrorContains(t, err, `"v2", those of the others "v1"`)
		cfg.Terms = "v1"
		for range 2 {
			b, err := Join(t.Context(), cfg, Plain{})
			require.NoError(t, err)
			require.NoError(t, b.Close())
		}
		require.NoError(t, errors.Join(late.Close(), a.Close(), server.Close()))
	})
	denied := logged.Lines("a process that is no member of this job was refused\" member=a")
	require.Len(t, denied, 2, "of late and b")
	assert.Contains(t, denied[1], `the terms of b have`)
	assert.Contains(t, denied[1], `those of the others`)
}

// TestVersionsMeet: members of another version are refused by name, whoever has come first, and both sides hear why.
func TestVersionsMeet(t *testing.T) {
	logged := logtest.Capture(t)
	const older = "elastic-1"
	config := func(server *store.Server) Config {
		return quick(Config{
			Name:    "a",
			Min:     1,
			Form:    new(rooms).form,
			Runtime: cpu.New(),
			Dial:    func(context.Context) (store.Store, error) { return server.Local("a member"), nil },
		})
	}

	// This version comes to members of an older one, which read why it does not take part.
	server := store.NewServer(store.Options{})
	kv := server.Local("older")
	require.NoError(t, kv.Set(t.Context(), termsKey, []byte(older+" ")))
	denied := make(chan string, 1)
	_, err := kv.Watch(t.Context(), deniedKeys, func(e store.Event) {
		if !e.Deleted {
			denied <- string(e.Value)
		}
	})
	require.NoError(t, err)
	_, err = Join(t.Context(), config(server), Plain{})
	require.ErrorIs(t, err, comm.ErrMismatch)
	says := fmt.Sprintf("the terms of a have %q, those of the others %q", version, older)
	assert.ErrorContains(t, err, says)
	assert.Contains(t, <-denied, says)
	require.NoError(t, server.Close())

	// An older one comes to a member of this version: it finds the terms at once, and this one hears of it.
	server = store.NewServer(store.Options{})
	m, err := Join(t.Context(), config(server), Plain{})
	require.NoError(t, err)
	kv = server.Local("older")
	first, ok, err := kv.CompareAndSet(t.Context(), termsKey, 0, []byte(older+" "))
	require.NoError(t, err)
	assert.False(t, ok)
	assert.Equal(t, version+" ", string(first.Value))
	require.NoError(t, kv.Set(t.Context(), deniedKeys+"b", []byte("the terms of b have "+older), store.Lease))
	require.Eventually(t, func() bool {
		return len(logged.Lines("a process that is no member of this job was refused\" member=a reason=\"the terms of b have "+older)) == 1
	}, time.Minute, time.Millisecond)
	require.NoError(t, errors.Join(m.Close(), server.Close()))
}

// TestBindFails: a trainer that says of each communicator that a peer is lost is tried again, but neither at once nor
// forever.
func TestBindFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, tried := store.NewServer(store.Options{}), 0
		dial := func(context.Context) (store.Store, error) { return server.Local("a"), nil }
		cfg := Config{Name: "a", Min: 1, Dial: dial, Form: new(rooms).form, limit: 300 * time.Millisecond, Silence: time.Second}
		m, err := Join(t.Context(), cfg, &altered{Trainer: Plain{}, bind: func(context.Context, comm.Communicator) error {
			tried++
			return comm.ErrPeerFailed
		}})
		require.NoError(t, err)
		_, err = m.Next(t.Context(), nil)
		require.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.Equal(t, 10, tried) // after 1, 2, 4, … 64, 100, 100 ms
		require.NoError(t, errors.Join(m.Close(), server.Close()))
	})
}

// TestUnnoticed: a member vanishes in the middle of a step, over communicators that do not notice.
func TestUnnoticed(t *testing.T) {
	for _, victim := range []int{0, 2} {
		form, log, dial := new(rooms).form, newReplay(), keepStore(t)
		var list []*trainee
		for _, name := range []string{"a", "b", "c"} {
			list = append(list, newTrainee(t, log, quick(Config{Name: name, Form: form, Dial: dial})))
		}
		over := make(chan bool, 2)
		together(t, list, func(a *trainee, e *Epoch, made int) bool {
			switch {
			case a == list[victim] && len(e.Members) == 3 && made == 3:
				a.guard.Lock()
				a.killed = true
				a.guard.Unlock()
				a.end()
				a.gone.Wait()
				for range 2 { // its communicator is as it was
					select {
					case <-over:
					case <-time.After(time.Minute):
						t.Error("the others wait for it")
						a.kill()
					}
				}
				return true
			case list[victim].dead() && len(e.Members) == 2 && made == 3:
				over <- true
				return true
			}
			return false
		})
		log.repeat(t, list[1].steps, list[1:2])
		for _, a := range list {
			assert.NoError(t, a.Close())
		}
	}
}

// TestFullDisk: a member that has no room for a checkpoint, or for what one that joins needs, ends with that error. The others go on
// without it, and the one that joins has its state from another.
func TestFullDisk(t *testing.T) {
	full := &fs.PathError{Op: "write", Path: "checkpoint", Err: syscall.ENOSPC}
	for where, victim := range map[string]int{"a step": 1, "SharedState": 0} {
		t.Run(where, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			form, log, dial := new(rooms).form, newReplay(), keepStore(t)
			var list []*trainee
			for _, name := range []string{"a", "b", "c"} {
				list = append(list, newTrainee(t, log, Config{Name: name, Form: form, Dial: dial}))
			}
			var once sync.Once
			begun, pair := make(chan struct{}), make(chan struct{}) // a trains, which saves for the others; a and b train
			if where == "SharedState" {
				list[0].trainer = &altered{Trainer: list[0], save: func(ctx context.Context) ([]byte, error) {
					select {
					case <-pair:
						return nil, full
					default:
						return list[0].SharedState(ctx)
					}
				}}
			}
			var all sync.WaitGroup
			for i, a := range list {
				all.Go(func() {
					if i > 0 {
						select {
						case <-[]chan struct{}{begun, pair}[i-1]:
						case <-ctx.Done():
						}
					}
					last, made := (*Epoch)(nil), 0
					err := a.Run(ctx, func(ctx context.Context, e *Epoch) error {
						if e != last {
							last, made = e, 0
						}
						if err := a.step(ctx, t, e); err != nil {
							return err
						}
						if made++; i == 0 && a.steps == 1 {
							close(begun)
						}
						c := slices.Contains(e.Members, "c")
						switch {
						case i == victim && where == "a step" && len(e.Members) == 3:
							return full
						case i == 1 && !c && len(e.Members) == 2 && made == 1:
							once.Do(func() { close(pair) })
						case c && len(e.Members) == 2 && made == 5:
							return io.EOF
						}
						return nil
					})
					if i == victim {
						assert.ErrorIs(t, err, syscall.ENOSPC)
					} else {
						assert.NoError(t, err)
					}
				})
			}
			all.Wait()
			left := slices.Delete(slices.Clone(list), victim, victim+1)
			log.repeat(t, left[0].steps, left)
			for _, a := range list {
				_ = a.Close()
			}
		})
	}
}

// TestClocks: members whose clocks are decades apart, as one that has jumped, train together.
func TestClocks(t *testing.T) {
	log, dial := newReplay(), keepStore(t)
	var list []*trainee
	for i, name := range []string{"a", "b", "c"} {
		cfg := Config{Name: name, Min: 3, Dial: dial}
		clock := conf.Clone()
		clock.Time = func() time.Time { return time.Now().AddDate(40*(i-1), 0, 0) }
		cfg.Form = func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
			return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: clock, Listen: "localhost"})
		}
		list = append(list, newTrainee(t, log, cfg))
	}
	together(t, list, func(_ *trainee, _ *Epoch, made int) bool { return made == 5 })
	log.repeat(t, list[0].steps, list)
	for _, a := range list {
		a.mu.Lock()
		assert.Contains(t, a.session.String(), " m=", "waits are by the monotonic clock")
		a.mu.Unlock()
		assert.NoError(t, a.Close())
	}
}

// TestHash: a member whose state differs is named by all, before the first step.
func TestHash(t *testing.T) {
	form, log, dial := new(rooms).form, newReplay(), keepStore(t)
	var list []*trainee
	for _, name := range []string{"a", "b", "c"} {
		a := newTrainee(t, log, Config{Name: name, Form: form, Min: 3, Dial: dial})
		if name == "c" {
			a.trainer = &altered{Trainer: a, load: func(ctx context.Context, states ...[]byte) error {
				err := a.Restore(ctx, states...)
				a.values[0] = -1
				return err
			}}
		}
		list = append(list, a)
	}
	var all sync.WaitGroup
	for _, a := range list {
		all.Go(func() {
			err := a.run(t.Context(), t, func(*Epoch, int) bool { return false })
			assert.ErrorIs(t, err, comm.ErrMismatch)
			assert.ErrorContains(t, err, "the state of c differs from the others'")
		})
	}
	all.Wait()
	assert.Empty(t, log.steps)
	for _, a := range list {
		_ = a.Close()
	}
}

// hoarder is a trainer with a residual.
type hoarder struct {
	Plain
	residual *runtime.Tensor
}

func (h hoarder) Residuals() ([]*runtime.Tensor, error) { return []*runtime.Tensor{h.residual}, nil }

// TestHashMemory: the hash of a state, and the norm of a residual, take no memory of its size.
func TestHashMemory(t *testing.T) {
	rt := cpu.New()
	x, err := runtime.New(rt, dtype.F32, 8<<20)
	require.NoError(t, err)
	require.NoError(t, x.Fill(0.5))
	m := &Member{cfg: Config{Tensors: []*runtime.Tensor{x}}, trainer: hoarder{residual: x}}
	var before, after goruntime.MemStats
	goruntime.ReadMemStats(&before)
	first, err := m.hash(t.Context())
	require.NoError(t, err)
	norm, err := m.residualNorm()
	require.NoError(t, err)
	goruntime.ReadMemStats(&after)
	assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4<<20))
	assert.Equal(t, math.Sqrt(float64(x.Len())/4), norm)
	values, err := cpu.Slice[float32](x)
	require.NoError(t, err)
	for _, i := range []int{0, 1<<20 - 1, x.Len() - 1} {
		values[i]++
		h, err := m.hash(t.Context())
		require.NoError(t, err)
		assert.NotEqual(t, first, h, "element %d", i)
		values[i]--
	}
	require.NoError(t, errors.Join(x.Free(), rt.Close()))
}

// interrupted is a communicator that fails after a wait that was successful.
type interrupted struct {
	comm.Wrapped
	comm.Waits
}

func interrupt(c comm.Communicator, now func() bool) comm.Communicator {
	return &interrupted{comm.Wrap(c), comm.Waits{Wait: func(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
		sub, err := w.Make(ctx, c)
		if err == nil && w.Op == comm.OpSync && now() {
			err = comm.ErrPeerFailed
			c.Abort(err)
		}
		return sub, err
	}}}
}

// TestInDoubt is cooperative termination (Bernstein, Hadzilacos, Goodman, 1987, §7.4): a member loses the others when it has voted, and does not know whether they have committed: they have, and so
// does it. If it loses them before, as by an exchange that was in flight on a device, all make the step again. Nothing is sent twice or lost.
func TestInDoubt(t *testing.T) {
	const at = 5
	for name, by := range map[string]struct{ wait, votes int }{"in the exchange": {0, 1}, "in flight": {1, 2}, "behind the vote": {2, 1}} {
		t.Run(name, func(t *testing.T) {
			rooms, log, dial := new(rooms), newReplay(), keepStore(t)
			var list []*trainee
			times, calls := 0, 0
			for i, name := range []string{"a", "b", "c"} {
				cfg := Config{Name: name, Min: 3, Dial: dial}
				wait := 0 // in Commit its number
				var a *trainee
				cfg.Form = func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
					c, err := rooms.form(ctx, kv, p)
					if i == 1 && err == nil {
						c = interrupt(c, func() bool {
							if a == nil || a.steps != at || times > 0 {
								return false
							}
							now := wait == by.wait
							if now {
								times++
							}
							if wait > 0 {
								wait++
							}
							return now
						})
					}
					return c, err
				}
				a = newTrainee(t, log, cfg)
				if i == 1 {
					a.BeforeCommit(func(ctx context.Context) error {
						if a.steps == at {
							calls++
						}
						wait = 1
						defer func() { wait = 0 }()
						return a.Commit(ctx)
					})
				}
				list = append(list, a)
			}
			together(t, list, func(_ *trainee, e *Epoch, made int) bool { return e.Number >= 2 && made == 10 })
			require.Equal(t, 1, times)
			assert.Equal(t, by.votes, calls, "votes on step %d", at)
			log.repeat(t, list[1].steps, list)
			for _, a := range list {
				assert.NoError(t, a.Close())
			}
		})
	}
}

// TestInDoubtAtTheEnd: members lose the others when they have voted on the last step. The others have committed it,
// and are gone for good, so fewer than Min are here. Members in doubt commit it as well, and the job has ended for
// them.
func TestInDoubtAtTheEnd(t *testing.T) {
	for _, doubters := range []int{1, 2} {
		t.Run(fmt.Sprint(doubters), func(t *testing.T) {
			bubble(t, func(t *testing.T) { inDoubtAtTheEnd(t, doubters) })
		})
	}
}

func inDoubtAtTheEnd(t *testing.T, doubters int) {
	const size, last = 4, 5
	rooms, log, dial := new(rooms), newReplay(), keepStore(t)
	over := make(chan struct{}) // the others are gone
	var list []*trainee
	for i := range size {
		cfg := quick(Config{Name: name(i), Min: size, Dial: dial})
		waits := 0 // in Commit
		var a *trainee
		cfg.Form = func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
			c, err := rooms.form(ctx, kv, p)
			if i < doubters && err == nil {
				c = interrupt(c, func() bool {
					if a == nil || a.steps != last || waits == 0 {
						return false
					}
					waits++
					if waits < 3 {
						return false
					}
					<-over
					return true
				})
			}
			return c, err
		}
		a = newTrainee(t, log, cfg)
		a.BeforeCommit(func(ctx context.Context) error {
			waits = 1
			defer func() { waits = 0 }()
			return a.Commit(ctx)
		})
		list = append(list, a)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var others, all sync.WaitGroup
	for i, a := range list {
		group := &others
		if i < doubters {
			group = &all
		}
		group.Go(func() {
			assert.NoError(t, a.run(ctx, t, func(*Epoch, int) bool { return a.steps > last }))
			assert.NoError(t, a.Close())
		})
	}
	others.Wait()
	close(over)
	all.Wait()
	log.repeat(t, last+1, list)
}

// TestStoppedWaiting: a member in doubt whose wait ends does not know what the others decide from then on. They have
// committed the step by what it had said: it joins them again.
func TestStoppedWaiting(t *testing.T) { bubble(t, stoppedWaiting) }

func stoppedWaiting(t *testing.T) {
	const doubted, steps = 3, 6
	rooms, log, dial := new(rooms), newReplay(), keepStore(t)
	kv, err := dial(t.Context())
	require.NoError(t, err)
	stopped := make(chan struct{})
	var list []*trainee
	for i := range 2 {
		cfg := quick(Config{Name: name(i), Min: 2, Dial: dial})
		waits := 0 // in Commit
		doubts := false
		var a *trainee
		cfg.Form = func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
			c, err := rooms.form(ctx, kv, p)
			if err != nil {
				return nil, err
			}
			return interrupt(c, func() bool {
				if a == nil || a.steps != doubted || waits == 0 || doubts {
					return false
				}
				waits++
				doubts = waits == 3
				if doubts && i == 1 {
					<-stopped
				}
				return doubts
			}), nil
		}
		a = newTrainee(t, log, cfg)
		a.BeforeCommit(func(ctx context.Context) error {
			waits = 1
			defer func() { waits = 0 }()
			return a.Commit(ctx)
		})
		list = append(list, a)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for i, a := range list {
		all.Go(func() {
			before := 0
			assert.NoError(t, a.Run(ctx, func(ctx context.Context, e *Epoch) error {
				if a.steps == steps {
					return io.EOF
				}
				if i > 0 || a.steps != doubted || before > 0 {
					return a.step(ctx, t, e)
				}
				before++
				bounded, cancel := context.WithTimeout(ctx, a.cfg.Silence)
				defer cancel()
				err := a.step(bounded, t, e)
				assert.ErrorIs(t, err, comm.ErrTimeout)
				close(stopped)
				for number := e.Number; number == e.Number && ctx.Err() == nil; time.Sleep(time.Millisecond) {
					now, err := kv.Get(ctx, epochKey)
					assert.NoError(t, err)
					r := new(record)
					assert.NoError(t, json.Unmarshal(now, r))
					number = r.Number
				}
				return err
			}))
		})
	}
	all.Wait()
	require.NoError(t, ctx.Err())
	log.repeat(t, steps, list)
	for _, a := range list {
		assert.NoError(t, a.Close())
	}
}

// TestHung: a member that lives, and does not come to the exchange of a step, is put out after Patience, over
// communicators whose waits have no end. When it goes on, it joins the others again.
func TestHung(t *testing.T) { bubble(t, func(t *testing.T) { hung(t, nil) }) }

// TestHungBoundary: the same if the others wait at a boundary, as their waits in a step have a bound.
func TestHungBoundary(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hung(t, func(c comm.Communicator) comm.Communicator { return comm.Limit(c, 100*time.Millisecond, nil) })
	})
}

// patient are the times of members that wait for others which live.
func patient(cfg Config) Config {
	cfg = quick(cfg)
	cfg.Patience = 8 * time.Second
	return cfg
}

// wrapped forms communicators with a wrapper, if that is not nil.
func wrapped(form func(context.Context, store.Store, Place) (comm.Communicator, error), wrap func(comm.Communicator) comm.Communicator) func(context.Context, store.Store, Place) (comm.Communicator, error) {
	return func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
		c, err := form(ctx, kv, p)
		if err != nil || wrap == nil {
			return c, err
		}
		return wrap(c), nil
	}
}

func hung(t *testing.T, wrap func(comm.Communicator) comm.Communicator) {
	const hangs = 3
	said := logtest.Capture(t)
	rooms, log, dial := new(rooms), newReplay(), keepStore(t)
	var list []*trainee
	for i := range 3 {
		cfg := patient(Config{Name: name(i), Dial: dial, Min: 2})
		cfg.Form = wrapped(rooms.form, wrap)
		list = append(list, newTrainee(t, log, cfg))
	}
	goesOn := make(chan struct{})
	var once sync.Once
	var began atomic.Pointer[time.Time]
	together(t, list, func(a *trainee, e *Epoch, made int) bool {
		switch {
		case a == list[2] && a.steps == hangs:
			now := time.Now()
			began.Store(&now)
			<-goesOn
		case len(e.Members) == 2 && made == 2:
			once.Do(func() {
				took := time.Since(*began.Load())
				assert.GreaterOrEqual(t, took, a.cfg.Patience)
				assert.Less(t, took, a.cfg.Patience+3*a.cfg.Silence)
				close(goesOn)
			})
		}
		return len(e.Members) == 3 && a.steps > hangs && made == 5
	})
	assert.True(t, log.joined[within(list[0].epoch.Number, name(2))])
	log.repeat(t, list[0].steps, list)
	out := said.Lines("going on without members that live, but do not come")
	if assert.NotEmpty(t, out) {
		assert.Contains(t, out[0], fmt.Sprintf("hung=%q", name(2)))
		assert.Contains(t, out[0], "Config.Patience")
	}
	assert.Len(t, said.Lines("the residuals of lost members are gone"), 1)
	dropped := said.Lines("this member joins again, without its residuals")
	if assert.Len(t, dropped, 1) {
		assert.Contains(t, dropped[0], fmt.Sprintf("member=%q", name(2)))
	}
	for _, a := range list {
		assert.NoError(t, a.Close())
	}
}

// TestEvaluates: members that are slower than the others keep their places: each comes within Patience of the one
// before it, and nobody counts from the first. Where the exchange is aborted meanwhile, they do as well.
func TestEvaluates(t *testing.T) { bubble(t, func(t *testing.T) { evaluates(t, 3, 2, nil) }) }

// TestEvaluatesBoundary: the same if the others wait at the boundary.
func TestEvaluatesBoundary(t *testing.T) {
	bubble(t, func(t *testing.T) {
		evaluates(t, 3, 2, func(c comm.Communicator) comm.Communicator { return comm.Limit(c, 100*time.Millisecond, nil) })
	})
}

// TestHungMin: a member that hangs keeps its place if the others are fewer than Min.
func TestHungMin(t *testing.T) { bubble(t, func(t *testing.T) { evaluates(t, 2, 2, nil) }) }

// evaluates has all members but the first be slow once, each for 3/4 of Patience more than the one before it. Of as
// few as there have to be, each is slower than Patience.
func evaluates(t *testing.T, members, least int, wrap func(comm.Communicator) comm.Communicator) {
	const slow, steps = 3, 9
	rooms, log, dial := new(rooms), newReplay(), keepStore(t)
	var list []*trainee
	for i := range members {
		cfg := patient(Config{Name: name(i), Dial: dial, Min: least})
		cfg.Form = wrapped(rooms.form, wrap)
		list = append(list, newTrainee(t, log, cfg))
	}
	var done [3]bool
	var began atomic.Uint64 // the epoch in which the members are slow
	together(t, list, func(a *trainee, e *Epoch, made int) bool {
		if a.steps >= slow {
			assert.Len(t, e.Members, members)
		}
		if a.steps >= slow && members == least { // nor do they make the step again
			began.CompareAndSwap(0, e.Number)
			assert.Equal(t, began.Load(), e.Number)
		}
		rank := slices.Index(list, a)
		if len(e.Members) == members && a.steps >= slow && !done[rank] {
			done[rank] = true
			more := 3 * a.cfg.Patience / 4
			if members == least {
				more = 2 * a.cfg.Patience
			}
			time.Sleep(time.Duration(rank) * more)
		}
		return a.steps >= steps && done[rank]
	})
	log.repeat(t, list[0].steps, list)
	for _, a := range list {
		assert.NoError(t, a.Close())
	}
}
