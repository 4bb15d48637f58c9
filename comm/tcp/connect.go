package tcp

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
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
// are on their way at linkRate, in bytes per second: 48 lanes at 100 ms. The most that may
// come early is twice these bytes, and at least leastWindow.
const (
	linkRate    = 1e9 / 8
	laneBytes   = 256 << 10
	mostLanes   = 64
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

// hello is what the dialing side says first on a lane.
type hello struct {
	Nonce               uint64 // of the record that it has read
	From, To, Size      uint32
	Control             uint32 // length of control messages
	Lane, Lanes, Window uint32 // of all but the first lane, how many there are
}

// verdict is how long the answer to a hello is: the length of a refusal, and its text.
const verdictBytes = 1 << 8

// hostName names the network interfaces that this process sees.
func hostName() string {
	name, _ := os.Hostname()
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	space, _ := os.Readlink("/proc/self/ns/net")
	return strings.Join([]string{name, strings.TrimSpace(string(boot)), space}, " ")
}

// addresses returns where a listener can be reached: those of its host's interfaces if it
// listens on all of them, loopback ones last.
func addresses(l net.Listener) (list []string) {
	at := l.Addr().(*net.TCPAddr)
	if !at.IP.IsUnspecified() {
		return []string{at.String()}
	}
	interfaces, _ := net.InterfaceAddrs()
	for _, loopback := range []bool{false, true} {
		for _, a := range interfaces {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsLoopback() == loopback && !n.IP.IsLinkLocalUnicast() {
				list = append(list, net.JoinHostPort(n.IP.String(), fmt.Sprint(at.Port)))
			}
		}
	}
	return list
}

// candidates puts the addresses of a record into the order in which they are tried. Loopback ones
// are for ranks of one host, first; elsewhere those of a network that this host is in come first.
func (r *record) candidates(own string) []string {
	var near, far, loopback []string
	interfaces, _ := net.InterfaceAddrs()
	for _, text := range r.Addresses {
		a, err := netip.ParseAddrPort(text)
		ip := net.IP(a.Addr().AsSlice())
		switch {
		case err != nil:
		case ip.IsLoopback():
			loopback = append(loopback, text)
		case slices.ContainsFunc(interfaces, func(i net.Addr) bool { n, ok := i.(*net.IPNet); return ok && n.Contains(ip) }):
			near = append(near, text)
		default:
			far = append(far, text)
		}
	}
	if r.Host == own {
		return slices.Concat(loopback, near, far)
	}
	return slices.Concat(near, far, loopback)
}

// connector connects a node.
type connector struct {
	*node
	config Config
	tls    *tls.Config
	own    record

	mu      sync.Mutex
	joined  map[int][]*lane // by rank: lanes that have come, by number
	changed chan struct{}   // closed when a lane joins
	trouble map[int]error   // by rank: the last error
}

// connect makes the connections of a node.
func connect(ctx context.Context, kv *store.Client, c Config, n *node) error {
	k := &connector{node: n, config: c, tls: c.TLS.Clone(), joined: map[int][]*lane{}, changed: make(chan struct{}), trouble: map[int]error{}}
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
	var nonce [8]byte
	if _, err := rand.Read(nonce[:]); err != nil {
		return err
	}
	k.own = record{hostName(), binary.LittleEndian.Uint64(nonce[:]), addresses(l)}
	if len(c.Advertise) > 0 {
		k.own.Addresses = c.Advertise
	}
	text, err := json.Marshal(k.own)
	if err != nil {
		return err
	}
	if err := kv.Set(ctx, c.key(c.Rank), text, store.Lease); err != nil {
		return err
	}
	gate := &store.Gate{Name: "tcp", Most: mostStrangers + c.WorldSize}
	go gate.Serve(listener{l}, k.tls, func(conn *tls.Conn) { k.answer(gate, conn) })

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	for rank := range c.Rank {
		all.Go(func() {
			if err := k.call(ctx, kv, rank); err != nil {
				cancel(err) // no more attempts
			}
		})
	}
	err = k.await(ctx)
	cancel(err)
	all.Wait()
	if err != nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		for _, lanes := range k.joined {
			hangUp(lanes)
		}
	}
	return err
}

// hangUp closes lanes that are not used, of those that are there.
func hangUp(lanes []*lane) {
	for _, l := range lanes {
		if l != nil {
			_ = l.link.Close()
		}
	}
}

// await waits for all lanes of all pairs.
func (k *connector) await(ctx context.Context) error {
	for {
		k.mu.Lock()
		missing, changed := k.missing(), k.changed
		k.mu.Unlock()
		if len(missing) == 0 {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return k.error(ctx, missing)
		}
	}
	for rank, lanes := range k.joined {
		k.pairs[rank].lanes = lanes
	}
	return nil
}

// missing returns the ranks that lack lanes.
func (k *connector) missing() (missing []int) {
	for rank := range k.size {
		if lanes := k.joined[rank]; rank != k.rank && (len(lanes) == 0 || slices.Contains(lanes, nil)) {
			missing = append(missing, rank)
		}
	}
	return missing
}

// error names the ranks that did not come, and why, as far as it is known.
func (k *connector) error(ctx context.Context, missing []int) error {
	var refused *refusal
	if errors.As(context.Cause(ctx), &refused) {
		return refused
	}
	err := fmt.Errorf("%w: no connection to %s", comm.ContextError(ctx), ranks.Text(missing))
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, rank := range missing {
		if trouble := k.trouble[rank]; trouble != nil {
			return fmt.Errorf("%w; rank %d: %w", err, rank, trouble)
		}
	}
	return err
}

// refusal is the answer of a rank that does not want this one.
type refusal struct {
	rank int
	text string
}

func (r *refusal) Error() string { return fmt.Sprintf("refused by rank %d: %s", r.rank, r.text) }
func (r *refusal) Unwrap() error { return comm.ErrPeerFailed }

// call connects to a rank of lower number, until that succeeds, ctx ends, or the rank refuses.
func (k *connector) call(ctx context.Context, kv *store.Client, rank int) error {
	for {
		err := k.try(ctx, kv, rank)
		if err == nil || errors.As(err, new(*refusal)) {
			return err
		}
		k.mu.Lock()
		if ctx.Err() == nil {
			k.trouble[rank] = err
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
func (k *connector) try(ctx context.Context, kv *store.Client, rank int) error {
	text, err := kv.Get(ctx, k.config.key(rank))
	if err != nil {
		return err
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return err
	}
	h := hello{Nonce: r.Nonce, From: uint32(k.rank), To: uint32(rank), Size: uint32(k.size), Control: uint32(schedule.ControlBytes)}
	var errs []error
	for _, address := range r.candidates(k.own.Host) {
		first, roundTrip, err := k.dial(ctx, address, rank, h)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		lanes, window := lanesOf(roundTrip)
		if k.config.Connections > 0 {
			lanes = min(k.config.Connections, mostLanes)
		}
		h.Lanes, h.Window = uint32(lanes), uint32(window)
		all := make([]*lane, lanes)
		all[0] = k.newLane(rank, 0, first, window)
		if err := settle(ctx, first, h); err != nil {
			hangUp(all)
			return err
		}
		for i := 1; i < lanes; i++ {
			h.Lane = uint32(i)
			conn, _, err := k.dial(ctx, address, rank, h)
			if err != nil {
				hangUp(all) // the other side forgets them when the first one comes again
				return err
			}
			all[i] = k.newLane(rank, i, conn, window)
		}
		k.join(rank, func([]*lane) []*lane { return all })
		return nil
	}
	return fmt.Errorf("cannot be reached at %v: %w", r.Addresses, errors.Join(errs...))
}

// settle tells the other side of the first lane how many there are, and waits until it knows.
func settle(ctx context.Context, first *tls.Conn, h hello) error {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = first.Close() })
	err := binary.Write(first, binary.LittleEndian, h)
	if err == nil {
		_, err = io.ReadFull(first, make([]byte, 1))
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	return err
}

// dial makes one connection and says hello. Of the first lane it measures the round trip.
func (k *connector) dial(ctx context.Context, address string, rank int, h hello) (conn *tls.Conn, _ time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	plain, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, 0, err
	}
	defer func() {
		if err != nil {
			_ = plain.Close()
		}
	}()
	defer context.AfterFunc(ctx, func() { _ = plain.SetDeadline(time.Unix(1, 0)) })()
	conn = tls.Client(newLink(plain), k.tls)
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, 0, err
	}
	if err := binary.Write(conn, binary.LittleEndian, h); err != nil {
		return nil, 0, err
	}
	verdict, roundTrip := make([]byte, verdictBytes), dialTime
	for range pings {
		began := time.Now()
		if _, err := io.ReadFull(conn, verdict); err != nil {
			return nil, 0, err
		}
		if n := int(verdict[0]); n > 0 {
			return nil, 0, &refusal{rank, string(verdict[1 : 1+n])}
		}
		if h.Lanes > 0 {
			break
		}
		roundTrip = min(roundTrip, time.Since(began))
		if _, err := conn.Write(verdict[:1]); err != nil {
			return nil, 0, err
		}
	}
	return conn, roundTrip, nil
}

// answer serves a connection until it ends.
func (k *connector) answer(gate *store.Gate, conn *tls.Conn) {
	_ = conn.SetDeadline(time.Now().Add(greetTime))
	var h hello
	if err := binary.Read(conn, binary.LittleEndian, &h); err != nil {
		gate.Refuse(conn, "hello", "it did not say who it is")
		return
	}
	verdict := make([]byte, verdictBytes)
	if reason := k.refuses(&h); reason != "" {
		gate.Refuse(conn, "rank", reason)
		verdict[0] = byte(copy(verdict[1:], reason))
		_, _ = conn.Write(verdict)
		return
	}
	rank := int(h.From)
	if first := h.Lanes == 0; first {
		for range pings {
			if _, err := conn.Write(verdict); err != nil {
				return
			}
			if _, err := io.ReadFull(conn, verdict[:1]); err != nil {
				return
			}
		}
		if err := binary.Read(conn, binary.LittleEndian, &h); err != nil {
			return
		}
	} else if _, err := conn.Write(verdict[1:]); err != nil {
		return
	}
	if h.Lanes == 0 || h.Lanes > mostLanes || h.Lane >= h.Lanes || h.Window < leastWindow || h.Window > mostWindow {
		gate.Refuse(conn, "lanes", fmt.Sprintf("rank %d asks for lane %d of %d, %d bytes", rank, h.Lane, h.Lanes, h.Window))
		return
	}
	index := int(h.Lane)
	k.join(rank, func(lanes []*lane) []*lane {
		if index == 0 || len(lanes) != int(h.Lanes) {
			lanes = make([]*lane, h.Lanes)
		}
		return lanes
	})
	if _, err := conn.Write(verdict[:1]); err != nil { // of the first lane: the others may come
		return
	}
	_ = conn.SetDeadline(time.Time{})
	k.join(rank, func(lanes []*lane) []*lane {
		if index < len(lanes) { // or the rank has begun again
			lanes[index] = k.newLane(rank, index, conn, int(h.Window))
		}
		return lanes
	})
	<-k.pairs[rank].dead // whoever passed the connection closes it then
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
	}
	return ""
}

// newLane makes a lane of a connection.
func (k *connector) newLane(rank, index int, conn *tls.Conn, window int) *lane {
	p := k.pairs[rank]
	p.mu.Lock()
	p.window, p.credit = window, window
	p.mu.Unlock()
	return newLane(p, index, conn)
}

// join notes lanes of a rank.
func (k *connector) join(rank int, change func(lanes []*lane) []*lane) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.joined[rank] = change(k.joined[rank])
	close(k.changed)
	k.changed = make(chan struct{})
}
