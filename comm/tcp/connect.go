package tcp

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/fault"
	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/inquiry"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/ranks"
	"github.com/tutti-go/tutti/internal/repeats"
	"github.com/tutti-go/tutti/internal/waiting"
)

// maxStrangers bounds the connections that have not said who they are, beside the ranks.
const maxStrangers = 256

// Lanes are for links whose round trip is long: the windows of the kernel's connections are
// bounded, and each lost packet halves one of them. A lane gets laneBytes of the bytes that
// are on their way at linkRate, in bytes per second: 95 lanes at 100 ms. The window of the credit is twice
// these bytes, within its bounds.
const (
	linkRate  = 1e9 / 8
	laneBytes = 128 << 10
	maxLanes  = 96
	minWindow = 4 << 20
	maxWindow = 64 << 20
)

// Short links have several lanes as well, where one processor, which encrypts and copies what a lane carries, is slower
// than the link: up to parallelLanes, where there are processors for them, but fewer in larger worlds. These send to
// several ranks at a time, and pay for each lane with a handshake and the memory of a connection.
const (
	parallelLanes      = 4
	parallelProcessors = 4  // from which on there are several
	parallelRanks      = 16 // up to which there are several
)

// parallelLanesOf returns the number of lanes that the processors of this rank can use.
func parallelLanesOf(ranks, processors int) int {
	if ranks > parallelRanks || processors < parallelProcessors {
		return 1
	}
	if ranks <= 4 {
		return parallelLanes
	}
	return parallelLanes / 2
}

// kernelRoundTrip is the round trip that the kernel tells.
var kernelRoundTrip = roundTrip

// lanesOf returns the number of lanes, and the window, for a round trip.
func lanesOf(roundTrip time.Duration) (lanes, window int) {
	inFlight := int(linkRate * roundTrip.Seconds())
	lanes = min(max(inFlight/laneBytes, 1), maxLanes)
	window = min(max(2*inFlight, minWindow), maxWindow)
	return lanes, window
}

// connector connects a node.
type connector struct {
	*node
	config  Config      // with its defaults
	kv      store.Store // of the job
	tls     *tls.Config // for both sides of a connection
	gate    gate.Gate   // admits connections
	record  record      // what this rank publishes
	version uint64      // of the record in the store

	mu      sync.Mutex    // guards the lanes of all pairs, and what pairs have of the connector
	done    bool          // all lanes are there, or this rank has failed; guarded by mu
	changed chan struct{} // gets a value when a lane has joined
}

// connect makes the connections of a node. The rank's record stays in the store if that succeeds.
func connect(ctx context.Context, kv store.Store, c Config, n *node) error {
	k := &connector{node: n, config: c, kv: kv, tls: laneTLS(c.TLS), changed: make(chan struct{}, 1)}
	address := c.Listen
	if c.Network == nil || address == "" {
		address = withPort(address, "0")
	}
	l, err := gate.Listen(ctx, c.Network, address)
	switch {
	case err == nil:
	case waiting.Over(ctx): // while the name of the address was looked up
		<-ctx.Done()
		return fmt.Errorf("%w: %w", comm.ContextError(ctx), err)
	default:
		return fmt.Errorf("%w: %w", comm.ErrUnavailable, err)
	}
	defer l.Close() //nolint:errcheck // nobody else connects
	bounded, end := waiting.Bounded(ctx, c.Patience)
	defer end()
	ctx, cancel := context.WithCancelCause(bounded)
	defer cancel(nil)
	stop, err := kv.Watch(bounded, c.keys(), func(e store.Event) { k.hear(e, cancel) })
	if err != nil {
		return err
	}
	defer stop()
	// Also if this rank has heard of another version: that one has to hear of this one.
	if err := k.publish(bounded, l); err != nil {
		return err
	}
	g := &k.gate
	g.Name = name
	g.Places = maxStrangers + c.WorldSize*maxLanes
	go g.Serve(listener{l}, k.tls, func(conn *tls.Conn) { k.answer(g, conn) })

	var calls sync.WaitGroup
	for _, p := range k.pairs[:c.Rank] {
		calls.Go(func() {
			if err := k.call(ctx, p); err != nil {
				cancel(err) // no more attempts
			}
		})
	}
	err = k.await(ctx)
	cancel(err)
	calls.Wait()
	if err != nil {
		kv.Drop(c.key(c.Rank))
	}
	return err
}

// laneTLS is the configuration of lanes. A process of another version gets an error that says so.
func laneTLS(conf *tls.Config) *tls.Config {
	conf = conf.Clone()
	conf.NextProtos = []string{protocol}
	conf.DynamicRecordSizingDisabled = true
	conf.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		family, _, _ := strings.Cut(protocol, "/")
		isOurs := func(p string) bool {
			return strings.HasPrefix(p, family+"/")
		}
		if !slices.Contains(h.SupportedProtos, protocol) && slices.ContainsFunc(h.SupportedProtos, isOurs) {
			return nil, gate.ErrVersion
		}
		return nil, nil
	}
	return conf
}

// publish puts this rank's record into the store.
func (k *connector) publish(ctx context.Context, l net.Listener) error {
	addresses, err := k.addresses(l)
	if err != nil {
		return err
	}
	k.record = record{protocol, rand.Uint64(), addresses}
	if k.rank == 0 {
		k.node.run = k.record.run()
	}
	text, err := json.Marshal(k.record)
	if err != nil {
		return err
	}
	now, ok, err := k.kv.CompareAndSet(ctx, k.config.key(k.rank), 0, text, store.Lease)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%w: another process connects as rank %d: %.1000q", store.ErrRefused, k.rank, now.Value)
	}
	k.version = now.Version
	return nil
}

// addresses are where other ranks reach a listener of this one.
func (k *connector) addresses(l net.Listener) ([]string, error) {
	advertised := slices.Clone(k.config.Advertise)
	if k.config.Network == nil {
		if len(advertised) == 0 {
			advertised = gate.Addresses(l)
		}
		_, port, _ := net.SplitHostPort(l.Addr().String())
		for i, address := range advertised {
			advertised[i] = withPort(address, port)
		}
		return advertised, nil
	}
	if len(advertised) > 0 {
		return advertised, nil
	}
	address := l.Addr().String()
	host, _, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err == nil && (host == "" || ip != nil && ip.IsUnspecified()) {
		return nil, fmt.Errorf("%w: the Network listens at %q, which is no address that others reach: "+
			"set Advertise, or have the listener's Addr say it", comm.ErrArgument, address)
	}
	return []string{address}, nil
}

// withPort adds a port to an address that has none.
func withPort(address, port string) string {
	if _, _, err := net.SplitHostPort(address); err != nil {
		return net.JoinHostPort(strings.Trim(address, "[]"), port)
	}
	return address
}

// await waits for all lanes of all pairs. It says what it waits for.
func (k *connector) await(ctx context.Context) error {
	reminder := waiting.Remind()
	defer reminder.Stop()
	defer inquiry.Begin(inquiry.Wait{Rank: k.rank, Size: k.size, Text: k.waits})()
	for {
		lost := k.kv.Err()
		missing, done := k.missing(ctx.Err() != nil || lost != nil)
		if missing.none() {
			return nil
		}
		if done {
			return k.failure(ctx, missing, lost)
		}
		select {
		case <-k.changed:
		case <-k.kv.Done():
		case <-ctx.Done():
		case <-reminder.C:
			waited := reminder.Next()
			if m, done := k.missing(false); !done {
				slog.Warn("tcp: waiting for other ranks",
					"rank", k.rank, "missing", m.String(), "why", m.trouble(), "waited", waited)
			}
		}
	}
}

// hear takes what another rank has published: a record, which ends the wait if the rank is of another version, or why
// it cannot reach this one.
func (k *connector) hear(e store.Event, cancel context.CancelCauseFunc) {
	if e.Deleted {
		return
	}
	if rank, ok := k.rankOf(e.Key, k.config.keys()); ok {
		if _, err := readRecord(rank, e.Value); errors.Is(err, store.ErrRefused) {
			cancel(err)
		}
	}
	if rank, ok := k.rankOf(e.Key, k.config.reports(k.rank)); ok && rank > k.rank {
		text := printable.Text(string(e.Value[:min(len(e.Value), longestReport)]))
		k.note(k.pairs[rank], heardError(text))
	}
}

// heardError is why another rank cannot connect to this one, in its words.
type heardError string

// Error implements error.
func (h heardError) Error() string { return "it reports that this rank " + string(h) }

// triedError is the error of an attempt to connect to another rank at each of its addresses.
type triedError struct {
	addresses []string // that were tried
	cause     error    // of the failures, one a line
}

// Error implements error. It is one line: other ranks get it as a report.
func (t *triedError) Error() string {
	return fmt.Sprintf("cannot be reached at %v: %s", t.addresses, oneLine(t.cause))
}

// Unwrap returns the cause.
func (t *triedError) Unwrap() error { return t.cause }

// pendingError is the state of the first attempt to connect to another rank.
type pendingError struct {
	addresses []string // that have not answered yet
	failed    error    // of the others, one a line; nil if there are none
}

// Error implements error.
func (t *pendingError) Error() string {
	text := fmt.Sprintf("no answer yet from %v", t.addresses)
	if t.failed == nil {
		return text
	}
	return text + "; " + oneLine(t.failed)
}

// oneLine returns the text of joined errors.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// rankOf returns the rank of the world that is behind a prefix of a key.
func (k *connector) rankOf(key, prefix string) (rank int, ok bool) {
	text, ok := strings.CutPrefix(key, prefix)
	if !ok {
		return 0, false
	}
	rank, err := strconv.Atoi(text)
	return rank, err == nil && rank >= 0 && rank < k.size
}

// report tells a rank why this one cannot reach it: it does not know.
func (k *connector) report(ctx context.Context, p *pair, trouble *triedError) {
	text := trouble.Error()
	key := k.config.reports(p.rank) + strconv.Itoa(k.rank)
	_ = k.kv.Set(ctx, key, []byte(text[:min(len(text), longestReport)]), store.Lease) // the wait goes on without it
}

// longestReport bounds what a rank reports to another one, in bytes.
const longestReport = 2 << 10

// missing returns the ranks to which there are not all lanes, and whether the connector is done: if there are
// none, or because the caller ends it.
func (k *connector) missing(ends bool) (m missingRanks, done bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	m = k.absent()
	k.done = ends || m.none()
	return m, k.done
}

// waits says what await waits for.
func (k *connector) waits() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.absent()
	switch {
	case m.none():
		return "connecting to the other ranks, to which there are connections"
	case m.trouble() == nil:
		return fmt.Sprintf("connecting to the other ranks: %v", m)
	}
	return fmt.Sprintf("connecting to the other ranks: %v (%v)", m, m.trouble())
}

// absent returns the ranks to which there are not all lanes. mu is held.
func (k *connector) absent() (m missingRanks) {
	for rank, p := range k.pairs {
		switch {
		case rank == k.rank || p.lanes != nil && !slices.Contains(p.lanes, nil):
		case p.attempt == 0:
			m.unreached = append(m.unreached, rank)
			m.unreachedTrouble = cmp.Or(m.unreachedTrouble, k.troubleWith(p))
		default: // it may have ended because of the unreached ones
			m.lost = append(m.lost, rank)
			m.lostTrouble = cmp.Or(m.lostTrouble, p.trouble)
		}
	}
	return m
}

// troubleWith is why there was never a lane to a rank. mu is held.
func (k *connector) troubleWith(p *pair) error {
	trouble := k.gate.Trouble()
	switch {
	case trouble != nil && p.rank > k.rank: // which connects to this one
		return fmt.Errorf("rank %d: this rank cannot accept connections: %w", p.rank, trouble)
	case p.trouble != nil:
		return p.trouble
	case p.rank < k.rank:
		return fmt.Errorf("rank %d: it has published no address", p.rank)
	}
	const format = "rank %d: it has not connected to this rank, which listens at %v"
	return fmt.Errorf(format, p.rank, k.record.Addresses)
}

// failure is why a rank is not connected to all others: it was refused, the store was lost, or ctx has ended.
func (k *connector) failure(ctx context.Context, m missingRanks, lost error) error {
	if cause := context.Cause(ctx); errors.Is(cause, store.ErrRefused) {
		return cause
	}
	if lost != nil {
		// The rank that serves the store may have waited for this one in vain, and have ended first.
		return fmt.Errorf("%w; the store was lost meanwhile: %w", m.reason(), lost)
	}
	err := fmt.Errorf("%w: %w", comm.ContextError(ctx), m.reason())
	if k.node.report != nil && errors.Is(err, comm.ErrTimeout) {
		k.node.report(k.unreachedReports(m.unreached))
	}
	return &incomplete{err, m.unreached}
}

// unreachedReports are for the launcher: which ranks this one was never connected to, and why.
func (k *connector) unreachedReports(unreached []int) (list []fault.Report) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, rank := range unreached {
		trouble := k.troubleWith(k.pairs[rank])
		reason := strings.TrimPrefix(trouble.Error(), fmt.Sprintf("rank %d: ", rank))
		r := fault.Report{Kind: fault.Unreached, By: k.rank, About: rank, Reason: reason}
		var heard heardError
		switch {
		case errors.As(trouble, &heard):
			r.Kind = fault.Heard
			r.Reason = string(heard)
		case errors.As(trouble, new(*triedError)):
			r.Kind = fault.Tried
		}
		list = append(list, r)
	}
	return list
}

// missingRanks are ranks to which there are not all lanes.
type missingRanks struct {
	unreached        []int // to which there never was a lane
	unreachedTrouble error // of the first of them that has any
	lost             []int // whose lanes were lost
	lostTrouble      error // of the first of them that has any
}

func (m missingRanks) none() bool { return m.unreached == nil && m.lost == nil }

// trouble is why the first of them is missing, nil if that is not known.
func (m missingRanks) trouble() error {
	return cmp.Or(m.unreachedTrouble, m.lostTrouble)
}

// reason names the ranks, and says why the first of them is missing and what may help.
func (m missingRanks) reason() error {
	trouble := m.trouble()
	switch {
	case trouble == nil:
		return errors.New(m.String())
	case strings.Contains(trouble.Error(), "i/o timeout"): // text, since another rank may have reported it
		return fmt.Errorf("%v; %w (does a firewall let the machines reach each other?)", m, trouble)
	}
	return fmt.Errorf("%v; %w", m, trouble)
}

// String names the ranks.
func (m missingRanks) String() string {
	var parts []string
	if m.unreached != nil {
		parts = append(parts, "no connection to "+ranks.Text(m.unreached))
	}
	if m.lost != nil {
		parts = append(parts, "connection lost to "+ranks.Text(m.lost))
	}
	return strings.Join(parts, ", ")
}

// incomplete is the error of a rank whose context has ended before it was connected to all others.
type incomplete struct {
	error           // what to tell
	unreached []int // ranks of the world
}

// Unwrap returns the cause.
func (i *incomplete) Unwrap() error { return i.error }

// MissingRanks returns the ranks that there was never a connection to: others may have ended theirs because of these.
func (i *incomplete) MissingRanks() []int { return i.unreached }

// note keeps what is wrong with a rank, for the error of a rank that waits in vain.
func (k *connector) note(p *pair, trouble error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p.trouble = fmt.Errorf("rank %d: %w", p.rank, trouble)
}

// begin notes which addresses of a rank are tried for the first time, and how others have failed.
func (k *connector) begin(p *pair, addresses []string, failed []error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p.trouble == nil || errors.As(p.trouble, new(*pendingError)) {
		p.trouble = fmt.Errorf("rank %d: %w", p.rank, &pendingError{addresses, errors.Join(failed...)})
	}
}

// call connects to a rank of lower number, again if the connection is lost, until ctx ends or the rank refuses.
func (k *connector) call(ctx context.Context, p *pair) error {
	const attempts = 1 << 20 // of a process, far fewer in fact
	var failures repeats.Log
	for attempt := k.version * attempts; ; attempt++ {
		err := k.try(ctx, p, attempt+1)
		switch {
		case errors.Is(err, store.ErrRefused):
			return err
		case err == nil:
			select {
			case <-ctx.Done():
			case <-p.retry:
			}
		case !waiting.Over(ctx) && k.kv.Err() == nil:
			// Either end would be the reason otherwise, instead of what has kept this rank waiting.
			k.note(p, err)
			_, due := failures.Count(err.Error())
			if tried := new(triedError); due && errors.As(err, &tried) {
				k.report(ctx, p, tried)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(retryTime):
		}
	}
}

// try makes the lanes to a rank, at the first of its addresses where it answers.
func (k *connector) try(ctx context.Context, p *pair, attempt uint64) error {
	text, err := k.kv.Get(ctx, k.config.key(p.rank))
	if err != nil {
		return err
	}
	r, err := readRecord(p.rank, text)
	if err != nil {
		return err
	}
	if k.config.Network == nil {
		nearFirst(r.Addresses)
	}
	h := hello{
		Nonce:   r.Nonce,
		Attempt: attempt,
		Silence: int64(k.config.Silence),
		From:    uint32(k.rank),
		To:      uint32(p.rank),
		Size:    uint32(k.size),
		Control: uint32(schedule.ControlBytes),
	}
	addresses := r.Addresses
	if k.config.Network == nil { // whose links are this host's
		addresses = gate.Zoned(addresses)
	}
	var errs []error
	for i, address := range addresses {
		k.begin(p, addresses[i:], errs)
		err := k.lanes(ctx, address, p, h)
		if err == nil && p.rank == 0 {
			k.node.run = r.run()
		}
		if err == nil || errors.Is(err, store.ErrRefused) {
			return err
		}
		errs = append(errs, err)
	}
	return &triedError{r.Addresses, errors.Join(errs...)}
}

// nearFirst sorts addresses: those in networks that this host is in come first, and link-local ones last. Every host is
// in a network of these, seldom in the same one, and each is tried on several interfaces.
func nearFirst(addresses []string) {
	interfaces, _ := net.InterfaceAddrs()
	const (
		near = iota
		far
		link
	)
	distance := func(address string) int {
		a, _ := netip.ParseAddrPort(address)
		ip := net.IP(a.Addr().AsSlice())
		if ip.IsLinkLocalUnicast() {
			return link
		}
		for _, i := range interfaces {
			if n, ok := i.(*net.IPNet); ok && n.Contains(ip) {
				return near
			}
		}
		return far
	}
	slices.SortStableFunc(addresses, func(a, b string) int { return distance(a) - distance(b) })
}

// dial makes a connection to who knows the secret.
func (k *connector) dial(ctx context.Context, address string) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	plain, err := gate.Dial(ctx, k.config.Network, address)
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

// redial is dial to an address where a lane's handshake has succeeded: its gate may hang up on others while it is
// crowded.
func (k *connector) redial(ctx context.Context, address string) (*tls.Conn, error) {
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
// a process that is slow to answer would have it answer ever more slowly.
func (k *connector) lanes(ctx context.Context, address string, p *pair, h hello) error {
	first, err := k.dial(ctx, address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	shortest, err := measureRoundTrip(ctx, first, h)
	if err != nil {
		return errors.Join(err, first.NetConn().Close())
	}
	lanes, window := lanesOf(shortest)
	if !k.shares(first) {
		lanes = max(lanes, parallelLanesOf(k.size, runtime.GOMAXPROCS(0)))
	}
	switch {
	case k.config.Connections > 0:
		lanes = min(k.config.Connections, maxLanes)
	case k.config.Network != nil:
		lanes = 1 // the kernel ends no other one that carries nothing any more ([node.stuckTime])
	}
	h.Lanes = uint32(lanes)
	h.Window = uint32(window)
	conns, err := k.greetAll(ctx, first, address, h)
	for i, conn := range conns {
		if conn == nil {
			continue
		}
		h.Lane = uint32(i)
		if err != nil || !k.joinDialed(p, &h, conn) {
			_ = conn.NetConn().Close()
		}
	}
	return err
}

// shares reports whether messages to the other end of a connection go through shared memory.
func (k *connector) shares(conn *tls.Conn) bool {
	local, _ := conn.LocalAddr().(*net.TCPAddr)
	remote, _ := conn.RemoteAddr().(*net.TCPAddr)
	return machine(k.rank) != 0 && local != nil && remote != nil && local.IP.Equal(remote.IP)
}

// measureRoundTrip returns the round trip of a connection: the kernel's, or the shortest of some hellos.
func measureRoundTrip(ctx context.Context, conn *tls.Conn, h hello) (time.Duration, error) {
	shortest, known := kernelRoundTrip(conn.NetConn().(*link).socket)
	for i := 0; i < pings && !known; i++ {
		began := time.Now()
		if err := greet(ctx, conn, h); err != nil {
			return 0, err
		}
		if took := time.Since(began); i == 0 || took < shortest {
			shortest = took
		}
	}
	return shortest, nil
}

// greetAll makes the connections of all lanes beside the first, and says hello on each.
func (k *connector) greetAll(ctx context.Context, first *tls.Conn, address string, h hello) ([]*tls.Conn, error) {
	conns := make([]*tls.Conn, h.Lanes)
	errs := make([]error, h.Lanes)
	conns[0] = first
	var greetings sync.WaitGroup
	for i := range conns {
		h := h
		h.Lane = uint32(i)
		greetings.Go(func() {
			if i > 0 {
				conns[i], errs[i] = k.redial(ctx, address)
			}
			if errs[i] == nil {
				errs[i] = greet(ctx, conns[i], h)
			}
		})
	}
	greetings.Wait()
	return conns, cmp.Or(errs...)
}

// joinDialed makes a connection that this rank has dialed a lane, and reports whether it did.
func (k *connector) joinDialed(p *pair, h *hello, conn *tls.Conn) bool {
	l := k.join(p, h, conn, false)
	if l != nil {
		go k.watch(l) //nolint:errcheck // its reader gets it
	}
	return l != nil
}

// join makes a connection a lane of its pair, unless a later attempt has begun. The side that accepts it says
// welcome before anything else is sent.
func (k *connector) join(p *pair, h *hello, conn *tls.Conn, accepts bool) *lane {
	k.mu.Lock()
	defer k.mu.Unlock()
	if h.Attempt > p.attempt && !k.done {
		p.closeLanes()
		p.attempt = h.Attempt
		p.lanes = make([]*lane, h.Lanes)
		p.credit = newCredit(int(h.Window))
	}
	if k.done || h.Attempt < p.attempt || len(p.lanes) != int(h.Lanes) || p.lanes[h.Lane] != nil {
		return nil
	}
	if accepts {
		if _, err := conn.Write([]byte{byte(welcome)}); err != nil {
			return nil
		}
	}
	l := newLane(p, int(h.Lane), conn)
	p.lanes[h.Lane] = l
	notify(k.changed)
	return l
}

// watch waits for the first byte on a lane. If the lane ends before all are there, those of its pair are made
// again: the other process has ended, and another one may come in its place.
func (k *connector) watch(l *lane) error {
	_, err := io.ReadFull(l.secure, l.head[:1])
	p := l.pair
	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil && !k.done && slices.Contains(p.lanes, l) {
		p.closeLanes()
		p.lanes = nil
		p.trouble = fmt.Errorf("rank %d: %w", p.rank, connectionLost(err))
		notify(p.retry)
	}
	l.first <- err
	return err
}
