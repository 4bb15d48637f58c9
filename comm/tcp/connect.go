package tcp

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/ranks"
)

// protocol is the name and version of what lanes speak (ALPN).
const protocol = "tutti-tcp/2"

const (
	// greetTime bounds how long a connection may take to say who it is: some round trips, beside
	// 1 + 2 + 4 s of repeated packets. dialTime bounds how long one address may take to answer, as
	// others may be right: a packet is repeated once. retryTime is the pause between two attempts.
	greetTime = 10 * time.Second
	dialTime  = 3 * time.Second
	retryTime = 100 * time.Millisecond
	// mostStrangers bounds the connections that have not said who they are, beside the ranks.
	mostStrangers = 256
	longestReason = 1 << 10 // of a refusal
	// pings is how often the round trip is measured where the kernel does not tell it, and so the most hellos of a
	// connection before the one that makes it a lane.
	pings = 4
	// mostAddresses and longestAddress bound what a rank may publish: a host has an address for each of its interfaces.
	mostAddresses  = 256
	longestAddress = 300
)

// Lanes are for links whose round trip is long: the windows of the kernel's connections are
// bounded, and each lost packet halves one of them. A lane gets laneBytes of the bytes that
// are on their way at linkRate, in bytes per second: 95 lanes at 100 ms. The most that may
// come early is twice these bytes, and at least leastWindow.
const (
	linkRate    = 1e9 / 8
	laneBytes   = 128 << 10
	mostLanes   = 96
	leastWindow = 4 << 20
	mostWindow  = 64 << 20
)

// measured is the round trip that the kernel tells.
var measured = roundTrip

// lanesOf returns the number of lanes, and the window, for a round trip.
func lanesOf(roundTrip time.Duration) (lanes, window int) {
	underway := int(linkRate * roundTrip.Seconds())
	return min(max(underway/laneBytes, 1), mostLanes), min(max(2*underway, leastWindow), mostWindow)
}

// record is what a rank publishes in the store.
type record struct {
	Protocol  string // in all versions
	Nonce     uint64 // of this attempt
	Addresses []string
}

// readRecord returns what a rank has published, if that is a record.
func readRecord(rank int, text []byte) (r record, err error) {
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("what rank %d has published is no record: %.200v", rank, err)
	}
	if r.Protocol != protocol { // whatever else it says
		return r, fmt.Errorf("%w: %w: rank %d speaks %.40q, this one %q: all ranks use one version of this library",
			comm.ErrMismatch, store.ErrRefused, rank, r.Protocol, protocol)
	}
	if len(r.Addresses) == 0 || len(r.Addresses) > mostAddresses {
		return r, fmt.Errorf("rank %d has published %d addresses", rank, len(r.Addresses))
	}
	for _, address := range r.Addresses {
		_, _, err := net.SplitHostPort(address)
		if err != nil || len(address) > longestAddress || printable.Text(address) != address {
			return r, fmt.Errorf("rank %d has published an address that is none: %.100q", rank, address)
		}
	}
	return r, nil
}

// hello is what the dialing side says on a connection. It gets a verdict. One that asks for no
// lanes is to measure the round trip, and another one follows.
type hello struct {
	Nonce               uint64 // of the record that it has read
	Attempt             uint64 // grows with each, also from a process to the next one of its rank
	Silence             int64  // of its Config
	From, To, Size      uint32
	Control             uint32 // length of control messages
	Lane, Lanes, Window uint32 // the connection is this lane of so many
}

// verdict is the answer to a hello. After one that is no welcome come the reason, and the end.
type verdict byte

const (
	welcome verdict = iota
	again           // the rank may be at another address, or try again
	never
)

// connector connects a node.
type connector struct {
	*node
	config  Config
	kv      store.Store
	tls     *tls.Config
	own     record
	version uint64 // of the record

	mu      sync.Mutex    // of the lanes of all pairs
	over    bool          // all lanes are there, or this rank has failed
	changed chan struct{} // a lane has joined
}

// connect makes the connections of a node. The rank's record stays in the store if that succeeds.
func connect(ctx context.Context, kv store.Store, c Config, n *node) error {
	k := &connector{node: n, config: c, kv: kv, tls: c.TLS.Clone(), changed: make(chan struct{}, 1)}
	k.tls.NextProtos, k.tls.DynamicRecordSizingDisabled = []string{protocol}, true
	k.tls.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		family, _, _ := strings.Cut(protocol, "/")
		if !slices.Contains(h.SupportedProtos, protocol) && slices.ContainsFunc(h.SupportedProtos, func(p string) bool { return strings.HasPrefix(p, family+"/") }) {
			return nil, gate.ErrVersion
		}
		return nil, nil
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", withPort(c.Listen, "0"))
	if err != nil {
		return fmt.Errorf("%w: %w", comm.ErrUnavailable, err)
	}
	defer l.Close() //nolint:errcheck // nobody else connects
	k.own = record{protocol, rand.Uint64(), gate.Addresses(l)}
	if len(c.Advertise) > 0 {
		_, port, _ := net.SplitHostPort(l.Addr().String())
		k.own.Addresses = nil
		for _, address := range c.Advertise {
			k.own.Addresses = append(k.own.Addresses, withPort(address, port))
		}
	}
	text, err := json.Marshal(k.own)
	if err != nil {
		return err
	}
	now, ok, err := kv.CompareAndSet(ctx, c.key(c.Rank), 0, text, store.Lease)
	switch {
	case err != nil:
		return err
	case !ok:
		return fmt.Errorf("%w: another process connects as rank %d: %.1000q", store.ErrRefused, c.Rank, now.Value)
	}
	k.version = now.Version
	g := &gate.Gate{Name: name, Places: mostStrangers + c.WorldSize*mostLanes}
	go g.Serve(listener{l}, k.tls, func(conn *tls.Conn) { k.answer(g, conn) })

	ctx, cancel := context.WithCancelCause(ctx)
	var all sync.WaitGroup
	for _, p := range k.pairs[:c.Rank] {
		all.Go(func() {
			if err := k.call(ctx, p); err != nil {
				cancel(err) // no more attempts
			}
		})
	}
	err = k.await(ctx)
	cancel(err)
	all.Wait()
	if err != nil {
		kv.Drop(c.key(c.Rank))
	}
	return err
}

// withPort adds a port to an address that has none.
func withPort(address, port string) string {
	if _, _, err := net.SplitHostPort(address); err != nil {
		return net.JoinHostPort(strings.Trim(address, "[]"), port)
	}
	return address
}

// await waits for all lanes of all pairs.
func (k *connector) await(ctx context.Context) error {
	for {
		k.mu.Lock()
		var never, ended []int
		var trouble, end error
		for rank, p := range k.pairs {
			switch {
			case rank == k.rank || p.lanes != nil && !slices.Contains(p.lanes, nil):
			case p.attempt == 0:
				never = append(never, rank)
				trouble = cmp.Or(trouble, p.trouble)
			default: // it may have ended because of those that never came
				ended = append(ended, rank)
				end = cmp.Or(end, p.trouble)
			}
		}
		lost := k.kv.Err()
		complete := never == nil && ended == nil
		k.over = complete || ctx.Err() != nil || lost != nil
		over := k.over
		k.mu.Unlock()
		switch cause := context.Cause(ctx); {
		case complete:
			return nil
		case !over:
			select {
			case <-k.changed:
			case <-k.kv.Done():
			case <-ctx.Done():
			}
		case errors.Is(cause, store.ErrRefused):
			return cause
		case lost != nil:
			return fmt.Errorf("%s: %w", unconnected(never, ended), lost)
		default:
			err := fmt.Errorf("%w: %s", comm.ContextError(ctx), unconnected(never, ended))
			if trouble = cmp.Or(trouble, end); trouble != nil {
				err = fmt.Errorf("%w; %w", err, trouble)
			}
			return &incomplete{err, never}
		}
	}
}

// unconnected says which ranks were never connected, and which no longer are.
func unconnected(never, ended []int) string {
	var parts []string
	if never != nil {
		parts = append(parts, "no connection to "+ranks.Text(never))
	}
	if ended != nil {
		parts = append(parts, "connection lost to "+ranks.Text(ended))
	}
	return strings.Join(parts, ", ")
}

// incomplete is the error of a rank whose context has ended before it was connected to all others.
type incomplete struct {
	error
	never []int
}

// Unwrap returns the cause.
func (i *incomplete) Unwrap() error { return i.error }

// MissingRanks returns the ranks that there was never a connection to: others may have ended theirs because of these.
func (i *incomplete) MissingRanks() []int { return i.never }

// note keeps what is wrong with a rank, for the error of a rank that waits in vain.
func (k *connector) note(p *pair, trouble error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p.trouble = fmt.Errorf("rank %d: %w", p.rank, trouble)
}

// call connects to a rank of lower number, again if the connection is lost, until ctx ends or the rank refuses.
func (k *connector) call(ctx context.Context, p *pair) error {
	const attempts = 1 << 20 // of a process, far fewer in fact
	for attempt := k.version * attempts; ; attempt++ {
		err := k.try(ctx, p, attempt+1)
		switch {
		case errors.Is(err, store.ErrRefused):
			return err
		case err == nil:
			select {
			case <-ctx.Done():
			case <-p.again:
			}
		case ctx.Err() == nil:
			k.note(p, err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(retryTime):
		}
	}
}

// try makes the lanes to a rank, at the first of its addresses where it answers. Those in networks
// that this host is in come first.
func (k *connector) try(ctx context.Context, p *pair, attempt uint64) error {
	text, err := k.kv.Get(ctx, k.config.key(p.rank))
	if err != nil {
		return err
	}
	r, err := readRecord(p.rank, text)
	if err != nil {
		return err
	}
	interfaces, _ := net.InterfaceAddrs()
	far := func(address string) int {
		a, _ := netip.ParseAddrPort(address)
		if slices.ContainsFunc(interfaces, func(i net.Addr) bool { n, ok := i.(*net.IPNet); return ok && n.Contains(a.Addr().AsSlice()) }) {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(r.Addresses, func(a, b string) int { return far(a) - far(b) })
	var errs []error
	for _, address := range r.Addresses {
		err := k.lanes(ctx, address, p, hello{Nonce: r.Nonce, Attempt: attempt, Silence: int64(k.config.Silence), From: uint32(k.rank),
			To: uint32(p.rank), Size: uint32(k.size), Control: uint32(schedule.ControlBytes)})
		if err == nil || errors.Is(err, store.ErrRefused) {
			return err
		}
		errs = append(errs, err)
	}
	return fmt.Errorf("cannot be reached at %v: %w", r.Addresses, errors.Join(errs...))
}

// dial makes a connection to who knows the secret.
func (k *connector) dial(ctx context.Context, address string) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	plain, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(newLink(plain), k.tls)
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("%w: %w", errHandshake, errors.Join(err, plain.Close()))
	}
	return conn, nil
}

// errHandshake means that somebody took a connection, and that its handshake failed.
var errHandshake = errors.New("handshake")

// dialAgain is dial to an address where a lane's handshake has succeeded: its gate may hang up on others while it is
// crowded.
func (k *connector) dialAgain(ctx context.Context, address string) (*tls.Conn, error) {
	for {
		conn, err := k.dial(ctx, address)
		if !errors.Is(err, errHandshake) {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(retryTime):
		}
	}
}

// lanes measures the round trip on a first connection to a rank, and makes as many lanes as that asks for: lanes for
// a process that is slow to answer would have it answer ever more slowly. It waits
// longer than the other side does, which has a lane before it says welcome.
func (k *connector) lanes(ctx context.Context, address string, p *pair, h hello) error {
	first, err := k.dial(ctx, address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*greetTime)
	defer cancel()
	shortest, known := measured(first.NetConn().(*link).socket)
	for i := 0; i < pings && !known; i++ {
		began := time.Now()
		if err := greet(ctx, first, h); err != nil {
			return errors.Join(err, first.NetConn().Close())
		}
		if took := time.Since(began); i == 0 || took < shortest {
			shortest = took
		}
	}
	lanes, window := lanesOf(shortest)
	if k.config.Connections > 0 {
		lanes = min(k.config.Connections, mostLanes)
	}
	h.Lanes, h.Window = uint32(lanes), uint32(window)
	conns, errs := make([]*tls.Conn, lanes), make([]error, lanes)
	conns[0] = first
	var all sync.WaitGroup
	for i := range conns {
		h := h
		h.Lane = uint32(i)
		all.Go(func() {
			if i > 0 {
				conns[i], errs[i] = k.dialAgain(ctx, address)
			}
			if errs[i] == nil {
				errs[i] = greet(ctx, conns[i], h)
			}
		})
	}
	all.Wait()
	err = cmp.Or(errs...)
	for i, conn := range conns {
		h.Lane = uint32(i)
		if conn == nil {
			continue
		}
		if err == nil {
			if l := k.join(p, &h, conn, false); l != nil {
				go k.watch(l) //nolint:errcheck // its reader gets it
				continue
			}
		}
		_ = conn.NetConn().Close()
	}
	return err
}

// greet says hello and waits for the verdict.
func greet(ctx context.Context, conn *tls.Conn, h hello) error {
	defer context.AfterFunc(ctx, func() { _ = conn.NetConn().Close() })()
	if err := binary.Write(conn, binary.LittleEndian, h); err != nil {
		return err
	}
	var v [1]byte
	if _, err := io.ReadFull(conn, v[:]); err != nil || verdict(v[0]) == welcome {
		return err
	}
	sent, _ := io.ReadAll(io.LimitReader(conn, longestReason))
	reason := printable.Text(string(sent))
	if verdict(v[0]) == again {
		return fmt.Errorf("%v: %s", conn.RemoteAddr(), reason)
	}
	return fmt.Errorf("%w: %w by rank %d: %s", comm.ErrPeerFailed, store.ErrRefused, h.To, reason)
}

// answer serves a connection until it ends.
func (k *connector) answer(g *gate.Gate, conn *tls.Conn) {
	_ = conn.SetDeadline(time.Now().Add(greetTime))
	for hellos := 0; ; hellos++ {
		var h hello
		if err := binary.Read(conn, binary.LittleEndian, &h); err != nil {
			g.Refuse(conn, "hello", "it did not say who it is")
			return
		}
		v, reason := k.judge(&h)
		if v == welcome && h.Lanes == 0 && hellos == pings { // otherwise what nobody reads fills the connection
			v, reason = never, fmt.Sprintf("rank %d measures the round trip more than %d times", h.From, pings)
		}
		if v == welcome && h.Lanes > 0 {
			if l := k.join(k.pairs[h.From], &h, conn, true); l != nil {
				_ = conn.SetDeadline(time.Time{})
				if k.watch(l) == nil {
					<-l.dead // whoever passed the connection closes it then
				}
				return
			}
			v, reason = again, "a later attempt has begun"
		}
		if v != welcome {
			g.Refuse(conn, "rank", reason)
		}
		if v == never && uint64(h.From) < uint64(k.size) {
			k.note(k.pairs[h.From], errors.New(reason))
		}
		if _, err := conn.Write(append([]byte{byte(v)}, reason...)); err != nil || v != welcome {
			return
		}
	}
}

// judge returns the verdict on a hello, and its reason.
func (k *connector) judge(h *hello) (v verdict, reason string) {
	v = never
	switch rank := int64(h.From); {
	case h.Nonce != k.own.Nonce || int64(h.To) != int64(k.rank):
		v, reason = again, fmt.Sprintf("it looks for rank %d of another start of the job; this is rank %d", h.To, k.rank)
	case int64(h.Size) != int64(k.size):
		reason = fmt.Sprintf("rank %d of %d in a job of %d", rank, h.Size, k.size)
	case rank <= int64(k.rank) || rank >= int64(k.size):
		reason = fmt.Sprintf("rank %d has no business with rank %d of %d", rank, k.rank, k.size)
	case int64(h.Control) != int64(schedule.ControlBytes):
		reason = "it is another version of this library"
	case h.Silence != int64(k.config.Silence):
		reason = fmt.Sprintf("rank %d may be silent for %v, rank %d for %v: all ranks need the same", rank, time.Duration(h.Silence), k.rank, k.config.Silence)
	case h.Lanes > 0 && (h.Lanes > mostLanes || h.Lane >= h.Lanes || h.Window < leastWindow || h.Window > mostWindow):
		reason = fmt.Sprintf("rank %d asks for lane %d of %d, %d bytes", rank, h.Lane, h.Lanes, h.Window)
	default:
		v = welcome
	}
	return v, reason
}

// join makes a connection a lane of its pair, unless a later attempt has begun. The side that accepts it says
// welcome before anything else is sent.
func (k *connector) join(p *pair, h *hello, conn *tls.Conn, accepts bool) *lane {
	k.mu.Lock()
	defer k.mu.Unlock()
	if h.Attempt > p.attempt && !k.over {
		p.hangUp()
		p.attempt, p.lanes, p.window, p.credit = h.Attempt, make([]*lane, h.Lanes), int(h.Window), int(h.Window)
	}
	if k.over || h.Attempt < p.attempt || len(p.lanes) != int(h.Lanes) || p.lanes[h.Lane] != nil {
		return nil
	}
	if accepts {
		if _, err := conn.Write([]byte{byte(welcome)}); err != nil {
			return nil
		}
	}
	l := newLane(p, int(h.Lane), conn)
	p.lanes[h.Lane] = l
	poke(k.changed)
	return l
}

// watch waits for the first byte on a lane. If the lane ends before all are there, those of its pair are made
// again: the other process has ended, and another one may come in its place.
func (k *connector) watch(l *lane) error {
	_, err := io.ReadFull(l.secure, l.head[:1])
	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil && !k.over && slices.Contains(l.lanes, l) {
		l.hangUp()
		l.lanes, l.trouble = nil, fmt.Errorf("rank %d: connection lost: %w", l.rank, err)
		poke(l.again)
	}
	l.first <- err
	return err
}
