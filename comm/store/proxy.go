package store

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/gate"
)

// mostRequests bounds the requests of a session that the store behind a proxy has not done yet.
const mostRequests = 1 << 10

// Backend is a session of a store that a [Proxy] serves. It may have a method Orphan() as well, which ends the session
// without its leases: they last as long as the store grants them.
type Backend interface {
	Store
	// List returns the keys that begin with a prefix, sorted.
	List(ctx context.Context, prefix string) ([]Entry, error)
	// Delete deletes a key if it has this version. Version 0 stands for any.
	Delete(ctx context.Context, key string, version uint64) error
}

// Proxy serves a store of another kind, such as etcd's, to clients as a [Server] serves its own. Each client has a
// session of that store. The proxy keeps nothing, so that clients may go on at another proxy of the same store when
// this one is lost: keys that they lease again before the earlier session ends do not vanish. Names are not compared
// with those of clients of other proxies.
type Proxy struct {
	open    func(ctx context.Context, job string) (Backend, error) // begins a session of the store behind
	silence time.Duration                                          // of a client that counts as lost; 0 leaves it to TCP
	gate    gate.Gate                                              // refuses strangers
	ctx     context.Context                                        // until Close
	end     context.CancelFunc                                     // of ctx
	serving sync.WaitGroup                                         // clients and listeners; Close waits for them

	mu        sync.Mutex     // taken alone
	listeners []net.Listener // guarded by mu; nil after Close
}

// NewProxy returns a proxy of a store, of which open begins a session for each client with the name of the client's
// job ([Dialer.Job]). A client that sends nothing for silence is lost.
func NewProxy(silence time.Duration, open func(ctx context.Context, job string) (Backend, error)) *Proxy {
	p := &Proxy{open: open, silence: silence, gate: gate.Gate{Name: "store", Places: 256}}
	p.ctx, p.end = context.WithCancel(context.Background())
	return p
}

// Serve answers processes that connect and know the secret of conf ([TLS]), until [Proxy.Close]. It returns at once.
func (p *Proxy) Serve(l net.Listener, conf *tls.Config) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		_ = l.Close() // nobody is to be answered any more
		return
	}
	listener := gate.Bind(l)
	p.listeners = append(p.listeners, listener)
	p.serving.Go(func() { p.gate.Serve(listener, conf, p.serve) })
}

// Close ends the connections. It leaves the sessions to their leases, which clients may still renew at another proxy.
func (p *Proxy) Close() error {
	p.mu.Lock()
	var err error
	for _, l := range p.listeners {
		err = errors.Join(err, l.Close())
	}
	p.listeners = nil
	p.mu.Unlock()
	p.end()
	p.serving.Wait()
	return err
}

// serve handles one connection.
func (p *Proxy) serve(conn *tls.Conn) {
	defer context.AfterFunc(p.ctx, func() { conn.NetConn().Close() })() //nolint:errcheck // serve ends
	lines := bufio.NewScanner(conn)
	hello, ok := greet(conn, lines, &p.gate)
	if !ok {
		return
	}
	answer := func(w welcome) bool {
		w.Version = protocol
		return sender[welcome](conn)([]welcome{w}) == nil
	}
	if hello.Version != protocol {
		p.gate.Refuse(conn, "known", hello.otherVersion())
		answer(welcome{Refused: hello.otherVersion()})
		return
	}
	opening, cancel := context.WithTimeout(p.ctx, openTime)
	backend, err := p.open(opening, hello.Job)
	cancel()
	if err != nil {
		p.gate.Warn(conn, "no session", "open", hello.title()+": "+err.Error())
		turned := welcome{Failed: err.Error(), Kind: kindOf(err)}
		if turned.Kind == kindArgument {
			turned = welcome{Refused: err.Error()}
		}
		answer(turned)
		return
	}
	defer func() {
		if p.ctx.Err() == nil {
			_ = backend.Close() // its lease ends as well
			return
		}
		if session, ok := backend.(interface{ Orphan() }); ok {
			session.Orphan() // nobody would end what renews the lease
		}
	}()
	if !answer(welcome{Silence: p.silence}) || conn.SetDeadline(time.Time{}) != nil {
		return
	}
	s := &proxied{backend: backend, conn: conn, requests: make(chan request, mostRequests)}
	s.watches = map[uint64]func(){}
	s.waits = map[uint64]context.CancelFunc{}
	s.out = outbox[reply]{limit: mostQueued, send: sender[reply](conn), finish: conn.CloseWrite}
	if err := s.run(p.ctx, lines, p.silence); err != nil && !errors.Is(err, net.ErrClosed) {
		p.gate.Warn(conn, "session lost", "session", hello.title()+": "+err.Error())
	}
}

// proxied is a session of a client and of the store behind a proxy.
type proxied struct {
	backend  Backend           // the session of the store behind
	conn     *tls.Conn         // to the client
	out      outbox[reply]     // answers and events for the client; locks itself
	requests chan request      // to be done in their order
	watches  map[uint64]func() // ends each, by ID; of the goroutine that does the requests alone

	mu      sync.Mutex                    // taken alone
	waits   map[uint64]context.CancelFunc // ends each Get, by ID; guarded by mu
	waiting sync.WaitGroup                // for these
}

// run does the requests of a client until its connection or its session ends.
func (s *proxied) run(ctx context.Context, lines *bufio.Scanner, silence time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	// Requests that have come are done even if the client has gone.
	defer s.waiting.Wait()
	defer cancel()
	var doing sync.WaitGroup
	defer doing.Wait()
	defer close(s.requests)
	doing.Go(func() {
		for r := range s.requests {
			s.apply(ctx, &r)
		}
	})
	s.waiting.Go(func() {
		select {
		case <-s.backend.Done(): // the client goes on at another proxy
			s.conn.NetConn().Close() //nolint:errcheck // next fails
		case <-ctx.Done():
		}
	})
	for {
		r, ok, err := next(s.conn, lines, silence)
		switch {
		case !ok && s.backend.Err() != nil:
			return s.backend.Err()
		case !ok:
			return err
		case r.Op == opPing: // also while the store is slow
			s.reply(reply{})
			continue
		}
		select {
		case s.requests <- r:
		case <-s.backend.Done():
			return s.backend.Err()
		}
	}
}

// reply queues an answer or an event.
func (s *proxied) reply(r reply) {
	cost := 0
	for _, e := range r.Entries {
		cost += len(e.Key) + len(e.Value)
	}
	switch first, err := s.out.push(r, cost); {
	case err != nil: // it does not take what it asked for
		s.conn.NetConn().Close() //nolint:errcheck // next fails
	case first:
		go s.out.drain()
	}
}

// answer answers a request, unless it wants no answer.
func (s *proxied) answer(r *request, a reply, err error) {
	if r.ID == 0 {
		return
	}
	if err != nil && s.backend.Err() != nil {
		// An error is a refusal within a session that lasts. The client goes on at another proxy.
		s.conn.NetConn().Close() //nolint:errcheck // next fails
		return
	}
	a.ID = r.ID
	if err != nil {
		a = reply{ID: r.ID, Fault: err.Error(), Kind: kindOf(err)}
	}
	s.reply(a)
}

// apply does a request, or begins a Get or a Watch.
func (s *proxied) apply(ctx context.Context, r *request) {
	if len(r.Key) > longestKey || len(r.Value) > MaxValue {
		err := fmt.Errorf("%w: a key of %d bytes, at most %d, with a value of %d bytes, at most %d",
			comm.ErrArgument, len(r.Key), longestKey, len(r.Value), MaxValue)
		s.answer(r, reply{}, err)
		return
	}
	var options []Option
	if r.Lease {
		options = append(options, Lease)
	}
	var a reply
	var err error
	switch r.Op {
	case opSet:
		err = s.backend.Set(ctx, r.Key, r.Value, options...)
	case opSwap:
		a, err = s.swap(ctx, r, options)
	case opAdd:
		a.Number, err = s.add(ctx, r.Key, r.Delta)
	case opList:
		a.Entries, err = s.backend.List(ctx, r.Key)
	case opDelete:
		err = s.backend.Delete(ctx, r.Key, r.Version)
	case opGet:
		err = s.get(ctx, *r)
		if err == nil {
			return // the answer comes later
		}
	case opWatch:
		err = s.watch(ctx, r)
	case opStop:
		s.stop(r.Version)
	default:
		err = fmt.Errorf("%w: there is no operation %.100q", comm.ErrArgument, r.Op)
	}
	if err != nil && ctx.Err() != nil {
		return // the proxy ends, and this session with it: as above
	}
	s.answer(r, a, err)
}

// swap is CompareAndSet.
func (s *proxied) swap(ctx context.Context, r *request, options []Option) (a reply, err error) {
	var now Entry
	now, a.OK, err = s.backend.CompareAndSet(ctx, r.Key, r.Version, r.Value, options...)
	if now.Version > 0 {
		a.Entries = []Entry{now}
	}
	return a, err
}

// add adds to a counter, which is 0 if there is none.
func (s *proxied) add(ctx context.Context, key string, delta int64) (int64, error) {
	var last Entry
	for {
		sum := delta // of a key that does not exist
		if last.Version > 0 {
			var err error
			sum, err = increase(last.Value, delta)
			if err != nil {
				return 0, fmt.Errorf("%w: %.100q is no counter, or its sum overflows", comm.ErrArgument, key)
			}
		}
		current, ok, err := s.backend.CompareAndSet(ctx, key, last.Version, strconv.AppendInt(nil, sum, 10))
		if ok || err != nil {
			return sum, err
		}
		last = current
	}
}

// get begins a Get, whose answer comes when the key exists.
func (s *proxied) get(ctx context.Context, r request) error {
	ctx, cancel := context.WithCancel(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, twice := s.waits[r.ID]; twice || len(s.waits) == mostWaits {
		cancel()
		return fmt.Errorf("%w: too many waits, or two by one ID", ErrFull)
	}
	s.waits[r.ID] = cancel
	s.waiting.Go(func() {
		value, err := s.backend.Get(ctx, r.Key)
		if ctx.Err() == nil {
			s.answer(&r, reply{Entries: []Entry{{Key: r.Key, Value: value}}}, err)
		}
		s.mu.Lock()
		delete(s.waits, r.ID)
		s.mu.Unlock()
		cancel()
	})
	return nil
}

// watch begins a Watch. Existing keys come as events before the answer.
func (s *proxied) watch(ctx context.Context, r *request) error {
	id := r.ID
	if _, twice := s.watches[id]; twice || len(s.watches) == mostWatches {
		return fmt.Errorf("%w: too many watches, or two by one ID", ErrFull)
	}
	end, err := s.backend.Watch(ctx, r.Key, func(e Event) {
		s.reply(reply{ID: id, Event: true, Entries: []Entry{e.Entry}, Deleted: e.Deleted})
	})
	if err == nil {
		s.watches[id] = end
	}
	return err
}

// stop ends a Get or a Watch.
func (s *proxied) stop(id uint64) {
	if end := s.watches[id]; end != nil {
		end()
		delete(s.watches, id)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if cancel := s.waits[id]; cancel != nil {
		cancel()
	}
}
