package elastic

import (
	"context"
	"math/rand/v2"
	"os"
	"path"
	goruntime "runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
)

// churnVariable is how many events TestChurn has: 12 unless set, and 24 with TUTTI_EXTENDED.
const churnVariable = "TUTTI_CHURN"

// TestChurn: members join, leave, are killed, stopped and continued at random, including joining ones. The result of
// each step, parameters and residuals equal those of the same membership without faults.
func TestChurn(t *testing.T) {
	events := 12
	if os.Getenv("TUTTI_EXTENDED") != "" {
		events = 24
	}
	if n, err := strconv.Atoi(os.Getenv(churnVariable)); err == nil {
		events = n
	}
	over(t, func(t *testing.T, form former) {
		seed := uint64(time.Now().UnixNano())
		if text := os.Getenv("TUTTI_SEED"); text != "" {
			seed, _ = strconv.ParseUint(text, 10, 64)
		}
		t.Logf("seed %d", seed)
		before := count()
		server := store.NewServer(store.Options{Silence: silence})
		c := &churn{t: t, rng: rand.New(rand.NewPCG(seed, 0)), log: newReplay(), form: form, server: server}
		if path.Base(t.Name()) == "tcp" {
			c.pause = pause
		}
		c.stop.Store(1 << 62)
		c.join(1)
		c.wait()
		for n := 0; n < events; {
			n += c.event()
			c.wait()
		}
		c.log.mu.Lock()
		until := uint64(len(c.log.steps)) + 50
		c.log.mu.Unlock()
		c.stop.Store(until)
		c.all.Wait()
		c.log.repeat(t, until, c.here)
		for _, a := range c.here {
			assert.NoError(t, a.Close())
			a.free()
		}
		assert.NoError(t, server.Close())
		c.log, c.here, c.server = nil, nil, nil
		var now used
		assert.Eventually(t, func() bool {
			now = count()
			return now.goroutines <= before.goroutines+2 && now.descriptors <= before.descriptors+2 && now.memory <= before.memory+2<<20
		}, time.Minute, 100*time.Millisecond)
		t.Logf("before %+v, after %d events %+v", before, events, now)
		if t.Failed() {
			_ = pprof.Lookup("goroutine").WriteTo(os.Stdout, 1)
		}
	})
}

// used is what a process uses.
type used struct {
	goroutines, descriptors int
	memory                  uint64 // bytes of the heap that are in use
}

func count() (u used) {
	goruntime.GC()
	var m goruntime.MemStats
	goruntime.ReadMemStats(&m)
	list, _ := os.ReadDir("/proc/self/fd") // empty where there is none
	return used{goruntime.NumGoroutine(), len(list), m.HeapAlloc}
}

// free frees what a closed member has.
func (a *trainee) free() {
	if a.reducer != nil {
		_ = a.reducer.Close() // its communicator may have been aborted
	}
	for _, x := range a.tensors {
		_ = x.Free()
	}
	_ = a.rt.Close()
}

// most bounds how many members there are.
const most = 6

// churn is a run of TestChurn.
type churn struct {
	t     *testing.T
	rng   *rand.Rand
	log   *replay
	form  former
	count int

	server *store.Server // of the job's store
	here   []*trainee    // that train, or are about to
	all    sync.WaitGroup
	stop   atomic.Uint64

	pause func(c *churn) (events int) // has a process join, be stopped and go on; nil where there are none, and meanwhile
	apart string                      // the member that is that process while it trains
}

// pause is for systems where processes can be stopped.
var pause func(c *churn) (events int)

// restless is the configuration of a member that joins others.
func restless(name string, dial dialer, form former) Config {
	return Config{Name: name, Dial: dial, Form: form, Silence: silence, limit: 5 * time.Second}
}

// next returns the name of the next member.
func (c *churn) next() string {
	c.count++
	return name(c.count - 1)
}

// dial begins a session of a member in this process.
func (c *churn) dial(context.Context) (store.Store, error) { return c.server.Local("a member"), nil }

// join starts members.
func (c *churn) join(n int) (last *trainee) {
	for range n {
		a := newTrainee(c.t, c.log, restless(c.next(), c.dial, c.form))
		c.here = append(c.here, a)
		c.all.Go(func() {
			err := a.run(c.t.Context(), c.t, func(*Epoch, int) bool {
				time.Sleep(time.Millisecond) // leaves the processor to others
				return a.steps >= c.stop.Load()
			})
			if !a.dead() {
				assert.NoError(c.t, err, a.cfg.Name)
			}
			if a.steps < c.stop.Load() { // it has left, or is killed
				_ = a.Close()
				a.free()
			}
		})
		last = a
	}
	return last
}

// forget takes a member off the list.
func (c *churn) forget(a *trainee) {
	c.here = slices.DeleteFunc(c.here, func(b *trainee) bool { return a == b })
}

// kill ends a member, in the middle of whatever it does.
func (c *churn) kill(a *trainee) {
	c.forget(a)
	time.Sleep(time.Duration(c.rng.IntN(3000)) * time.Microsecond) // at another place of a step
	a.kill()
}

// event makes something happen, and returns how many events that was.
func (c *churn) event() int {
	any := c.here[c.rng.IntN(len(c.here))]
	switch kind := c.rng.IntN(7); {
	case len(c.here) < 2 || kind == 0 && len(c.here) < most:
		n := 1 + c.rng.IntN(2)
		c.join(n)
		return n
	case kind == 1 && len(c.here) < most: // joins and leaves in one boundary
		c.leave(any)
		c.join(1)
		return 2
	case kind == 2:
		c.leave(any)
		return 1
	case kind == 3 && len(c.here) < most: // is lost while it joins
		a := c.join(1)
		time.Sleep(time.Duration(c.rng.IntN(20)) * time.Millisecond)
		c.kill(a)
		return 2
	case kind == 4 && c.pause != nil && len(c.here) < most:
		again := c.pause
		c.pause = nil
		defer func() { c.pause = again }()
		return again(c)
	default:
		c.kill(any)
		return 1
	}
}

// leave has a member leave in order.
func (c *churn) leave(a *trainee) {
	c.forget(a)
	a.Leave()
}

// last returns the members of the last step, and how many steps their epoch has.
func (c *churn) last() (members []string, made int) {
	c.log.mu.Lock()
	defer c.log.mu.Unlock()
	n := uint64(len(c.log.steps))
	for made < int(n) && c.log.steps[n-1-uint64(made)].epoch == c.log.steps[n-1].epoch {
		made++
	}
	return c.log.steps[n-1].members, made
}

// wait waits until those who are here, and nobody else, have made some steps.
func (c *churn) wait() {
	var want []string
	for _, a := range c.here {
		want = append(want, a.cfg.Name)
	}
	if c.apart != "" {
		want = append(want, c.apart)
	}
	slices.Sort(want)
	var members []string
	ok := assert.Eventually(c.t, func() bool {
		c.log.mu.Lock()
		empty := len(c.log.steps) == 0
		c.log.mu.Unlock()
		if empty {
			return false
		}
		var made int
		members, made = c.last()
		for _, a := range c.here { // the epoch that they try to form may be another one
			a.mu.Lock()
			inside := a.status.Standing == stepping && a.epoch != nil && a.epoch.Comm != nil && len(a.epoch.Members) == len(want)
			a.mu.Unlock()
			if !inside {
				return false
			}
		}
		return slices.Equal(want, slices.Sorted(slices.Values(members))) && made > 2
	}, 2*time.Minute, 2*time.Millisecond)
	for _, a := range c.here {
		if a.mu.Lock(); !ok {
			v, _ := a.look()
			next, why := v.next()
			c.t.Logf("%s: store %v, %+v; sees %+v; next %v %s", a.cfg.Name, a.kv != nil, a.status, v, next, why)
		}
		a.mu.Unlock()
	}
	require.True(c.t, ok, "want %v, have %v", want, members)
}
