package elastic

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net"
	goruntime "runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// cable is a forwarder to an address, which can be cut and mended.
type cable struct {
	t       *testing.T
	address string
	to      string

	mu    sync.Mutex
	l     net.Listener
	conns []net.Conn
}

func newCable(t *testing.T, to string) *cable {
	c := &cable{t: t, address: "127.0.0.1:0", to: to}
	c.mend()
	t.Cleanup(c.cut)
	return c
}

func (c *cable) mend() {
	l, err := net.Listen("tcp", c.address)
	require.NoError(c.t, err)
	c.address, c.l = l.Addr().String(), l
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", c.to)
			if err != nil {
				_ = from.Close()
				continue
			}
			c.mu.Lock()
			c.conns = append(c.conns, from, to)
			c.mu.Unlock()
			for _, pair := range [][2]net.Conn{{from, to}, {to, from}} {
				go func() {
					_, _ = io.Copy(pair[0], pair[1])
					_ = pair[0].Close()
				}()
			}
		}
	}()
}

func (c *cable) cut() {
	_ = c.l.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		_ = conn.Close()
	}
	c.conns = nil
}

// quick are the times of members that wait in vain.
func quick(cfg Config) Config {
	cfg.Silence, cfg.Patience = 400*time.Millisecond, time.Second
	return cfg
}

// together runs members until done says so, and returns when all have ended.
func together(t *testing.T, list []*trainee, done func(a *trainee, e *Epoch, made int) bool) {
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
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

// TestPartition cuts the member with the store off from the two others. They go on; it stops with ErrMinority, joins them
// when the network is whole, and leaves in order later.
func TestPartition(t *testing.T) {
	t.Parallel() // most of it is waiting
	over(t, func(t *testing.T, form former) {
		log := newReplay()
		own, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		at := own.Addr().String()
		require.NoError(t, own.Close())
		line := newCable(t, at)
		var cut atomic.Bool
		list := []*trainee{newTrainee(t, log, quick(Config{Name: "a", Form: form, Listen: at, Advertise: line.address}))}
		list[0].cfg.TLS = conf.Clone() // of its connections to others
		list[0].cfg.TLS.VerifyConnection = func(tls.ConnectionState) error {
			if cut.Load() {
				return net.ErrClosed
			}
			return nil
		}
		for _, name := range []string{"b", "c"} {
			list = append(list, newTrainee(t, log, quick(Config{Name: name, Form: form, Peers: []string{line.address}})))
		}
		const never = math.MaxUint64
		var minority error
		var all sync.WaitGroup
		var until atomic.Uint64
		until.Store(never)
		all.Go(func() {
			var failed error
			for {
				e, err := list[0].Next(t.Context(), failed)
				if failed = nil; errors.Is(err, ErrMinority) {
					if minority == nil {
						line.mend()
						cut.Store(false)
					}
					minority = err
					continue
				}
				if errors.Is(err, ErrLeft) || !assert.NoError(t, err) {
					return
				}
				if minority != nil && until.CompareAndSwap(never, list[0].steps+20) {
					list[0].Leave()
				}
				if failed = list[0].step(t.Context(), t, e); len(e.Members) == 3 && minority == nil {
					cut.Store(true)
					line.cut()
					comm.AbortAll(e.Comm, context.Canceled)
				}
			}
		})
		together(t, list[1:], func(a *trainee, _ *Epoch, _ int) bool { return a.steps >= until.Load() })
		all.Wait()
		assert.ErrorIs(t, minority, ErrMinority)
		log.repeat(t, until.Load(), list[1:])
		for _, a := range list {
			assert.NoError(t, a.Close())
		}
	})
}

// TestMajorityLost: of three members two are killed, and the third does not go on. It may leave.
func TestMajorityLost(t *testing.T) {
	t.Parallel() // most of it is waiting
	over(t, func(t *testing.T, form former) {
		log := newReplay()
		list := []*trainee{newTrainee(t, log, quick(Config{Name: "a", Form: form}))}
		for _, name := range []string{"b", "c"} {
			list = append(list, newTrainee(t, log, quick(Config{Name: name, Form: form, Peers: []string{list[0].Address()}})))
		}
		var all sync.WaitGroup
		errs := make([]error, 3)
		for i, a := range list {
			all.Go(func() {
				var e *Epoch
				var failed error
				for errs[i] == nil {
					if e, errs[i] = a.Next(t.Context(), failed); errs[i] != nil {
						return
					}
					if failed = a.step(t.Context(), t, e); failed == nil && i < 2 && len(e.Members) == 3 {
						a.kill()
					}
				}
			})
		}
		all.Wait()
		require.ErrorIs(t, errs[2], ErrMinority)
		list[2].Leave()
		_, err := list[2].Next(t.Context(), nil)
		require.ErrorIs(t, err, ErrLeft)
		_ = list[2].Close()
	})
}

// TestSecondOfTwo: of two members with stores of their own the first outlives the second, and the second says that it cannot
// outlive the first.
func TestSecondOfTwo(t *testing.T) {
	t.Parallel() // most of it is waiting
	over(t, func(t *testing.T, form former) {
		for victim, want := range []error{ErrMinority, nil} {
			log := newReplay()
			list := []*trainee{newTrainee(t, log, quick(Config{Name: "a", Form: form}))}
			list = append(list, newTrainee(t, log, quick(Config{Name: "b", Form: form, Peers: []string{list[0].Address()}})))
			var all sync.WaitGroup
			began := make(chan struct{}) // the job, by the first
			begin := sync.OnceFunc(func() { close(began) })
			for i, a := range list {
				all.Go(func() {
					var failed error
					if i > 0 {
						<-began
					}
					for pair := false; ; {
						e, err := a.Next(t.Context(), failed)
						begin()
						if i == victim && err != nil {
							return
						}
						if err != nil || len(e.Members) == 1 && pair {
							assert.ErrorIs(t, err, want)
							if want != nil {
								assert.ErrorContains(t, err, "1 of 2 members of an epoch are here; missing: a")
							}
							return
						}
						pair = len(e.Members) == 2
						if failed = a.step(t.Context(), t, e); failed == nil && i == victim && pair {
							a.kill()
						}
					}
				})
			}
			all.Wait()
			for _, a := range list {
				_ = a.Close()
			}
		}
	})
}

// slow is a store that takes its time.
type slow struct{ store.Store }

func (s slow) Set(ctx context.Context, key string, value []byte, options ...store.Option) error {
	time.Sleep(30 * time.Millisecond)
	return s.Store.Set(ctx, key, value, options...)
}

// TestStoreThatOutlives: with a store apart from the members, however slow, one of three goes on without the others, and
// another joins it.
func TestStoreThatOutlives(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	form, log := new(rooms).form, newReplay()
	dial := func(context.Context) (store.Store, error) { return slow{server.Local("a member")}, nil }
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
func TestLeaverAlone(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	form, log := new(rooms).form, newReplay()
	dial := func(context.Context) (store.Store, error) { return server.Local("a member"), nil }
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
func TestLeaverWaits(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
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

// TestReplaceAll: all members leave when as many wait to join as there may be. They are gone when the others have the state, and what they
// had not sent is not lost.
func TestReplaceAll(t *testing.T) {
	for most := range 3 {
		most++
		form, log := new(rooms).form, newReplay()
		var old, fresh []*trainee
		join := func() *trainee {
			cfg := quick(Config{Name: name(len(old) + len(fresh)), Form: form, Min: most, Max: most})
			for _, a := range slices.Concat(old, fresh) {
				cfg.Peers = append(cfg.Peers, a.Address())
			}
			return newTrainee(t, log, cfg)
		}
		var all sync.WaitGroup
		ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
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

// TestLeaveWhileWaiting: a member that waits for others, or for room, leaves at once, and one that has the state after its patience.
func TestLeaveWhileWaiting(t *testing.T) {
	form, log := new(rooms).form, newReplay()
	a := newTrainee(t, log, quick(Config{Name: "a", Form: form, Min: 2, Max: 2}))
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

	b := newTrainee(t, log, quick(Config{Name: "b", Form: form, Min: 2, Max: 2}))
	join := func(name string) *trainee {
		return newTrainee(t, log, quick(Config{Name: name, Form: form, Min: 2, Max: 2, Peers: []string{b.Address()}}))
	}
	c := join("c")
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
			log := newReplay()
			var list []*trainee
			for _, name := range names {
				cfg := Config{Name: name, Form: form, Min: len(names)}
				for _, a := range list {
					cfg.Peers = append(cfg.Peers, a.Address())
				}
				list = append(list, newTrainee(t, log, cfg))
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
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	form, log := new(rooms).form, newReplay()
	dial := func(context.Context) (store.Store, error) { return server.Local("a member"), nil }
	var list []*trainee
	for _, name := range []string{"a", "b", "c"} {
		list = append(list, newTrainee(t, log, Config{Name: name, Form: form, Dial: dial, Min: 3, Patience: time.Minute}))
	}
	for _, a := range list[:2] {
		go func() {
			assert.NoError(t, a.until(t.Context(), func() (bool, error) {
				v, _ := a.look()
				return a.status.Waiting && slices.ContainsFunc(v.present, func(s status) bool { return s.Leaving }), nil
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

// TestEnded: in a store that outlives members, one for whom there was no room, and one that comes later, find that the others have made the
// last step, and make none.
func TestEnded(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	form, log := new(rooms).form, newReplay()
	join := func(name string) *trainee {
		dial := func(context.Context) (store.Store, error) { return server.Local("a member"), nil }
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
	for _, a := range list {
		assert.NoError(t, a.Close())
	}
	for _, late := range []*trainee{<-waiting, join("d")} {
		_, err := late.Next(t.Context(), nil)
		require.ErrorIs(t, err, ErrEnded)
		require.NoError(t, late.Run(t.Context(), func(context.Context, *Epoch) error { return errors.New("a step after the last one") }))
		assert.NoError(t, late.Close())
	}
}

// TestLostConnection: the io.EOF of a connection is no end of a job.
func TestLostConnection(t *testing.T) {
	tries := 0
	m, err := Join(t.Context(), Config{Name: "a", Min: 1, TLS: conf, Form: new(rooms).form, Bind: func(context.Context, *Epoch) error { return nil }})
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

// TestSlowHandshake: a member whose handshakes take longer than Silence, as one that has next to no processor, joins.
func TestSlowHandshake(t *testing.T) {
	form, log := new(rooms).form, newReplay()
	list := []*trainee{newTrainee(t, log, Config{Name: "a", Form: form, Silence: 200 * time.Millisecond})}
	cfg := Config{Name: "b", Form: form, Silence: 200 * time.Millisecond, Peers: []string{list[0].Address()}, TLS: conf.Clone()}
	cfg.TLS.VerifyConnection = func(tls.ConnectionState) error {
		time.Sleep(2 * cfg.Silence)
		return nil
	}
	list = append(list, newTrainee(t, log, cfg))
	together(t, list, func(_ *trainee, e *Epoch, made int) bool { return len(e.Members) == 2 && made == 3 })
	for _, a := range list {
		assert.NoError(t, a.Close())
	}
}

// TestRefused: a member with other terms, and one with a name that is taken, are refused; a name can be had again.
func TestRefused(t *testing.T) {
	form, log := new(rooms).form, newReplay()
	a := newTrainee(t, log, quick(Config{Name: "a", Terms: "width 3, v1 of it", Form: form}))
	cfg := a.cfg
	cfg.Peers, cfg.Listen, cfg.Patience = []string{a.Address()}, "", 30*time.Second
	_, err := Join(t.Context(), cfg)
	require.ErrorIs(t, err, ErrIdentity)
	cfg.Name, cfg.Terms = "b", "width 3, v2 of it"
	_, err = Join(t.Context(), cfg)
	require.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, `"v2", those of the others "v1"`)
	cfg.Terms = a.cfg.Terms
	for range 2 {
		b, err := Join(t.Context(), cfg)
		require.NoError(t, err)
		require.NoError(t, b.Close())
	}
	require.NoError(t, a.Close())
}

// TestPeersAreLate: a member is a minority while nobody answers whom it asks. Then it joins, or is refused.
func TestPeersAreLate(t *testing.T) {
	for _, terms := range []string{"v1", "v2"} {
		t.Run(terms, func(t *testing.T) {
			t.Parallel() // most of it is Patience
			form, log := new(rooms).form, newReplay()
			later, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			at := later.Addr().String()
			require.NoError(t, later.Close())
			b := newTrainee(t, log, quick(Config{Name: "b", Terms: "v1", Form: form, Peers: []string{at}}))
			_, err = b.Next(t.Context(), nil)
			require.ErrorIs(t, err, ErrMinority)
			a := newTrainee(t, log, quick(Config{Name: "a", Terms: terms, Form: form, Listen: at}))
			if terms == "v1" {
				together(t, []*trainee{a, b}, func(_ *trainee, e *Epoch, made int) bool { return len(e.Members) == 2 && made == 3 })
			} else {
				for errors.Is(err, ErrMinority) {
					_, err = b.Next(t.Context(), nil)
				}
				require.ErrorIs(t, err, comm.ErrMismatch)
			}
			assert.NoError(t, a.Close())
			assert.NoError(t, b.Close())
		})
	}
}

// TestBindFails: a Bind that says of each communicator that a peer is lost is tried again, but neither at once nor for ever.
func TestBindFails(t *testing.T) {
	tried := 0
	m, err := Join(t.Context(), Config{Name: "a", Min: 1, TLS: conf, Form: new(rooms).form, Patience: 300 * time.Millisecond, Silence: time.Second, Bind: func(context.Context, *Epoch) error {
		tried++
		return comm.ErrPeerFailed
	}})
	require.NoError(t, err)
	_, err = m.Next(t.Context(), nil)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.Greater(t, tried, 1)
	assert.Less(t, tried, 15) // 1, 2, 4, … 64, 100 ms
	require.NoError(t, m.Close())
}

// TestUnnoticed: a member vanishes in the middle of a step, over communicators that do not notice, with the store or without.
func TestUnnoticed(t *testing.T) {
	for _, victim := range []int{0, 2} {
		form, log := new(rooms).form, newReplay()
		list := []*trainee{newTrainee(t, log, quick(Config{Name: "a", Form: form}))}
		for _, name := range []string{"b", "c"} {
			list = append(list, newTrainee(t, log, quick(Config{Name: name, Form: form, Peers: []string{list[0].Address()}})))
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
				assert.NoError(t, a.server.Close())
				for range 2 { // its communicator is as it was
					select {
					case <-over:
					case <-time.After(20 * time.Second):
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
	for where, victim := range map[string]int{"a step": 1, "Save": 0} {
		t.Run(where, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
			defer cancel()
			form, log := new(rooms).form, newReplay()
			list := []*trainee{newTrainee(t, log, Config{Name: "a", Form: form})}
			for _, name := range []string{"b", "c"} {
				list = append(list, newTrainee(t, log, Config{Name: name, Form: form, Peers: []string{list[0].Address()}}))
			}
			var once sync.Once
			pair := make(chan struct{}) // a and b train
			if save := list[0].cfg.Save; where == "Save" {
				list[0].cfg.Save = func(ctx context.Context) ([]byte, error) {
					select {
					case <-pair:
						return nil, full
					default:
						return save(ctx)
					}
				}
			}
			var all sync.WaitGroup
			for i, a := range list {
				all.Go(func() {
					if i == 2 {
						<-pair
					}
					last, made := (*Epoch)(nil), 0
					err := a.Run(ctx, func(ctx context.Context, e *Epoch) error {
						if e != last {
							last, made = e, 0
						}
						if err := a.step(ctx, t, e); err != nil {
							return err
						}
						made++
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
	log := newReplay()
	var list []*trainee
	for i, name := range []string{"a", "b", "c"} {
		cfg := Config{Name: name, Min: 3, TLS: conf.Clone()}
		cfg.TLS.Time = func() time.Time { return time.Now().AddDate(40*(i-1), 0, 0) }
		cfg.Form = func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
			return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: cfg.TLS, Listen: "localhost"})
		}
		for _, a := range list {
			cfg.Peers = append(cfg.Peers, a.Address())
		}
		list = append(list, newTrainee(t, log, cfg))
	}
	together(t, list, func(_ *trainee, _ *Epoch, made int) bool { return made == 5 })
	log.repeat(t, list[0].steps, list)
	for _, a := range list {
		a.mu.Lock()
		assert.Contains(t, a.since.String(), " m=", "waits are by the monotonic clock")
		a.mu.Unlock()
		assert.NoError(t, a.Close())
	}
}

// TestHash: a member whose state differs is named by all, before the first step.
func TestHash(t *testing.T) {
	form, log := new(rooms).form, newReplay()
	list := []*trainee{newTrainee(t, log, Config{Name: "a", Form: form, Min: 3})}
	for _, name := range []string{"b", "c"} {
		cfg := Config{Name: name, Form: form, Min: 3, Peers: []string{list[0].Address()}}
		if name == "c" {
			cfg.Load = func(context.Context, []byte) error { return nil }
		}
		list = append(list, newTrainee(t, log, cfg))
	}
	var all sync.WaitGroup
	for _, a := range list {
		all.Go(func() {
			err := a.run(t.Context(), t, func(*Epoch, int) bool { return false })
			assert.ErrorIs(t, err, comm.ErrMismatch)
			assert.ErrorContains(t, err, "the state of c is not")
		})
	}
	all.Wait()
	assert.Empty(t, log.steps)
	for _, a := range list {
		_ = a.Close()
	}
}

// TestHashMemory: the hash of a state, and the norm of a residual, take no memory of its size.
func TestHashMemory(t *testing.T) {
	rt := cpu.New()
	x, err := runtime.New(rt, dtype.F32, 8<<20)
	require.NoError(t, err)
	require.NoError(t, x.Fill(0.5))
	m := &Member{cfg: Config{Tensors: []*runtime.Tensor{x}, Residuals: func() ([]*runtime.Tensor, error) { return []*runtime.Tensor{x}, nil }}}
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

// TestInDoubt: a member loses the others when it has voted, and does not know whether they have committed: they have, and so
// does it. If it loses them before, all make the step again. Nothing is sent twice or lost.
func TestInDoubt(t *testing.T) {
	const at = 5
	for name, voted := range map[string]bool{"behind the vote": true, "in the exchange": false} {
		t.Run(name, func(t *testing.T) {
			rooms, log := new(rooms), newReplay()
			var list []*trainee
			times, calls := 0, 0
			for i, name := range []string{"a", "b", "c"} {
				cfg := Config{Name: name, Min: 3}
				voting := false
				var a *trainee
				cfg.Form = func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
					c, err := rooms.form(ctx, kv, p)
					if i == 1 && err == nil {
						c = interrupt(c, func() bool {
							if a.reducer == nil || a.steps != at || voting != voted || times > 0 {
								return false
							}
							times++
							return true
						})
					}
					return c, err
				}
				for _, other := range list {
					cfg.Peers = append(cfg.Peers, other.Address())
				}
				a = newTrainee(t, log, cfg)
				bind := a.cfg.Bind
				a.cfg.Bind = func(ctx context.Context, e *Epoch) error {
					err := bind(ctx, e)
					if err == nil && i == 1 {
						a.reducer.BeforeCommit(func(ctx context.Context) error {
							if a.steps == at {
								calls++
							}
							voting = true
							defer func() { voting = false }()
							return a.Commit(ctx)
						})
					}
					return err
				}
				list = append(list, a)
			}
			together(t, list, func(_ *trainee, e *Epoch, made int) bool { return e.Number >= 2 && made == 10 })
			require.Equal(t, 1, times)
			assert.Equal(t, 1, calls, "votes on step %d", at)
			log.repeat(t, list[1].steps, list)
			for _, a := range list {
				assert.NoError(t, a.Close())
			}
		})
	}
}
