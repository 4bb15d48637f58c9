package p2p

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/ranks"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// NewHierarchical makes a communicator over base like [New], whose ranks may be on several hosts. Large
// collectives run in two levels there: by peer memory between the ranks of a host, and on sub-communicators
// of base between the ranks that have the same index on their hosts, each of which carries a share. It is
// collective on base.
//
// Every host has equally many successive ranks, two at least: all ranks get [comm.ErrUnsupported]
// otherwise. Where there is one host, this is New.
//
// AllReduce, Broadcast, AllGather and ReduceScatter run in levels from the size on from which that is measured to
// be faster. All else is passed on to base. So are averages where the number of ranks of a host is not a power of
// two: dividing by that is not exact. A partial result is rounded once on each host, and then as base does.
//
// A rank that aborts tells the ranks of all hosts before it ends its kernels, as those of other hosts would go on with
// wrong numbers. So no kernel ends a wait by itself: a Sync without a deadline waits for a missing rank as long as one of
// base does.
//
// Sub-communicators of base that have streams of their own have a method UseStream(uintptr) error.
func NewHierarchical(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, opts ...Option) (comm.Communicator, error) {
	ops, o, err := settings(base, rt, opts)
	if err != nil {
		return nil, err
	}
	return overHosts(ctx, base, ops, rt, o, nil)
}

// levels is the communicator of several hosts. All that it submits goes to the stream of the base.
type levels struct {
	*backend.Base
	comm.Wrapped
	streams // of the base
	check   backend.Check
	life    backend.Life
	offload offloadTable
	// over makes a sub-communicator over one of the base, with an offload table, or, for nil, with one of its own.
	over func(ctx context.Context, base comm.Communicator, t *offloadTable) (comm.Communicator, error)

	within, between level
	idle            func() bool // whether the stream is
	mu              sync.Mutex  // held while the steps of a call are submitted
	share           uintptr     // memory of shareBytes, between two steps
	free            func(share uintptr) error
}

// level is one of the two.
type level struct {
	comm.Communicator
	streams
	ranks []int // of the base
}

// shareBytes bounds what ReduceScatter and AllGather exchange between hosts in levels.
const shareBytes = 32 << 20

// newLevels makes the communicator without its levels.
func newLevels(base comm.Communicator, ops streams) *levels {
	l := &levels{Wrapped: comm.Wrap(base), streams: ops}
	l.check = backend.Check{Backend: "p2p", Rank: base.Rank(), WorldSize: base.WorldSize()}
	l.life.Timeout = backend.DeviceTimeout
	l.Base = backend.New(&l.check, &l.life, hierarchy{l})
	return l
}

// overHosts is NewHierarchical with an offload table, or, for nil, with one that it measures. After an error
// base is as it was, or aborted.
func overHosts(ctx context.Context, base comm.Communicator, ops streams, rt *cuda.Runtime, o options, t *offloadTable) (_ comm.Communicator, err error) {
	b, err := newBootstrap(base, rt)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	host, err := o.host()
	all, shareErr := b.share(ctx, hello{host: host, state: verdictOf(err)})
	if shareErr != nil {
		return nil, errors.Join(err, shareErr)
	}
	if err := worst(all, err); err != nil {
		return nil, err
	}
	each, err := perHost(all)
	if err != nil {
		return nil, err
	}
	if each == len(all) {
		c, err := newComm(ctx, base, ops, rt, o, t)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	l := newLevels(base, ops)
	l.free = rt.Deallocate
	l.over = func(ctx context.Context, base comm.Communicator, t *offloadTable) (comm.Communicator, error) {
		if ops, ok := comm.As[streams](base); ok {
			return overHosts(ctx, base, ops, rt, o, t)
		}
		return base, nil
	}
	if l.within, err = split(ctx, base, each, true); err == nil {
		l.between, err = split(ctx, base, each, false)
	}
	if err == nil {
		for _, m := range [...]level{l.within, l.between} {
			if c, ok := comm.As[interface{ BeforeAbort(func(cause error)) }](m.Communicator); ok {
				c.BeforeAbort(l.tell)
			}
		}
		within := o
		within.patience, within.before = math.MaxInt64, l.tell
		var c *Comm
		if c, err = newComm(ctx, l.within.Communicator, l.within.streams, rt, within, nil); err == nil {
			l.within.Communicator, l.within.streams = c, c
			l.idle = func() bool { return c.Stream().Idle() }
			l.share, err = rt.Allocate(shareBytes)
		}
	}
	if err == nil {
		err = errors.Join(l.follow(), rt.Synchronize(ctx))
	}
	if err = b.agree(ctx, err); err == nil && t == nil {
		sync := func(ctx context.Context) error { return l.wait(ctx, comm.Wait{Op: comm.OpSync}) }
		sizes := slices.Clone(measured)
		slices.Reverse(sizes)
		l.offload, err = (&contest{base, o, rt, l.runs, l.submit, sync, l.within.Communicator.(*Comm).Stream, sizes}).choose(ctx)
	} else if t != nil {
		l.offload = *t
	}
	if err != nil {
		return nil, errors.Join(err, l.discard())
	}
	return l, nil
}

// perHost returns how many ranks each host has, in rank order.
func perHost(all []hello) (int, error) {
	n := 1
	for n < len(all) && all[n].host == all[0].host {
		n++
	}
	seen := map[[16]byte]bool{}
	for r, h := range all {
		if h.host != all[r/n*n].host || r%n == 0 && seen[h.host] || len(all)%n != 0 {
			return 0, fmt.Errorf("p2p: %w: not all hosts have %d successive ranks, as that of rank 0 has", comm.ErrUnsupported, n)
		}
		seen[h.host] = true
	}
	if n == 1 && len(all) > 1 {
		return 0, fmt.Errorf("p2p: %w: each host has one rank", comm.ErrUnsupported)
	}
	return n, nil
}

// split splits a level off the base, whose hosts have so many ranks each.
func split(ctx context.Context, base comm.Communicator, each int, within bool) (m level, err error) {
	color, key := base.Rank()%each, base.Rank()/each
	first, step, n := color, each, base.WorldSize()/each
	if within {
		color, key = key, color
		first, step, n = color*each, 1, each
	}
	for i := range n {
		m.ranks = append(m.ranks, first+i*step)
	}
	if m.Communicator, err = base.Split(ctx, color, key); err != nil {
		return level{}, err
	}
	var ok bool
	if m.streams, ok = comm.As[streams](m.Communicator); !ok {
		err = fmt.Errorf("p2p: %w: sub-communicators of the base have no stream", comm.ErrUnsupported)
	}
	return m, err
}

// follow has both levels submit to the stream of the base, which may have changed.
func (l *levels) follow() error {
	stream := l.CommStream()
	for _, m := range [...]*level{&l.within, &l.between} {
		if m.CommStream() == stream {
			continue
		}
		user, ok := comm.As[interface{ UseStream(stream uintptr) error }](m.Communicator)
		if !ok {
			return fmt.Errorf("p2p: %w: sub-communicators of the base cannot use its stream", comm.ErrUnsupported)
		}
		if err := user.UseStream(stream); err != nil {
			return err
		}
	}
	return nil
}

// discard gives back what the communicator has beside its base. Memory that may be in use stays.
func (l *levels) discard() (err error) {
	for _, m := range [...]level{l.within, l.between} {
		if m.Communicator != nil {
			err = errors.Join(err, m.Close())
		}
	}
	if err == nil && l.share != 0 {
		err = l.free(l.share)
	}
	return err
}

// hierarchy is the [backend.Backend] of levels.
type hierarchy struct{ l *levels }

// Submit implements [backend.Backend].
func (h hierarchy) Submit(x comm.Call) error {
	l := h.l
	if err := l.life.Err(); err != nil {
		return err
	}
	if x.Count > 0 && l.offload.faster(&x) && l.runs(&x) {
		return l.submit(&x)
	}
	return level{}.explain(x.Make(l.Communicator))
}

// SubmitTogether implements [backend.Backend]. The base gets the group.
func (h hierarchy) SubmitTogether(calls []comm.Call) error {
	if err := h.l.life.Err(); err != nil {
		return err
	}
	return level{}.explain(h.l.Communicator.Group(calls...))
}

// Wait implements [backend.Backend].
func (h hierarchy) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	l := h.l
	if err := l.life.Broken(); err != nil {
		return nil, err
	}
	if w.Op != comm.OpSplit {
		return nil, l.wait(ctx, w)
	}
	base, err := l.Communicator.Split(ctx, w.Color, w.Key)
	if base == nil || err != nil {
		return nil, level{}.explain(err)
	}
	var t *offloadTable
	if base.WorldSize() == l.WorldSize() {
		t = &l.offload // the same ranks
	}
	child, err := l.over(ctx, base, t)
	switch {
	case errors.Is(err, comm.ErrUnsupported):
		return base, nil
	case err != nil:
		return nil, errors.Join(err, base.Close())
	}
	return child, nil
}

// wait is a Sync or a Barrier. It waits for the base and both levels side by side: each knows of its own
// ranks alone that they abort.
func (l *levels) wait(ctx context.Context, w comm.Wait) error {
	outer := ctx
	tells := func() error { return nil } // why all ranks were told that this one aborts
	if ctx.Done() != nil {
		inner := later{ctx, make(chan struct{})}
		var told error
		stop := context.AfterFunc(outer, func() {
			if w.Op != comm.OpSync || !l.idle() {
				told = comm.ContextError(outer)
				l.tell(told)
			}
			close(inner.done)
		})
		tells = func() error {
			if !stop() {
				<-inner.done
			}
			return told
		}
		ctx = inner
	}
	var errs [3]error
	var first error
	var failed sync.Once
	var all sync.WaitGroup
	for i, m := range [...]level{l.within, l.between, {Communicator: l.Communicator}} {
		waits := comm.Wait{Op: comm.OpSync}
		if m.ranks == nil {
			waits = w
		}
		all.Go(func() {
			_, err := waits.Make(ctx, m.Communicator)
			errs[i] = m.explain(err)
			if err != nil && outer.Err() == nil && !backend.Refused(err) {
				failed.Do(func() {
					first = errs[i]
					l.abort(first)
				})
			}
		})
	}
	all.Wait()
	told := tells()
	switch {
	case l.life.Broken() != nil: // another goroutine aborted
		return l.life.Broken()
	case first != nil:
		return first
	}
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	return told
}

// later is a context that ends when something has been done about that.
type later struct {
	context.Context
	done chan struct{}
}

func (l later) Done() <-chan struct{} { return l.done }

func (l later) Err() error {
	select {
	case <-l.done:
		return l.Context.Err()
	default:
		return nil
	}
}

// tell tells all ranks that this one aborts, if the base has a way to. A second one waits for the first.
func (l *levels) tell(cause error) {
	if c, ok := comm.As[interface{ Tell(cause error) }](l.Communicator); ok {
		c.Tell(cause)
	}
}

// explain returns an error of a level, which has other numbers of ranks, as one of the communicator.
func (m level) explain(err error) error {
	if err == nil {
		return nil
	}
	var named *comm.OpError
	if errors.As(err, &named) {
		err = named.Err
	}
	if m.ranks == nil {
		return err
	}
	return fmt.Errorf("among %s, numbered from 0: %w", ranks.Text(m.ranks), err)
}

// abort aborts the base and both levels side by side: kernels of one end only with those of the other.
func (l *levels) abort(cause error) {
	l.tell(cause)
	var all sync.WaitGroup
	for _, c := range [...]comm.Communicator{l.within.Communicator, l.between.Communicator, l.Communicator} {
		all.Go(func() { c.Abort(cause) })
	}
	all.Wait()
}

// Abort implements [backend.Backend].
func (h hierarchy) Abort(_ context.Context, cause error) { h.l.abort(cause) }

// Release implements [backend.Backend].
func (h hierarchy) Release(context.Context) error {
	return errors.Join(h.l.discard(), h.l.Communicator.Close())
}

// runs reports whether a call can run in levels. It depends on the call alone, so that all ranks do the same.
func (l *levels) runs(x *comm.Call) bool {
	each, hosts := l.within.WorldSize(), l.between.WorldSize()
	switch {
	case l.offload.lacked(x) || x.Op.Reduces() && x.Reduce == comm.Avg && each&(each-1) != 0:
		return false
	case x.Op == comm.OpReduceScatter || x.Op == comm.OpAllGather:
		return hosts*x.Bytes() <= shareBytes
	}
	return x.Op == comm.OpAllReduce || x.Op == comm.OpBroadcast
}

// steps are those of a call, of which the first error is the last.
type steps struct {
	n   int
	err error
}

// do submits a step to a level, unless that has nothing to move.
func (s *steps) do(m *level, x comm.Call) {
	if x.Count > 0 {
		s.make(m, x)
	}
}

// make submits a step.
func (s *steps) make(m *level, x comm.Call) {
	if s.err != nil {
		return
	}
	s.err = m.explain(x.Make(m.Communicator))
	if s.err != nil && s.n > 0 && backend.Refused(s.err) && !errors.Is(s.err, comm.ErrClosed) {
		s.err = fmt.Errorf("after %d steps of it: %v", s.n, s.err) // ranks are out of step
	}
	s.n++
}

// submit submits the steps of a call.
func (l *levels) submit(x *comm.Call) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := steps{err: l.follow()}
	switch x.Op {
	case comm.OpAllReduce:
		l.allReduce(&s, x)
	case comm.OpBroadcast:
		l.broadcast(&s, x)
	case comm.OpReduceScatter:
		l.reduceScatter(&s, x)
	case comm.OpAllGather:
		l.allGather(&s, x)
	}
	// The base counts the call: a rank that aborted before it was done is known by that.
	s.make(&level{Communicator: l.Communicator}, comm.BroadcastCall(0, 0, x.DType, 0))
	return s.err
}

// shares divides a buffer among the ranks of a host: each has so many elements, whole packs, of which the
// first is number own. The last rank has the tail as well, fewer elements than a pack of each rank has.
type shares struct{ each, own, carried, main, tail int }

func (l *levels) shares(x *comm.Call) (p shares) {
	n, i, pack := l.within.WorldSize(), l.within.Rank(), packBytes/x.DType.Size()
	p.each = x.Count / (n * pack) * pack
	p.own, p.main = i*p.each, n*p.each
	p.tail = x.Count - p.main
	if p.carried = p.each; i == n-1 {
		p.carried += p.tail
	}
	return p
}

// place returns the address of an element of a call's buffer.
func place(buf uintptr, x *comm.Call, element int) uintptr {
	return buf + uintptr(element*x.DType.Size())
}

// allReduce reduces a share within each host, that between hosts, and gathers the shares. No memory but
// the result's is written.
func (l *levels) allReduce(s *steps, x *comm.Call) {
	p := l.shares(x)
	own := place(x.Recv, x, p.own)
	s.do(&l.within, comm.ReduceScatterCall(x.Send, own, p.each, x.DType, x.Reduce))
	s.do(&l.within, comm.AllReduceCall(place(x.Send, x, p.main), place(x.Recv, x, p.main), p.tail, x.DType, x.Reduce))
	s.do(&l.between, comm.AllReduceCall(own, own, p.carried, x.DType, x.Reduce))
	l.gather(s, x, &p)
}

// gather completes a buffer of whose elements each rank of a host has its share.
func (l *levels) gather(s *steps, x *comm.Call, p *shares) {
	s.do(&l.within, comm.AllGatherCall(place(x.Recv, x, p.own), x.Recv, p.each, x.DType))
	s.do(&l.within, comm.BroadcastCall(place(x.Recv, x, p.main), p.tail, x.DType, l.within.WorldSize()-1))
}

// broadcast has each rank of the root's host pass its share on.
func (l *levels) broadcast(s *steps, x *comm.Call) {
	p := l.shares(x)
	host, root := x.Peer/l.within.WorldSize(), x.Peer%l.within.WorldSize()
	if l.between.Rank() == host {
		s.do(&l.within, comm.BroadcastCall(x.Recv, x.Count, x.DType, root))
	}
	s.do(&l.between, comm.BroadcastCall(place(x.Recv, x, p.own), p.carried, x.DType, host))
	if l.between.Rank() != host {
		l.gather(s, x, &p)
	}
}

// reduceScatter reduces the part of each host within this one, and what this rank has of all of them
// between hosts.
func (l *levels) reduceScatter(s *steps, x *comm.Call) {
	for h := range l.between.WorldSize() {
		s.do(&l.within, comm.ReduceScatterCall(place(x.Send, x, h*l.within.WorldSize()*x.Count), place(l.share, x, h*x.Count), x.Count, x.DType, x.Reduce))
	}
	s.do(&l.between, comm.ReduceScatterCall(l.share, x.Recv, x.Count, x.DType, x.Reduce))
}

// allGather gathers between hosts, and then the part of each host within this one.
func (l *levels) allGather(s *steps, x *comm.Call) {
	s.do(&l.between, comm.AllGatherCall(x.Send, l.share, x.Count, x.DType))
	for h := range l.between.WorldSize() {
		s.do(&l.within, comm.AllGatherCall(place(l.share, x, h*x.Count), place(x.Recv, x, h*l.within.WorldSize()*x.Count), x.Count, x.DType))
	}
}
