package rendezvous

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"
)

// Invitation tells the other ranks where rank 0 keeps their reports. It contains the
// secret, so no one else may see it.
type Invitation struct {
	Addresses []string `json:"addresses"`
	Secret    []byte   `json:"secret"`
}

// reportMessage is a line of a connection between a rank and rank 0: a report, a
// question for the reports of a group, or the answer to one. A rank that aborts asks as
// well. Its answer comes when rank 0 has told all other ranks and they have confirmed it.
// Rank 0 also tells which groups its own process is in.
type reportMessage struct {
	Group   string         `json:"group,omitempty"`
	Rank    int            `json:"rank,omitempty"`
	Text    string         `json:"text,omitempty"`
	Left    bool           `json:"left,omitempty"`
	Aborted bool           `json:"aborted,omitempty"`
	Done    uint64         `json:"done,omitempty"`  // collectives that it had seen done when it aborted
	Told    uint64         `json:"told,omitempty"`  // the number of what rank 0 tells
	Home    bool           `json:"home,omitempty"`  // rank 0's process is in the group, as that rank, until it has left
	Known   bool           `json:"known,omitempty"` // what came before is all that rank 0 knew when the connection began
	Ask     uint64         `json:"ask,omitempty"`
	Last    map[int]Report `json:"last,omitempty"`
}

// longestReport bounds a line that a rank sends: a group's name can list thousands of
// ranks. mostGroups bounds the groups in which one rank's reports are kept, those in which
// it aborts at a time, and the messages that wait for its connection.
const (
	longestReport = 64 << 10
	mostGroups    = 1 << 12
)

// tellTimeout bounds how long rank 0 waits for a rank to confirm that another one aborted.
const tellTimeout = 500 * time.Millisecond

// ReportKeeper keeps the reports of all ranks, at rank 0.
type ReportKeeper struct {
	LocalReports
	job       Job
	listener  net.Listener
	strangers strangers

	mu        sync.Mutex
	followers map[*follower]bool // nil when closed
	home      map[string]int     // the groups that rank 0's process is in, and its rank there
	tellings  uint64             // so far
	tellTime  time.Duration      // that they have to hear something
}

// follower is the connection of another rank.
type follower struct {
	conn net.Conn
	mu   sync.Mutex // of what is sent
	out  *json.Encoder
	told map[uint64]func() // called when it confirms a message, by number; the keeper's lock guards it
}

// send sends a message, in a bounded time.
func (f *follower) send(m *reportMessage) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.encode(m)
}

// encode is send with the lock held.
func (f *follower) encode(m *reportMessage) error {
	if err := f.conn.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	return f.out.Encode(m)
}

// KeepReports listens for the reports of the other ranks of a job until it is closed, on
// this host's loopback address or on all addresses. A connection begins with the handshake
// of [Job.Broadcast] and a new secret. Connections that do not say who they are give way to
// newer ones.
func KeepReports(thisHost bool) (*ReportKeeper, Invitation, error) {
	invitation := Invitation{Secret: newSecret()}
	host := ""
	if thisHost {
		host = "127.0.0.1"
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, invitation, err
	}
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		return nil, invitation, errors.Join(err, listener.Close())
	}
	hosts := []string{"127.0.0.1"}
	if !thisHost {
		addresses, _ := net.InterfaceAddrs()
		for _, a := range addresses {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
				hosts = append(hosts, n.IP.String())
			}
		}
	}
	for _, h := range hosts {
		invitation.Addresses = append(invitation.Addresses, net.JoinHostPort(h, port))
	}
	return keepReports(listener, invitation.Secret), invitation, nil
}

func keepReports(listener net.Listener, secret []byte) *ReportKeeper {
	k := &ReportKeeper{job: Job{Address: listener.Addr().String(), Secret: secret}, listener: listener,
		strangers: strangers{most: mostStrangers}, followers: map[*follower]bool{}, home: map[string]int{}, tellTime: tellTimeout}
	go k.strangers.accept(context.Background(), listener, func(conn net.Conn) { go k.serve(conn) })
	return k
}

// serve takes the reports of a rank, and answers its questions.
func (k *ReportKeeper) serve(conn net.Conn) {
	defer conn.Close() //nolint:errcheck // nothing is lost
	reason := k.welcome(conn)
	k.strangers.known(conn)
	if reason != "" {
		k.strangers.log(conn, reason, reason)
		return
	}
	f := &follower{conn: conn, out: json.NewEncoder(conn), told: map[uint64]func(){}}
	if !k.admit(f) {
		return
	}
	type place struct {
		group string
		rank  int
	}
	reported := map[place]bool{}
	defer func() {
		for at := range reported {
			k.Lost(at.group, at.rank)
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.followers, f)
		for _, heard := range f.told {
			heard() // there is nobody to hear it
		}
		f.told = nil
	}()
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, longestReport)
	aborting := make(chan struct{}, mostGroups)
	for lines.Scan() {
		var m reportMessage
		if json.Unmarshal(lines.Bytes(), &m) != nil {
			return
		}
		at := place{m.Group, m.Rank}
		switch {
		case m.Told > 0:
			k.mu.Lock()
			heard := f.told[m.Told]
			delete(f.told, m.Told)
			k.mu.Unlock()
			if heard != nil {
				heard()
			}
		case m.Ask > 0 && !m.Aborted:
			m.Last, _ = k.Last(context.Background(), m.Group)
			if f.send(&m) != nil {
				return
			}
		case m.Left:
			k.LocalReports.Leave(m.Group, m.Rank, m.Text)
			delete(reported, at)
		case m.Aborted: // which the others have to know in any case
			if len(reported) < mostGroups {
				reported[at] = true
			}
			aborting <- struct{}{}
			go func() { // other ranks confirm on their own connections, and this rank confirms the aborts of others
				k.tell(context.Background(), f, m)
				_ = f.send(&reportMessage{Ask: m.Ask})
				<-aborting
			}()
		case len(reported) == mostGroups && !reported[at]: // nobody will read it
		default:
			k.LocalReports.Report(m.Group, m.Rank, m.Text)
			reported[at] = true
		}
	}
}

// admit sends a rank what is known, and everything new from then on. It reports whether
// the keeper is open.
func (k *ReportKeeper) admit(f *follower) bool {
	f.mu.Lock() // nothing comes before
	defer f.mu.Unlock()
	var first []reportMessage
	k.mu.Lock()
	closed := k.followers == nil
	if !closed {
		k.followers[f] = true
	}
	for group, rank := range k.home {
		first = append(first, reportMessage{Group: group, Rank: rank, Home: true})
	}
	k.mu.Unlock()
	k.EachAborted(func(group string, rank int, text string, done uint64) {
		first = append(first, reportMessage{Group: group, Rank: rank, Text: text, Aborted: true, Done: done})
	})
	for _, m := range append(first, reportMessage{Known: true}) {
		if f.encode(&m) != nil {
			f.conn.Close() //nolint:errcheck // serve ends
		}
	}
	return !closed
}

// Report implements [Reports], for rank 0's own process.
func (k *ReportKeeper) Report(group string, rank int, text string) {
	k.LocalReports.Report(group, rank, text)
	k.mu.Lock()
	_, known := k.home[group]
	k.home[group] = rank
	k.mu.Unlock()
	if !known {
		k.announce(reportMessage{Group: group, Rank: rank, Home: true})
	}
}

// Leave implements [Reports], for rank 0's own process.
func (k *ReportKeeper) Leave(group string, rank int, text string) {
	k.LocalReports.Leave(group, rank, text)
	k.mu.Lock()
	delete(k.home, group)
	k.mu.Unlock()
	k.announce(reportMessage{Group: group, Rank: rank, Home: true, Left: true})
}

// announce sends something to all others.
func (k *ReportKeeper) announce(m reportMessage) {
	k.mu.Lock()
	all := slices.Collect(maps.Keys(k.followers))
	k.mu.Unlock()
	for _, f := range all {
		if f.send(&m) != nil {
			f.conn.Close() //nolint:errcheck // serve ends
		}
	}
}

// Abort implements [Reports]: it tells all other ranks.
func (k *ReportKeeper) Abort(ctx context.Context, group string, rank int, text string, done uint64) {
	k.tell(ctx, nil, reportMessage{Group: group, Rank: rank, Text: text, Aborted: true, Done: done})
}

// tell notes that a rank aborts, and tells all others but the one that reported it.
func (k *ReportKeeper) tell(ctx context.Context, from *follower, m reportMessage) {
	k.LocalReports.Abort(ctx, m.Group, m.Rank, m.Text, m.Done)
	var open sync.WaitGroup
	k.mu.Lock()
	ctx, cancel := context.WithTimeout(ctx, k.tellTime)
	defer cancel()
	k.tellings++
	m.Told, m.Ask = k.tellings, 0
	for f := range k.followers {
		if f == from {
			continue
		}
		open.Add(1)
		f.told[m.Told] = open.Done
		go func() {
			if f.send(&m) != nil {
				f.conn.Close() //nolint:errcheck // serve ends
			}
		}()
	}
	k.mu.Unlock()
	heard := make(chan struct{})
	go func() {
		open.Wait() // ends with the connections at the latest
		close(heard)
	}()
	select {
	case <-heard:
	case <-ctx.Done():
	}
}

// welcome returns why a visitor is refused, "" if it knows the secret.
func (k *ReportKeeper) welcome(conn net.Conn) (reason string) {
	t := &talk{conn: conn, key: k.job.key()}
	if conn.SetDeadline(time.Now().Add(patience)) != nil || t.greet() != nil {
		return reasonSilence
	}
	if _, reason := t.hear(); reason != "" {
		return reason
	}
	if t.give(nil) != nil {
		return reasonGone
	}
	if ok, _ := t.check("receipt"); !ok || conn.SetDeadline(time.Time{}) != nil {
		return reasonGone
	}
	return ""
}

// Close ends it. What was told before reaches the others.
func (k *ReportKeeper) Close() error {
	err := k.listener.Close()
	k.mu.Lock()
	defer k.mu.Unlock()
	for f := range k.followers {
		// They close the connection then. What lay here unread would have it reset.
		_ = f.conn.SetReadDeadline(time.Now().Add(glance))
		if c, ok := f.conn.(*net.TCPConn); !ok || c.CloseWrite() != nil {
			f.conn.Close() //nolint:errcheck // nothing is lost
		}
	}
	k.followers = nil
	return err
}

// RemoteReports are the reports of a job at its other ranks.
type RemoteReports struct {
	cancel context.CancelFunc
	known  LocalReports  // the ranks that aborted
	told   chan struct{} // closed when known has all that rank 0 knows, or never will

	mu      sync.Mutex
	groups  map[string]bool // in which this rank reports
	home    map[string]int  // in which rank 0's process is, and its rank there
	wake    chan struct{}
	pending []reportMessage // to be sent; of each rank of a group the last alone
	asked   uint64
	answers map[uint64]chan map[int]Report
	state   error // nil while connected, errNotConnected with a cause before, another error after
	closing bool
}

// FollowReports connects to the rank that keeps them, in the background, and tries again
// until it is closed. Reports are sent when the connection is there.
func FollowReports(in Invitation, rank, size int) *RemoteReports {
	ctx, cancel := context.WithCancel(context.Background())
	r := &RemoteReports{cancel: cancel, told: make(chan struct{}), groups: map[string]bool{}, home: map[string]int{}, wake: make(chan struct{}, 1), answers: map[uint64]chan map[int]Report{},
		state: errNotConnected}
	go r.run(ctx, in, newHello(rank, size))
	return r
}

var errNotConnected = errors.New("not connected to rank 0")

// Told is closed when this rank knows which ranks aborted before it was connected, or
// when it will not be connected any more.
func (r *RemoteReports) Told() <-chan struct{} { return r.told }

func (r *RemoteReports) run(ctx context.Context, in Invitation, self hello) {
	told := sync.OnceFunc(func() { close(r.told) })
	defer told()
	conn, err := r.connect(ctx, in, self)
	if err != nil {
		r.end(err)
		return
	}
	r.mu.Lock()
	r.state = nil
	r.mu.Unlock()
	ctx, lost := context.WithCancelCause(ctx)
	defer context.AfterFunc(ctx, func() { conn.Close() })() // ends what is read
	read := make(chan struct{})
	go func() {
		defer close(read)
		lost(r.read(conn, told))
	}()
	out := json.NewEncoder(conn)
	open := true
	for open && ctx.Err() == nil {
		r.mu.Lock()
		messages, closing := r.pending, r.closing
		r.pending = nil
		r.mu.Unlock()
		for i := range messages {
			open = open && out.Encode(&messages[i]) == nil
		}
		if closing {
			break
		}
		if !open { // what rank 0 told before may still be there
			_ = conn.SetReadDeadline(time.Now().Add(glance))
			<-read
			break
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
		}
	}
	lost(net.ErrClosed)
	conn.Close() //nolint:errcheck // nothing is lost
	<-read
	r.end(fmt.Errorf("rank 0 does not answer: %w", context.Cause(ctx)))
}

// end notes why there is no connection. Without one, ranks do not learn of aborts, so the
// communicators that rank 0's process takes part in have failed.
func (r *RemoteReports) end(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state, r.pending = why, nil
	for group, rank := range r.home {
		if r.groups[group] && !r.closing {
			r.known.Abort(context.Background(), group, rank, "its process has ended, or cannot be reached", 0)
		}
	}
	for _, answer := range r.answers {
		close(answer)
	}
	clear(r.answers)
}

// connect tries to reach rank 0 until it does or r is closed.
func (r *RemoteReports) connect(ctx context.Context, in Invitation, self hello) (net.Conn, error) {
	var failures tally
	for wait := retryFirst; ; wait = min(2*wait, patience) {
		conn, err := in.connect(ctx, self)
		r.mu.Lock()
		closing := r.closing
		if err != nil {
			r.state = fmt.Errorf("%w: %w", errNotConnected, err)
		}
		r.mu.Unlock()
		if err == nil || closing {
			return conn, err
		}
		if times, due := failures.count(""); due {
			slog.Warn("rendezvous: no connection to rank 0 for status reports; trying again", "rank", self.rank, "err", err, "times", times)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(wait):
		}
	}
}

// connect reaches rank 0 at one of its addresses.
func (in Invitation) connect(ctx context.Context, self hello) (net.Conn, error) {
	var errs []error
	for _, address := range in.Addresses {
		conn, err := (&net.Dialer{Timeout: glance}).DialContext(ctx, "tcp", address)
		if err == nil {
			t := &talk{conn: conn, key: Job{Address: address, Secret: in.Secret}.key()}
			if err = conn.SetDeadline(time.Now().Add(glance)); err == nil {
				_, err = t.receive(len(magic) + keyBytes)
			}
			if err == nil {
				_, err = t.introduce(self)
			}
			if err == nil {
				err = conn.SetDeadline(time.Time{})
			}
			if err == nil {
				return conn, nil
			}
			conn.Close() //nolint:errcheck // nothing is lost
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// read takes answers, and what rank 0 tells.
func (r *RemoteReports) read(conn net.Conn, told func()) error {
	in := json.NewDecoder(conn)
	for {
		var m reportMessage
		if err := in.Decode(&m); err != nil {
			return err
		}
		r.mu.Lock()
		if m.Aborted && r.groups[m.Group] {
			r.known.Abort(context.Background(), m.Group, m.Rank, m.Text, m.Done)
		}
		if m.Told > 0 {
			r.push(reportMessage{Told: m.Told})
		}
		switch {
		case m.Known:
			told()
		case m.Home && m.Left:
			delete(r.home, m.Group)
		case m.Home:
			r.home[m.Group] = m.Rank
		}
		if answer := r.answers[m.Ask]; answer != nil {
			answer <- m.Last
			delete(r.answers, m.Ask)
		}
		r.mu.Unlock()
	}
}

// push has a message sent, if there is a connection or will be one. The caller holds the
// lock.
func (r *RemoteReports) push(m reportMessage) {
	if r.state != nil && !errors.Is(r.state, errNotConnected) {
		return
	}
	for i := range r.pending {
		if p := &r.pending[i]; p.Ask == 0 && m.Ask == 0 && p.Told == 0 && m.Told == 0 && p.Group == m.Group && p.Rank == m.Rank {
			*p = m
			return
		}
	}
	if len(r.pending) == mostGroups && r.state != nil {
		return // there is no connection to send so much on
	}
	r.pending = append(r.pending, m)
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Report implements [Reports].
func (r *RemoteReports) Report(group string, rank int, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.groups[group] = true
	r.push(reportMessage{Group: group, Rank: rank, Text: text})
}

// Leave implements [Reports].
func (r *RemoteReports) Leave(group string, rank int, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.groups, group)
	r.known.Forget(group)
	if r.state != nil { // rank 0 knows nothing of the group
		r.pending = slices.DeleteFunc(r.pending, func(m reportMessage) bool { return m.Ask == 0 && m.Group == group && m.Rank == rank })
		return
	}
	r.push(reportMessage{Group: group, Rank: rank, Text: text, Left: true})
}

// Last implements [Reports]: it asks rank 0.
func (r *RemoteReports) Last(ctx context.Context, group string) (map[int]Report, error) {
	return r.ask(ctx, reportMessage{Group: group})
}

// Abort implements [Reports]: it has rank 0 tell the others.
func (r *RemoteReports) Abort(ctx context.Context, group string, rank int, text string, done uint64) {
	_, _ = r.ask(ctx, reportMessage{Group: group, Rank: rank, Text: text, Aborted: true, Done: done})
}

// Failed implements [Reports].
func (r *RemoteReports) Failed(group string, rank int, collectives uint64) error {
	return r.known.Failed(group, rank, collectives)
}

// ask sends a question and waits for rank 0's answer. A rank that aborts waits for the
// connection as well.
func (r *RemoteReports) ask(ctx context.Context, m reportMessage) (map[int]Report, error) {
	r.mu.Lock()
	if r.state != nil && !(m.Aborted && errors.Is(r.state, errNotConnected)) {
		defer r.mu.Unlock()
		return nil, r.state
	}
	r.asked++
	m.Ask = r.asked
	answer := make(chan map[int]Report, 1)
	r.answers[m.Ask] = answer
	r.push(m)
	r.mu.Unlock()
	select {
	case last, ok := <-answer:
		if !ok {
			return nil, errors.New("rank 0 does not answer")
		}
		return last, nil
	case <-ctx.Done():
		r.mu.Lock()
		delete(r.answers, m.Ask)
		r.mu.Unlock()
		return nil, fmt.Errorf("rank 0 does not answer: %w", context.Cause(ctx))
	}
}

// Close ends it, as soon as what was reported last is sent, or soon.
func (r *RemoteReports) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closing = true
	select {
	case r.wake <- struct{}{}:
	default:
	}
	time.AfterFunc(glance, r.cancel)
	return nil
}
