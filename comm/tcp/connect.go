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
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/ranks"
)

// protocol is the name and version of what lanes speak (ALPN).
const protocol = "tutti-tcp/1"

const (
	// greetTime bounds how long a connection may take to say who it is, dialTime how long one
	// address may take to answer, and retryTime the pause between two attempts.
	greetTime = 10 * time.Second
	dialTime  = 3 * time.Second
	retryTime = 100 * time.Millisecond
	// mostStrangers bounds the connections that have not said who they are, beside the ranks.
	mostStrangers = 256
	// pings is how often the round trip is measured.
	pings = 4
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

// lanesOf returns the number of lanes, and the window, for a round trip.
func lanesOf(roundTrip time.Duration) (lanes, window int) {
	underway := int(linkRate * roundTrip.Seconds())
	return min(max(underway/laneBytes, 1), mostLanes), min(max(2*underway, leastWindow), mostWindow)
}

// record is what a rank publishes in the store.
type record struct {
	Host      string // the same for ranks that share a loopback interface
	Nonce     uint64 // of this attempt
	Addresses []string
}

// hello is what the dialing side says on a connection. It gets a verdict: the length of the text of a
// refusal, 0 for none, and the text. One that asks for no lanes is to measure the round trip, and
// another one follows.
type hello struct {
	Nonce                        uint64 // of the record that it has read
	From, To, Size               uint32
	Control                      uint32 // length of control messages
	Attempt, Lane, Lanes, Window uint32 // the connection is this lane of so many
}

// candidates puts the addresses of a record into the order in which they are tried. Loopback ones
// are for ranks of one host, first; elsewhere those of a network that this host is in come first.
func (r *record) candidates(own string) []string {
	interfaces, _ := net.InterfaceAddrs()
	place := func(address string) int {
		a, _ := netip.ParseAddrPort(address)
		ip := net.IP(a.Addr().AsSlice())
		switch {
		case ip.IsLoopback() && r.Host == own:
			return 0
		case ip.IsLoopback():
			return 3
		case slices.ContainsFunc(interfaces, func(i net.Addr) bool { n, ok := i.(*net.IPNet); return ok && n.Contains(ip) }):
			return 1
		}
		return 2
	}
	slices.SortStableFunc(r.Addresses, func(a, b string) int { return place(a) - place(b) })
	return r.Addresses
}

// connector connects a node.
type connector struct {
	*node
	config Config
	kv     store.Store
	tls    *tls.Config
	own    record

	mu      sync.Mutex
	parties []party       // by rank
	changed chan struct{} // a lane has joined
}

// party is what is there of another rank.
type party struct {
	attempt uint32  // of the lanes
	lanes   []*lane // by number, nil for those that have not come
	trouble error   // of the last attempt to reach it
}

// connect makes the connections of a node. The rank's record stays in the store if that succeeds.
func connect(ctx context.Context, kv store.Store, c Config, n *node) (err error) {
	k := &connector{node: n, config: c, kv: kv, tls: c.TLS.Clone(), parties: make([]party, n.size), changed: make(chan struct{}, 1)}
	k.tls.NextProtos, k.tls.DynamicRecordSizingDisabled = []string{protocol}, true
	listen := c.Listen
	if _, _, err := net.SplitHostPort(listen); err != nil {
		listen = net.JoinHostPort(strings.Trim(listen, "[]"), "0")
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return fmt.Errorf("%w: %w", comm.ErrUnavailable, err)
	}
	defer l.Close() //nolint:errcheck // nobody else connects
	k.own = record{rendezvous.HostName(), rand.Uint64(), c.Advertise}
	if len(c.Advertise) == 0 {
		k.own.Addresses = store.Addresses(l)
	}
	text, err := json.Marshal(k.own)
	if err != nil {
		return err
	}
	switch now, ok, err := kv.CompareAndSet(ctx, c.key(c.Rank), 0, text, store.Lease); {
	case err != nil:
		return err
	case !ok:
		return fmt.Errorf("%w: another process connects as rank %d: %s", store.ErrRefused, c.Rank, now.Value)
	}
	gate := &store.Gate{Name: "tcp", Most: mostStrangers + c.WorldSize*mostLanes}
	go gate.Serve(listener{l}, k.tls, func(conn *tls.Conn) { k.answer(gate, conn) })

	ctx, cancel := context.WithCancelCause(ctx)
	var all sync.WaitGroup
	for rank := range c.Rank {
		all.Go(func() {
			if err := k.call(ctx, rank); err != nil {
				cancel(err) // no more attempts
			}
		})
	}
	err = k.await(ctx)
	cancel(err)
	all.Wait()
	if err != nil {
		kv.Drop(c.key(c.Rank))
		k.mu.Lock()
		defer k.mu.Unlock()
		for i := range k.parties {
			k.parties[i].hangUp()
		}
	}
	return err
}

// hangUp closes the lanes.
func (p *party) hangUp() {
	for _, l := range p.lanes {
		if l != nil {
			_ = l.link.Close()
		}
	}
}

// await waits for all lanes of all pairs.
func (k *connector) await(ctx context.Context) error {
	for {
		k.mu.Lock()
		var missing []int
		var trouble error
		for rank, p := range k.parties {
			if rank != k.rank && (p.lanes == nil || slices.Contains(p.lanes, nil)) {
				missing = append(missing, rank)
				if trouble == nil && p.trouble != nil {
					trouble = fmt.Errorf("rank %d: %w", rank, p.trouble)
				}
			}
		}
		for rank := 0; rank < k.size && missing == nil; rank++ {
			k.pairs[rank].lanes = k.parties[rank].lanes
		}
		k.mu.Unlock()
		if missing == nil {
			return nil
		}
		select {
		case <-k.changed:
			continue
		case <-ctx.Done():
		}
		if cause := context.Cause(ctx); errors.Is(cause, store.ErrRefused) {
			return cause
		}
		err := fmt.Errorf("%w: no connection to %s", comm.ContextError(ctx), ranks.Text(missing))
		if trouble != nil {
			err = fmt.Errorf("%w; %w", err, trouble)
		}
		return err
	}
}

// call connects to a rank of lower number, until that succeeds, ctx ends, or the rank refuses.
func (k *connector) call(ctx context.Context, rank int) error {
	for attempt := uint32(1); ; attempt++ {
		err := k.try(ctx, rank, attempt)
		if err == nil || errors.Is(err, store.ErrRefused) {
			return err
		}
		k.mu.Lock()
		if ctx.Err() == nil {
			k.parties[rank].trouble = err
		}
		k.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(retryTime):
		}
	}
}

// try makes the lanes to a rank, at the first of its addresses that answers.
func (k *connector) try(ctx context.Context, rank int, attempt uint32) error {
	text, err := k.kv.Get(ctx, k.config.key(rank))
	if err != nil {
		return err
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return err
	}
	var errs []error
	for _, address := range r.candidates(k.own.Host) {
		first, err := k.dial(ctx, address)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		return k.lanes(ctx, address, first, hello{Nonce: r.Nonce, From: uint32(k.rank), To: uint32(rank),
			Size: uint32(k.size), Control: uint32(schedule.ControlBytes), Attempt: attempt})
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
		return nil, errors.Join(err, plain.Close())
	}
	return conn, nil
}

// lanes measures the round trip on the first connection to a rank, and makes as many lanes as that asks for. It waits
// longer than the other side does, so that both agree on whether a lane is there.
func (k *connector) lanes(ctx context.Context, address string, first *tls.Conn, h hello) error {
	ctx, cancel := context.WithTimeout(ctx, 2*greetTime)
	defer cancel()
	roundTrip := greetTime
	for range pings {
		began := time.Now()
		if err := greet(ctx, first, h); err != nil {
			return errors.Join(err, first.NetConn().Close())
		}
		roundTrip = min(roundTrip, time.Since(began))
	}
	lanes, window := lanesOf(roundTrip)
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
				conns[i], errs[i] = k.dial(ctx, address)
			}
			if errs[i] == nil {
				errs[i] = greet(ctx, conns[i], h)
			}
		})
	}
	all.Wait()
	err := cmp.Or(errs...)
	for i, conn := range conns {
		if h.Lane = uint32(i); err == nil {
			k.join(int(h.To), &h, conn)
		} else if conn != nil {
			_ = conn.NetConn().Close()
		}
	}
	return err
}

// greet says hello and waits for the verdict.
func greet(ctx context.Context, conn *tls.Conn, h hello) error {
	defer context.AfterFunc(ctx, func() { _ = conn.NetConn().Close() })()
	if err := binary.Write(conn, binary.LittleEndian, h); err != nil {
		return err
	}
	var verdict [1 << 8]byte
	if _, err := io.ReadFull(conn, verdict[:1]); err != nil || verdict[0] == 0 {
		return err
	}
	text := verdict[1:][:verdict[0]]
	if _, err := io.ReadFull(conn, text); err != nil {
		return err
	}
	return fmt.Errorf("%w: %w by rank %d: %s", comm.ErrPeerFailed, store.ErrRefused, h.To, text)
}

// answer serves a connection until it ends.
func (k *connector) answer(gate *store.Gate, conn *tls.Conn) {
	_ = conn.SetDeadline(time.Now().Add(greetTime))
	var h hello
	for h.Lanes == 0 {
		if err := binary.Read(conn, binary.LittleEndian, &h); err != nil {
			gate.Refuse(conn, "hello", "it did not say who it is")
			return
		}
		reason := k.refuses(&h)
		if reason != "" {
			gate.Refuse(conn, "rank", reason)
		}
		verdict := append([]byte{0}, reason[:min(len(reason), math.MaxUint8)]...)
		verdict[0] = byte(len(verdict) - 1)
		if _, err := conn.Write(verdict); err != nil || reason != "" {
			return
		}
	}
	_ = conn.SetDeadline(time.Time{})
	if k.join(int(h.From), &h, conn) {
		<-k.pairs[h.From].dead // whoever passed the connection closes it then
	}
}

// refuses returns why this rank does not want a connection, "" if it does.
func (k *connector) refuses(h *hello) string {
	switch rank := int(h.From); {
	case h.Nonce != k.own.Nonce || int(h.To) != k.rank:
		return fmt.Sprintf("it looks for rank %d of another start of the job; this is rank %d", h.To, k.rank)
	case int(h.Size) != k.size:
		return fmt.Sprintf("rank %d of %d in a job of %d", rank, h.Size, k.size)
	case rank <= k.rank || rank >= k.size:
		return fmt.Sprintf("rank %d has no business with rank %d of %d", rank, k.rank, k.size)
	case int(h.Control) != schedule.ControlBytes:
		return "it is another version of this library"
	case h.Lanes > 0 && (h.Lanes > mostLanes || h.Lane >= h.Lanes || h.Window < leastWindow || h.Window > mostWindow):
		return fmt.Sprintf("rank %d asks for lane %d of %d, %d bytes", rank, h.Lane, h.Lanes, h.Window)
	}
	return ""
}

// join notes a lane of a rank, unless a later attempt has begun.
func (k *connector) join(rank int, h *hello, conn *tls.Conn) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := &k.parties[rank]
	if h.Attempt < p.attempt || h.Attempt == p.attempt && len(p.lanes) != int(h.Lanes) {
		return false
	}
	if h.Attempt > p.attempt {
		p.hangUp()
		p.attempt, p.lanes = h.Attempt, make([]*lane, h.Lanes)
	}
	pair := k.pairs[rank]
	pair.mu.Lock()
	pair.window, pair.credit = int(h.Window), int(h.Window)
	pair.mu.Unlock()
	p.lanes[h.Lane] = newLane(pair, int(h.Lane), conn)
	poke(k.changed)
	return true
}
