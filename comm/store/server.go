package store

import (
	"bufio"
	"cmp"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/printable"
)

const (
	protocol    = 3        // the version of what follows
	longestLine = 8 << 20  // of what a process sends
	mostQueued  = 64 << 20 // bytes of messages that a side has not taken yet
)

// greeting is who a process is.
type greeting struct {
	Name    string `json:"name"`            // of one process at a time
	Title   string `json:"title,omitempty"` // how others call the process, "" by its name
	Size    int    `json:"size,omitempty"`  // of the job
	Process string `json:"process"`         // random: tells a process that connects again from another one with its name
	Version int    `json:"version"`         // of the store's protocol
	Job     string `json:"job,omitempty"`   // its name; "" is one without a name
}

// check returns an error unless a process says who it is, in a text that can be printed.
func (h *greeting) check() error {
	for _, text := range []string{h.Name, h.Title, h.Process, h.Job} {
		if err := printable.CheckName(text); err != nil {
			return fmt.Errorf("a process or its job: %w", err)
		}
	}
	if h.Name == "" {
		return errors.New("a process needs a name")
	}
	return nil
}

// title is how others call the process.
func (h *greeting) title() string { return cmp.Or(h.Title, h.Name) }

// otherVersion is why a process of another version is refused.
func (h *greeting) otherVersion() string {
	return fmt.Sprintf("%s speaks version %d of the store's protocol, this process %d: %s",
		h.title(), h.Version, protocol, oneVersion)
}

// otherVersion is why a process refuses a store of another version.
func (w *welcome) otherVersion() string {
	return fmt.Sprintf("it speaks version %d of the store's protocol, this process %d: %s",
		w.Version, protocol, oneVersion)
}

const oneVersion = "all processes of a job use one version of tutti"

// greet reads the greeting of a process that knows the secret. ok is false if it does not say who it is.
func greet(conn *tls.Conn, lines *bufio.Scanner, g *gate.Gate) (hello greeting, ok bool) {
	lines.Buffer(nil, longestLine)
	said := conn.SetDeadline(time.Now().Add(gate.Patience)) == nil && lines.Scan()
	if !said || json.Unmarshal(lines.Bytes(), &hello) != nil || hello.check() != nil {
		g.Refuse(conn, "hello", "it knows the secret, but did not say who it is")
		return hello, false
	}
	return hello, true
}

// next reads the next request. The connection has ended if ok is false, and err says why unless the process closed it
// or has ended.
func next(conn *tls.Conn, lines *bufio.Scanner, silence time.Duration) (r request, ok bool, err error) {
	if silence > 0 {
		if err := conn.SetReadDeadline(time.Now().Add(silence)); err != nil {
			return r, false, err
		}
	}
	if !lines.Scan() {
		if err := lines.Err(); !errors.Is(err, syscall.ECONNRESET) { // the end of a process that had not read all
			return r, false, err
		}
		return r, false, nil
	}
	err = json.Unmarshal(lines.Bytes(), &r)
	return r, err == nil, err
}

// welcome answers a greeting.
type welcome struct {
	Version int           `json:"version"`           // of the store's protocol; 0 of versions that did not say it
	Refused string        `json:"refused,omitempty"` // why the store wants none of this process, "" if it is welcome
	Failed  string        `json:"failed,omitempty"`  // why this server of the store cannot serve the process now
	Kind    kind          `json:"kind,omitempty"`    // of what has failed
	Silence time.Duration `json:"silence,omitempty"` // the process says something more often than that
}

// Options of a [Server].
type Options struct {
	// Size is the size of the job; processes with another size are refused. 0 accepts any.
	Size int
	// Job is the name of the job; processes of a job with another name are refused. "" is a job without a name.
	Job string
	// Silence ends the session of a process that sends nothing for this long, even if it is stopped; processes send
	// heartbeats. 0 relies on TCP's keep-alive, which detects a lost connection in 25 s.
	Silence time.Duration
}

// Server keeps a store for clients of this process and of others.
type Server struct {
	options Options   // as given, with defaults
	gate    gate.Gate // refuses strangers

	mu        sync.Mutex          // guards what follows; taken before outbox.mu
	state     state               // what is stored; the zero value is an empty store
	last      uint64              // session; 0 before the first
	sessions  map[uint64]*session // by number
	listeners []net.Listener      // of Serve, closed by Close
	closed    bool                // Close was called: nobody is welcome any more

	foreigners map[string]bool // hosts with processes of another secret or version; nil before the first
}

// titled is the name of a job in a sentence.
func titled(job string) string {
	if job == "" {
		return "without a name"
	}
	return strconv.Quote(job)
}

// session is a process that has said who it is.
type session struct {
	number uint64        // 1 and up, never used again
	hello  greeting      // what it has said of itself
	from   string        // its address, for errors
	conn   *tls.Conn     // nil in the server's own process
	out    outbox[reply] // answers and events; locks itself
}

// RefusedKey holds the last refusal of a process that knows the secret. Keys that begin with it and a slash hold the
// refusals of processes that know another secret, by host.
const RefusedKey = "store/refused"

// mostForeigners bounds the hosts of which a store keeps that they know another secret.
const mostForeigners = 16

// NewServer makes an empty store.
func NewServer(options Options) *Server {
	s := &Server{
		options:  options,
		gate:     gate.Gate{Name: "store", Places: options.Size + 256},
		sessions: map[uint64]*session{},
	}
	s.gate.Refused = s.noteForeigner
	s.state.Open(0) // the server's own
	return s
}

// Serve answers processes that connect and know the secret of conf ([TLS]), until [Server.Close]. It returns at once.
// The listener may be one of a [Network].
func (s *Server) Serve(l net.Listener, conf *tls.Config) {
	listener := gate.Bind(l)
	s.mu.Lock()
	s.listeners = append(s.listeners, listener)
	s.mu.Unlock()
	go s.gate.Serve(listener, conf, s.serve)
}

// Owner is [Server.Local] for a client that also closes the server.
func (s *Server) Owner(name string) *Client {
	c := s.Local(name)
	end := c.end
	c.end = func() error { return errors.Join(s.Close(), end()) }
	return c
}

// Local is a client in the server's process. Watches call in the goroutine that makes the change.
func (s *Server) Local(name string) *Client {
	c := newClient(nil)
	deliver := func(replies []reply) error {
		for i := range replies {
			c.handle(&replies[i])
		}
		return nil
	}
	n := &session{
		hello: greeting{Name: name},
		from:  "this process",
		out:   outbox[reply]{limit: math.MaxInt, send: deliver},
	}
	s.mu.Lock()
	s.admit(n)
	s.mu.Unlock()
	c.post = func(r request) error { s.apply(n.number, &r); return nil }
	c.end = func() error { s.end(n); return nil }
	return c
}

// apply makes a request.
func (s *Server) apply(session uint64, r *request) {
	s.mu.Lock()
	s.route(s.state.Apply(session, r))
}

// route queues replies and unlocks the server. Clients of this process get theirs here.
func (s *Server) route(replies []reply) {
	var local []*session
	for _, r := range replies {
		to := s.sessions[r.To]
		if to == nil {
			continue
		}
		cost := 0
		for _, e := range r.Entries {
			cost += len(e.Key) + len(e.Value)
		}
		switch first, err := to.out.push(r, cost); {
		case err != nil: // it does not take what it asked for
			to.conn.NetConn().Close() //nolint:errcheck // serve ends
		case first && to.conn == nil:
			local = append(local, to)
		case first:
			go to.out.drain()
		}
	}
	s.mu.Unlock()
	for _, l := range local {
		l.out.drain()
	}
}

// admit begins a session. The server is locked.
func (s *Server) admit(n *session) {
	s.last++
	n.number = s.last
	s.sessions[n.number] = n
	s.state.Open(n.number)
}

// end ends a session.
func (s *Server) end(n *session) {
	s.mu.Lock()
	delete(s.sessions, n.number)
	s.route(s.state.End(n.number))
}

// claim begins the session of a process that knows the secret, or returns why it is refused. A process that connects
// again has lost its first connection.
func (s *Server) claim(n *session) (refused string) {
	s.mu.Lock()
	var before *session
	for _, known := range s.sessions {
		if known.hello.Name == n.hello.Name {
			before = known
		}
	}
	switch h := n.hello; {
	case h.Version != protocol:
		refused = h.otherVersion()
	case h.Job != s.options.Job:
		const text = "%s looks for the job %s, and this store, which a process of the job keeps, has one %s: " +
			"all processes of a job give it one name (tutti launch --job), or none"
		refused = fmt.Sprintf(text, h.title(), titled(h.Job), titled(s.options.Job))
	case s.closed:
		refused = "the store is closed"
	case s.options.Size > 0 && h.Size != s.options.Size:
		refused = fmt.Sprintf("%s of %d in a job of %d", h.title(), h.Size, s.options.Size)
	case before != nil && (before.conn == nil || before.hello.Process != h.Process):
		refused = fmt.Sprintf("%s is here already, from %s: two processes have the same name", h.title(), before.from)
	}
	if refused != "" {
		report := request{Op: opSet, Key: RefusedKey, Value: []byte(n.from + ": " + refused)}
		s.route(s.state.Apply(0, &report))
		return refused
	}
	s.admit(n)
	s.mu.Unlock()
	if before != nil {
		before.conn.NetConn().Close() //nolint:errcheck // nothing is lost
		s.end(before)
	}
	return ""
}

// noteForeigner keeps that a host's process knows another secret, or is of another version, for those who wait for it.
func (s *Server) noteForeigner(conn net.Conn, reason string) {
	from := conn.RemoteAddr().String()
	host, _, err := net.SplitHostPort(from)
	if reason != gate.Secret && reason != gate.ErrVersion.Error() || err != nil {
		return
	}
	s.mu.Lock()
	if s.closed || !s.foreigners[host] && len(s.foreigners) == mostForeigners {
		s.mu.Unlock()
		return
	}
	if s.foreigners == nil {
		s.foreigners = map[string]bool{}
	}
	s.foreigners[host] = true
	report := request{Op: opSet, Key: RefusedKey + "/" + host, Value: []byte(from + ": " + reason)}
	s.route(s.state.Apply(0, &report))
}

// serve is one connection.
func (s *Server) serve(conn *tls.Conn) {
	lines := bufio.NewScanner(conn)
	// Nothing comes before the welcome.
	n := &session{conn: conn, from: conn.RemoteAddr().String(), out: outbox[reply]{limit: mostQueued, busy: true,
		send: sender[reply](conn), finish: conn.CloseWrite}}
	var ok bool
	if n.hello, ok = greet(conn, lines, &s.gate); !ok {
		return
	}
	w := welcome{Version: protocol, Silence: s.options.Silence}
	w.Refused = s.claim(n)
	if w.Refused != "" {
		s.gate.Refuse(conn, "known", w.Refused) // before the answer has consequences
		_ = sender[welcome](conn)([]welcome{w})
		return
	}
	defer s.end(n)
	if sender[welcome](conn)([]welcome{w}) != nil || conn.SetReadDeadline(time.Time{}) != nil {
		return
	}
	n.out.drain()
	for {
		r, open, err := next(conn, lines, s.options.Silence)
		if err != nil && !errors.Is(err, net.ErrClosed) {
			s.gate.Warn(conn, "session lost", "session", n.hello.title()+": "+err.Error())
		}
		if !open {
			return
		}
		s.apply(n.number, &r)
	}
}

// Close ends the store. Earlier messages still reach the clients that read them soon.
func (s *Server) Close() error {
	var err error
	s.mu.Lock()
	s.closed = true
	for _, l := range s.listeners {
		err = errors.Join(err, l.Close())
	}
	var open []*session
	for _, n := range s.sessions {
		if n.conn != nil {
			open = append(open, n)
		}
	}
	s.listeners = nil
	s.mu.Unlock()
	flushed := make(chan struct{}, len(open))
	for _, n := range open { // each by itself: one that takes nothing is waited for until the deadline of TLS
		go func() {
			// They close the connection then. Unread data would reset it.
			_ = n.conn.SetReadDeadline(time.Now().Add(gate.Patience))
			<-n.out.close()
			flushed <- struct{}{}
		}()
	}
	late := time.After(flushTime)
	for range open {
		select {
		case <-flushed:
		case <-late:
			return err
		}
	}
	return err
}

// outbox has messages for one side in order. One goroutine at a time sends them, and none while there are none.
type outbox[T any] struct {
	send   func(batch []T) error // writes messages; one call at a time, without mu
	finish func() error          // after the last message; once, without mu, since it may wait for the other side
	limit  int                   // bytes of all messages but one

	mu     sync.Mutex    // guards what follows; taken under Server.mu
	list   []T           // messages that are not sent, in order
	bytes  int           // of list
	busy   bool          // a goroutine sends; it goes on until the list is empty
	closed chan struct{} // when all is sent after close; nil before
	err    error         // why nothing can be sent any more, nil while it can
}

// push queues a message and counts its bytes. The caller that pushes the first one calls drain.
func (o *outbox[T]) push(m T, bytes int) (first bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.err != nil:
		return false, o.err
	case o.closed != nil:
		return false, net.ErrClosed
	case o.bytes > o.limit-bytes && o.bytes > 0:
		return false, ErrFull
	}
	const overhead = 128
	o.list = append(o.list, m)
	o.bytes += bytes + overhead
	first = !o.busy
	o.busy = true
	return first, nil
}

// drain sends what is queued.
func (o *outbox[T]) drain() {
	if o.empty() {
		o.end()
	}
}

// empty sends what is queued, and reports whether the outbox was closed meanwhile.
func (o *outbox[T]) empty() (closed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.list) > 0 && o.err == nil {
		batch := o.list
		o.list = nil
		o.bytes = 0
		o.mu.Unlock()
		err := o.send(batch)
		o.mu.Lock()
		o.err = err
	}
	o.busy = false
	return o.closed != nil
}

// end says that all is sent. Called once, by who has sent the last message or finds none; mu is not held.
func (o *outbox[T]) end() {
	_ = o.finish()
	close(o.closed)
}

// close ends the outbox behind what is queued.
func (o *outbox[T]) close() (flushed <-chan struct{}) {
	o.mu.Lock()
	first := o.closed == nil
	if first {
		o.closed = make(chan struct{})
	}
	idle := !o.busy
	o.mu.Unlock()
	if first && idle {
		o.end()
	}
	return o.closed
}

// sender writes messages as lines of JSON, in a bounded time.
func sender[T any](conn net.Conn) func(batch []T) error {
	buffer := bufio.NewWriter(conn)
	out := json.NewEncoder(buffer)
	return func(batch []T) error {
		if err := conn.SetWriteDeadline(time.Now().Add(gate.Patience)); err != nil {
			return err
		}
		for i := range batch {
			if err := out.Encode(&batch[i]); err != nil {
				return err
			}
		}
		return buffer.Flush()
	}
}
