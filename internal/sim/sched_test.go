// Package sim replaces sync, sync/atomic, net and the go statement in simulations. It exists only in those builds:
// comm/internal/simulation puts this file, without its suffix, into an overlay, and makes each simulated source file
// import it.
//
// A simulation is a bubble of testing/synctest. Before and after every operation by which goroutines can see each
// other, the goroutine sleeps for a virtual time that the seed chooses (a point). No two goroutines wake at the same
// instant, because each one's wake-ups have a different remainder. So one goroutine at a time runs from a point to
// the next, and the seed decides which: it chooses the interleaving as it chooses the behavior of the network.
package sim

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// Simulation is one run. A process has at most one active simulation.
type Simulation struct {
	Seed  uint64
	Began time.Time
	network
	scale  uint64 // of points, in nanoseconds
	dense  uint64 // number of points among 256 atomic operations
	serial atomic.Int64
	ending atomic.Bool
	Rarely bool // waits poll a tenth as often

	mu     sync.Mutex
	waking map[int64]bool // instants, in Unix nanoseconds, at which goroutines will wake: one each
	hash   uint64
	points int
	noted  int                // number of events
	events [keptEvents][]byte // the last events
}

var active atomic.Pointer[Simulation]

// Mutant is the number of this process's defect, 0 for none.
var Mutant, _ = strconv.Atoi(os.Getenv("TUTTI_SIM_MUTANT"))

// keptEvents is the number of events in a report.
const keptEvents = 400

// Begin makes the goroutine that calls it the first of a simulation, inside a bubble.
func Begin(seed uint64) *Simulation {
	s := &Simulation{Seed: seed, Began: time.Now(), waking: map[int64]bool{}, hash: 14695981039346656037}
	r := Random(Mix(seed, 1))
	s.scale, s.dense = []uint64{1, 5_000, 40_000}[r.IntN(3)], []uint64{3, 40, 200}[r.IntN(3)]
	s.network = newNetwork(s)
	active.Store(s)
	s.adopt(&Node{sim: s, name: "main"}, Mix(seed, 2))
	return s
}

// End ends the simulation: goroutines that are left have no more points.
func (s *Simulation) End() {
	s.ending.Store(true)
	setLabel(nil)
	active.Store(nil)
}

// Random is a generator of numbers (SplitMix64).
type Random uint64

// Next returns the next number.
func (r *Random) Next() uint64 {
	*r += 0x9e3779b97f4a7c15
	return Mix(uint64(*r), 0)
}

// IntN returns a number below n.
func (r *Random) IntN(n int) int { return int(r.Next() >> 1 % uint64(n)) }

// Chance is true with probability 1/n.
func (r *Random) Chance(n int) bool { return r.IntN(n) == 0 }

// Between returns a random duration.
func (r *Random) Between(least, most time.Duration) time.Duration {
	return least + time.Duration(r.Next()>>1%uint64(most-least+1))
}

// Mix returns h mixed with x.
func Mix(h, x uint64) uint64 {
	h += x * 0xd6e8feb86659fd93
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// Event records an event for the report and the trace.
func (s *Simulation) Event(format string, args ...any) {
	s.mu.Lock()
	at := s.noted % keptEvents
	line := s.events[at][:0]
	s.noted++
	s.mu.Unlock()
	line = fmt.Appendf(line, "%13v ", time.Since(s.Began))
	if p := current(); p != nil {
		line = fmt.Appendf(line, "%-6s #%-3d ", p.node.name, p.serial)
	}
	line = fmt.Appendf(line, format, args...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events[at] = line
	for _, c := range line {
		s.note(uint64(c))
	}
}

// note mixes x into the hash of the trace. The caller holds mu.
func (s *Simulation) note(x uint64) { s.hash = (s.hash ^ x) * 1099511628211 }

// Trace returns a hash of all events and points, and the number of points.
func (s *Simulation) Trace() (hash uint64, points int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hash, s.points
}

// Report returns the last events.
func (s *Simulation) Report() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := min(s.noted, keptEvents)
	return string(bytes.Join(slices.Concat(s.events[s.noted%keptEvents:], s.events[:s.noted%keptEvents])[keptEvents-last:], []byte("\n")))
}

// Node is a process of the simulation.
type Node struct {
	sim  *Simulation
	name string
	ip   [4]byte
	mu   sync.Mutex
	thaw chan struct{} // nil while it runs
	dead bool
}

// Freeze stops all goroutines of a node at their next points.
func (n *Node) Freeze() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.thaw == nil {
		n.thaw = make(chan struct{})
	}
}

// Thaw resumes the goroutines, unless the node has been killed.
func (n *Node) Thaw() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.dead {
		n.release()
	}
}

// release resumes the goroutines. The caller holds mu.
func (n *Node) release() {
	if n.thaw != nil {
		close(n.thaw)
		n.thaw = nil
	}
}

// proc is a goroutine.
type proc struct {
	sim      *Simulation
	node     *Node
	serial   int64
	random   Random
	children uint64
}

//go:linkname setLabel runtime/pprof.runtime_setProfLabel
func setLabel(unsafe.Pointer)

//go:linkname getLabel runtime/pprof.runtime_getProfLabel
func getLabel() unsafe.Pointer

// current returns the goroutine's proc, nil outside a simulation. The runtime stores it in place of the labels of
// profiles.
func current() *proc {
	p := (*proc)(getLabel())
	if p == nil || p.sim.ending.Load() {
		return nil
	}
	return p
}

// remainders is the number of consecutively started goroutines that never aim at the same instant.
const remainders = 4096

func (s *Simulation) adopt(n *Node, identity uint64) *proc {
	p := &proc{sim: s, node: n, serial: s.serial.Add(1), random: Random(identity)}
	setLabel(unsafe.Pointer(p))
	return p
}

// sleep sleeps for about d, and longer while the node is frozen.
func (p *proc) sleep(d time.Duration) {
	now := time.Now().UnixNano()
	wake := now + int64(d)
	wake += (p.serial - wake%remainders + 2*remainders) % remainders
	if wake <= now {
		wake += remainders
	}
	p.sim.mu.Lock()
	for p.sim.waking[wake] { // taken by a goroutine started a multiple of remainders earlier or later
		wake += remainders
	}
	p.sim.waking[wake] = true
	p.sim.mu.Unlock()
	time.Sleep(time.Duration(wake - now))
	p.sim.mu.Lock()
	delete(p.sim.waking, wake)
	p.sim.points++
	p.sim.note(uint64(wake))
	p.sim.mu.Unlock()
	for {
		p.node.mu.Lock()
		thaw := p.node.thaw
		p.node.mu.Unlock()
		if thaw == nil {
			return
		}
		<-thaw
		time.Sleep(time.Duration(p.serial%remainders + 1))
	}
}

// Point is a point.
func Point() {
	if p := current(); p != nil {
		p.point()
	}
}

func (p *proc) point() {
	d := p.random.Next() % (p.sim.scale + 1)
	if p.random.Chance(200) {
		d *= 30
	}
	p.sleep(time.Duration(d))
}

// Linger is a point that sometimes lasts longer than other goroutines' work.
func Linger() {
	if p := current(); p != nil && p.random.Chance(8) {
		p.sleep(time.Millisecond)
	}
	Point()
}

// glance is a point at some of the operations of package atomic.
func glance() {
	if p := current(); p != nil && p.random.Next()%256 < p.sim.dense {
		p.point()
	}
}

// Pause replaces runtime.Gosched: time advances.
func Pause() {
	if p := current(); p != nil {
		p.sleep(p.random.Between(0, 20*time.Microsecond))
	}
}

// Longer is the time that a wait sleeps if it would sleep for d outside a simulation.
func Longer(d time.Duration) time.Duration {
	if s := active.Load(); s != nil && s.Rarely {
		return 10 * d
	}
	return d
}

// Processors replaces runtime.GOMAXPROCS.
func Processors(int) int {
	if s := active.Load(); s != nil {
		return []int{1, 2, 16}[Mix(s.Seed, 3)%3]
	}
	return 1
}

// RandomNumber replaces rand.Uint64.
func RandomNumber() uint64 { return current().random.Next() }

// RandomIntN replaces rand.IntN.
func RandomIntN(n int) int { return current().random.IntN(n) }

// RandomText replaces rand.Text: keys decide the order of maps.
func RandomText() string {
	r := current().random
	return fmt.Sprintf("%013x%013x", r.Next()>>12, r.Next()>>12)
}

// Go replaces the go statement.
func Go(f func()) {
	p := current()
	if p == nil {
		go f()
		return
	}
	GoOn(p.node, f)
}

// GoOn starts a goroutine on a node.
func GoOn(n *Node, f func()) {
	run := born(n, f)
	go run()
	Point()
}

// born returns f as a goroutine of a node, for the caller to start.
func born(n *Node, f func()) func() {
	p := current()
	if p == nil {
		return f
	}
	p.children++
	identity := Mix(uint64(p.random), p.children)
	serial := p.sim.serial.Add(1)
	return func() {
		setLabel(unsafe.Pointer(&proc{sim: p.sim, node: n, serial: serial, random: Random(identity)}))
		Point()
		f()
	}
}

// AfterFunc replaces time.AfterFunc.
func AfterFunc(d time.Duration, f func()) *time.Timer {
	if p := current(); p != nil {
		f = born(p.node, f)
	}
	return time.AfterFunc(d, f)
}

// AfterContext replaces context.AfterFunc.
func AfterContext(ctx context.Context, f func()) (stop func() bool) {
	if p := current(); p != nil {
		f = born(p.node, f)
	}
	return context.AfterFunc(ctx, f)
}

// RWMutex replaces sync.RWMutex.
type RWMutex struct {
	mu      sync.Mutex // held only briefly
	writing bool
	reading int
	waiting []chan struct{}
}

// take waits for the lock.
func (m *RWMutex) take(write bool) {
	Point()
	for !m.try(write) {
		m.mu.Lock()
		if m.free(write) {
			m.mu.Unlock()
			continue
		}
		c := make(chan struct{})
		m.waiting = append(m.waiting, c)
		m.mu.Unlock()
		<-c
		Point()
	}
}

func (m *RWMutex) free(write bool) bool { return !m.writing && (!write || m.reading == 0) }

func (m *RWMutex) try(write bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.free(write) {
		return false
	}
	if write {
		m.writing = true
	} else {
		m.reading++
	}
	return true
}

func (m *RWMutex) give(write bool) {
	m.mu.Lock()
	switch {
	case write && m.writing:
		m.writing = false
	case !write && m.reading > 0:
		m.reading--
	default:
		panic("sim: unlock of what is not locked")
	}
	for _, c := range m.waiting {
		close(c)
	}
	m.waiting = nil
	m.mu.Unlock()
	Point()
}

func (m *RWMutex) Lock()         { m.take(true) }
func (m *RWMutex) Unlock()       { m.give(true) }
func (m *RWMutex) RLock()        { m.take(false) }
func (m *RWMutex) RUnlock()      { m.give(false) }
func (m *RWMutex) TryLock() bool { Point(); return m.try(true) }

// Mutex replaces sync.Mutex.
type Mutex struct{ m RWMutex }

func (m *Mutex) Lock()         { m.m.Lock() }
func (m *Mutex) Unlock()       { m.m.Unlock() }
func (m *Mutex) TryLock() bool { return m.m.TryLock() }

// Locker is sync.Locker.
type Locker = sync.Locker

// Cond replaces sync.Cond.
type Cond struct {
	L       Locker
	mu      sync.Mutex
	waiting []chan struct{}
}

func (c *Cond) Wait() {
	mine := make(chan struct{})
	c.mu.Lock()
	c.waiting = append(c.waiting, mine)
	c.mu.Unlock()
	c.L.Unlock()
	<-mine
	c.L.Lock()
}

func (c *Cond) wake(n int) {
	c.mu.Lock()
	n = min(n, len(c.waiting))
	for _, w := range c.waiting[:n] {
		close(w)
	}
	c.waiting = c.waiting[n:]
	c.mu.Unlock()
	Point()
}

func (c *Cond) Signal()    { c.wake(1) }
func (c *Cond) Broadcast() { c.wake(1 << 30) }

// WaitGroup replaces sync.WaitGroup.
type WaitGroup struct {
	mu    sync.Mutex
	count int
	zero  chan struct{}
}

func (g *WaitGroup) Add(n int) {
	g.mu.Lock()
	if g.count += n; g.count == 0 && g.zero != nil {
		close(g.zero)
		g.zero = nil
	}
	g.mu.Unlock()
}

func (g *WaitGroup) Done() { g.Add(-1); Point() }

func (g *WaitGroup) Go(f func()) {
	g.Add(1)
	Go(func() {
		defer g.Done()
		f()
	})
}

func (g *WaitGroup) Wait() {
	g.mu.Lock()
	if g.count > 0 && g.zero == nil {
		g.zero = make(chan struct{})
	}
	zero := g.zero
	g.mu.Unlock()
	if zero != nil {
		<-zero
	}
	Point()
}

// Once replaces sync.Once.
type Once struct {
	m    Mutex
	done bool
}

func (o *Once) Do(f func()) {
	o.m.Lock()
	defer o.m.Unlock()
	if !o.done {
		o.done = true
		f()
	}
}

// OnceFunc is sync.OnceFunc.
func OnceFunc(f func()) func() {
	var o Once
	return func() { o.Do(f) }
}

// OnceValue is sync.OnceValue.
func OnceValue[T any](f func() T) func() T {
	var o Once
	var v T
	return func() T {
		o.Do(func() { v = f() })
		return v
	}
}

// Pool replaces sync.Pool. It keeps everything.
type Pool struct {
	New  func() any
	mu   sync.Mutex
	list []any
}

func (p *Pool) Get() any {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := len(p.list) - 1; last >= 0 {
		v := p.list[last]
		p.list = p.list[:last]
		return v
	}
	if p.New == nil {
		return nil
	}
	return p.New()
}

func (p *Pool) Put(v any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list = append(p.list, v)
}

// Map is sync.Map.
type Map = sync.Map

// number is a number of package atomic.
type number[T any, A interface {
	*X
	Load() T
	Store(T)
	Swap(T) T
	Add(T) T
	CompareAndSwap(T, T) bool
}, X any] struct{ v X }

func (n *number[T, A, X]) Load() T    { glance(); return A(&n.v).Load() }
func (n *number[T, A, X]) Store(x T)  { glance(); A(&n.v).Store(x); glance() }
func (n *number[T, A, X]) Swap(x T) T { glance(); return A(&n.v).Swap(x) }
func (n *number[T, A, X]) Add(x T) T  { glance(); y := A(&n.v).Add(x); glance(); return y }
func (n *number[T, A, X]) CompareAndSwap(old, new T) bool {
	glance()
	return A(&n.v).CompareAndSwap(old, new)
}

// Int32 and the others replace the types of package atomic.
type (
	Int32 struct {
		number[int32, *atomic.Int32, atomic.Int32]
	}
	Int64 struct {
		number[int64, *atomic.Int64, atomic.Int64]
	}
	Uint32 struct {
		number[uint32, *atomic.Uint32, atomic.Uint32]
	}
	Uint64 struct {
		number[uint64, *atomic.Uint64, atomic.Uint64]
	}
)

// Bool replaces atomic.Bool.
type Bool struct{ v atomic.Bool }

func (b *Bool) Load() bool                        { glance(); return b.v.Load() }
func (b *Bool) Store(x bool)                      { glance(); b.v.Store(x); glance() }
func (b *Bool) Swap(x bool) bool                  { glance(); return b.v.Swap(x) }
func (b *Bool) CompareAndSwap(old, new bool) bool { glance(); return b.v.CompareAndSwap(old, new) }

// Pointer replaces atomic.Pointer.
type Pointer[T any] struct{ v atomic.Pointer[T] }

func (p *Pointer[T]) Load() *T                        { glance(); return p.v.Load() }
func (p *Pointer[T]) Store(x *T)                      { glance(); p.v.Store(x); glance() }
func (p *Pointer[T]) Swap(x *T) *T                    { glance(); return p.v.Swap(x) }
func (p *Pointer[T]) CompareAndSwap(old, new *T) bool { glance(); return p.v.CompareAndSwap(old, new) }

// Sleep sleeps as a node does: longer while the node is frozen.
func Sleep(d time.Duration) { current().sleep(d) }
