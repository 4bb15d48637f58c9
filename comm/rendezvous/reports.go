package rendezvous

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// Invitation tells the other ranks where rank 0 keeps their reports. It is theirs
// alone: it has the secret.
type Invitation struct {
	Addresses []string `json:"addresses"`
	Secret    []byte   `json:"secret"`
}

// reportMessage is a line of a connection between a rank and rank 0: a report, a
// question for those of a group, or the answer to one.
type reportMessage struct {
	Group string              `json:"group,omitempty"`
	Rank  int                 `json:"rank,omitempty"`
	Text  string              `json:"text,omitempty"`
	Left  bool                `json:"left,omitempty"`
	Ask   uint64              `json:"ask,omitempty"`
	Last  map[int]comm.Report `json:"last,omitempty"`
}

// longestReport bounds a line that a rank sends, mostGroups those in which one rank
// reports at a time.
const (
	longestReport = 4 << 10
	mostGroups    = 1 << 12
)

// ReportKeeper keeps the reports of all ranks, at rank 0.
type ReportKeeper struct {
	comm.LocalReports
	job      Job
	listener net.Listener
	visitors chan struct{} // has an element for each connection that has not said who it is

	mu    sync.Mutex
	conns map[net.Conn]bool
}

// KeepReports listens for the reports of the other ranks of a job, until it is closed:
// to this host alone, or to all that reach it. The connection begins as that of
// [Job.Broadcast] does, with a secret of its own.
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
	k := &ReportKeeper{job: Job{Address: listener.Addr().String(), Secret: invitation.Secret}, listener: listener,
		visitors: make(chan struct{}, mostStrangers), conns: map[net.Conn]bool{}}
	go k.run()
	return k, invitation, nil
}

func (k *ReportKeeper) run() {
	for {
		conn, err := k.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, for instance
			time.Sleep(retryLast)
			continue
		}
		select {
		case k.visitors <- struct{}{}:
			go k.serve(conn)
		default:
			conn.Close() //nolint:errcheck // nothing is lost
		}
	}
}

// serve takes the reports of a rank, and answers its questions.
func (k *ReportKeeper) serve(conn net.Conn) {
	defer conn.Close() //nolint:errcheck // nothing is lost
	known := k.welcome(conn)
	<-k.visitors
	k.mu.Lock()
	closed := k.conns == nil
	if known && !closed {
		k.conns[conn] = true
	}
	k.mu.Unlock()
	if !known || closed {
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
		delete(k.conns, conn)
	}()
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, longestReport)
	answers := json.NewEncoder(conn)
	for lines.Scan() {
		var m reportMessage
		if json.Unmarshal(lines.Bytes(), &m) != nil {
			return
		}
		at := place{m.Group, m.Rank}
		switch {
		case m.Ask > 0:
			m.Last, _ = k.Last(context.Background(), m.Group)
			if answers.Encode(m) != nil {
				return
			}
		case m.Left:
			k.Leave(m.Group, m.Rank, m.Text)
			delete(reported, at)
		case len(reported) == mostGroups && !reported[at]:
			return
		default:
			k.Report(m.Group, m.Rank, m.Text)
			reported[at] = true
		}
	}
}

// welcome reports whether a visitor knows the secret.
func (k *ReportKeeper) welcome(conn net.Conn) bool {
	t := &talk{conn: conn, key: k.job.key()}
	if conn.SetDeadline(time.Now().Add(patience)) != nil || t.greet() != nil {
		return false
	}
	if _, reason := t.hear(); reason != "" {
		return false
	}
	if t.give(nil) != nil {
		return false
	}
	ok, _ := t.check("receipt")
	return ok && conn.SetDeadline(time.Time{}) == nil
}

// Close ends it.
func (k *ReportKeeper) Close() error {
	err := k.listener.Close()
	k.mu.Lock()
	defer k.mu.Unlock()
	for conn := range k.conns {
		conn.Close() //nolint:errcheck // nothing is lost
	}
	k.conns = nil
	return err
}

// RemoteReports are the reports of a job at its other ranks.
type RemoteReports struct {
	cancel context.CancelFunc

	mu      sync.Mutex
	wake    chan struct{}
	pending []reportMessage // to be sent; of each rank of a group the last alone
	asked   uint64
	answers map[uint64]chan map[int]comm.Report
	state   error // why there is no connection
	closing bool
}

// FollowReports connects to the rank that keeps them, in the background: what is
// reported meanwhile is sent then. Close ends it.
func FollowReports(in Invitation, rank, size int) *RemoteReports {
	ctx, cancel := context.WithCancel(context.Background())
	r := &RemoteReports{cancel: cancel, wake: make(chan struct{}, 1), answers: map[uint64]chan map[int]comm.Report{},
		state: errors.New("not connected to rank 0 yet")}
	go r.run(ctx, in, newHello(rank, size))
	return r
}

func (r *RemoteReports) run(ctx context.Context, in Invitation, self hello) {
	conn, err := in.connect(ctx, self)
	r.mu.Lock()
	r.state = err
	r.mu.Unlock()
	if err != nil {
		if ctx.Err() == nil {
			slog.Debug("rendezvous: no connection for reports", "rank", self.rank, "err", err)
		}
		return
	}
	ctx, lost := context.WithCancelCause(ctx)
	defer context.AfterFunc(ctx, func() { conn.Close() })() // ends what is read
	go func() { lost(r.read(conn)) }()
	out := json.NewEncoder(conn)
	for ctx.Err() == nil {
		r.mu.Lock()
		messages, closing := r.pending, r.closing
		r.pending = nil
		r.mu.Unlock()
		for i := range messages {
			if err := out.Encode(&messages[i]); err != nil {
				lost(err)
			}
		}
		if closing {
			break
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
		}
	}
	lost(net.ErrClosed)
	conn.Close() //nolint:errcheck // nothing is lost
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = fmt.Errorf("rank 0 does not answer: %w", context.Cause(ctx))
	for _, answer := range r.answers {
		close(answer)
	}
	clear(r.answers)
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

// read takes answers.
func (r *RemoteReports) read(conn net.Conn) error {
	in := json.NewDecoder(conn)
	for {
		var m reportMessage
		if err := in.Decode(&m); err != nil {
			return err
		}
		r.mu.Lock()
		if answer := r.answers[m.Ask]; answer != nil {
			answer <- m.Last
			delete(r.answers, m.Ask)
		}
		r.mu.Unlock()
	}
}

// push has a message sent. The caller holds the lock.
func (r *RemoteReports) push(m reportMessage) {
	for i := range r.pending {
		if p := &r.pending[i]; p.Ask == 0 && m.Ask == 0 && p.Group == m.Group && p.Rank == m.Rank {
			*p = m
			return
		}
	}
	r.pending = append(r.pending, m)
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Report implements [comm.Reports].
func (r *RemoteReports) Report(group string, rank int, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.push(reportMessage{Group: group, Rank: rank, Text: text})
}

// Leave implements [comm.Reports].
func (r *RemoteReports) Leave(group string, rank int, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.push(reportMessage{Group: group, Rank: rank, Text: text, Left: true})
}

// Last implements [comm.Reports]: it asks rank 0.
func (r *RemoteReports) Last(ctx context.Context, group string) (map[int]comm.Report, error) {
	r.mu.Lock()
	if r.state != nil {
		defer r.mu.Unlock()
		return nil, r.state
	}
	r.asked++
	id, answer := r.asked, make(chan map[int]comm.Report, 1)
	r.answers[id] = answer
	r.push(reportMessage{Group: group, Ask: id})
	r.mu.Unlock()
	select {
	case last, ok := <-answer:
		if !ok {
			return nil, errors.New("rank 0 does not answer")
		}
		return last, nil
	case <-ctx.Done():
		r.mu.Lock()
		delete(r.answers, id)
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
