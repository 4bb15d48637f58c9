package store

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/inquiry"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/repeats"
	"github.com/tutti-go/tutti/internal/waiting"
)

// longestReason bounds the bytes of a refusal that are shown.
const longestReason = 1 << 10

// refusal is an answer of who is not the store, or of the store, or none on a connection.
type refusal struct {
	by, reason string   // the address that answered
	from       listener // what has answered; zero is another program
}

// listener is what an address leads to.
type listener int

const (
	stranger  listener = iota // another program, or a store that a crowd keeps busy
	jobsStore                 // the store of this job
	mutePeer                  // a process that says nothing
)

// muteReason is what it may mean that a process says nothing whose system has accepted a connection.
const muteReason = "is its process stopped, as Ctrl-Z does to a launcher? fg, bg or kill -CONT resumes it"

func (r *refusal) Error() string {
	switch r.from {
	case jobsStore:
		return fmt.Sprintf("%v by the job's store (%s): %s", ErrRefused, r.by, r.reason)
	case mutePeer:
		return fmt.Sprintf("what listens on %s says nothing: %s", r.by, r.reason)
	}
	return fmt.Sprintf("%v: what listens on %s is not the store of this job: %s", ErrRefused, r.by, r.reason)
}

func (r *refusal) Unwrap() error { return ErrRefused }

// Dialer reaches a store.
type Dialer struct {
	Addresses []string    // of the store, as host:port; a link-local one without a zone is tried on all interfaces
	TLS       *tls.Config // the job's certificates, of both sides; nil is no valid Dialer
	Name      string      // of this process; no other one has it
	Title     string      // by which others call this process; "" for Name
	Size      int         // of the job, 0 if it is not known
	Job       string      // the name of the job; "" is a job without a name
	Once      bool        // Dial makes one attempt at each address
	Network   Network     // over which the store is reached; nil is the system's TCP
}

// Dial connects to the store at the first of its addresses that serves it. Dial tries until ctx ends, because the
// store may start later, others may have some of its addresses, and a store crowded by strangers closes some
// connections. If the store refuses this process, or others answer at all addresses, Dial returns an error wrapping
// [ErrRefused] at once.
func (d Dialer) Dial(ctx context.Context) (*Client, error) {
	if len(d.Addresses) == 0 {
		return nil, fmt.Errorf("store: %w: no address", comm.ErrArgument)
	}
	hello := d.hello()
	// A store refuses it without a reason, as it may not print one.
	if err := hello.check(); err != nil {
		return nil, fmt.Errorf("store: %w: %w", comm.ErrArgument, err)
	}
	var log repeats.Log
	var last reasons  // of the last whole round
	var refused error // the last refusal with a reason; nil before
	var tried atomic.Pointer[error]
	defer inquiry.Begin(inquiry.Wait{Rank: -1, Text: func() string { return d.searching(tried.Load()) }})()
	reminder := waiting.Remind()
	defer reminder.Stop()
	first, spare := d.glances()
	for wait := retryFirst; ; wait = min(2*wait, retryLast) {
		var now reasons // of this round
		sure := true    // every address has refused this process
		for i, address := range d.candidates() {
			bound := spare
			if i == 0 {
				bound = first
			}
			c, err := d.connect(ctx, address, hello, bound)
			var r *refusal
			switch {
			case err == nil:
				return c, nil
			case !errors.As(err, &r):
				sure = false
			case r.from == jobsStore:
				return nil, err
			default:
				// The store hangs up as well, on some of a crowd.
				if r.from == mutePeer || r.reason == gate.Silence {
					sure = false
				} else {
					refused = err
				}
				if ctx.Err() == nil {
					r.warn(&log)
				}
			}
			now = append(now, err)
			d.remind(reminder, now)
		}
		first = min(2*first, glance)
		spare = min(2*spare, glance)
		if last == nil || !waiting.Over(ctx) {
			last = now
			err := error(last)
			tried.Store(&err)
		}
		if d.Once || sure && ctx.Err() == nil {
			return nil, last
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf(
				"%w; last attempts to reach the job's store: %w",
				comm.ContextError(ctx),
				last.after(refused),
			)
		case <-time.After(wait):
		}
	}
}

// glances returns the bounds of the first attempt at the first address, and at each of the others.
func (d Dialer) glances() (first, spare time.Duration) {
	switch {
	case d.Once:
		return glance, glance
	case d.severalHosts(): // a host that is lost answers nothing, and another one serves the store as well
		return firstGlance, firstGlance
	}
	return glance, spareGlance
}

// warn says that somebody else than the job's store was found, or nobody who speaks, ever more rarely.
func (r *refusal) warn(log *repeats.Log) {
	times, due := log.Count(r.reason)
	if !due {
		return
	}
	text := "store: looking for the job's store, found somebody else"
	if r.from == mutePeer {
		text = "store: the job's store does not answer"
	}
	slog.Warn(text, "at", r.by, "reason", r.reason, "times", times)
}

// reasons are the errors of attempts at several addresses, at least one.
type reasons []error

// Error implements error. It is one line, in which a reason stands once.
func (r reasons) Error() string {
	var texts []string
	for _, err := range r {
		text := err.Error()
		if !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns the errors.
func (r reasons) Unwrap() []error { return r }

// after adds a refusal of an earlier round to the errors of the last one, in which nobody may answer any more.
func (r reasons) after(refused error) reasons {
	var latest *refusal
	if refused == nil || errors.As(r, &latest) {
		return r
	}
	return append(r, fmt.Errorf("before: %w", refused))
}

// candidates are the addresses to try: those of a link on each interface of this host.
func (d Dialer) candidates() []string {
	if d.Network != nil {
		return d.Addresses
	}
	return gate.Zoned(d.Addresses)
}

// remind says ever less often that there is no connection yet, from the first attempt on that ends after 2 s: an
// attempt takes 3 s where a firewall drops packets.
func (d Dialer) remind(reminder *waiting.Reminder, tried reasons) {
	if d.Once {
		return // who calls it again and again says so
	}
	select {
	case <-reminder.C:
		slog.Warn(
			"store: no connection yet; trying again",
			"process", cmp.Or(d.Title, d.Name),
			"err", tried,
			"waited", reminder.Next(),
		)
	default:
	}
}

// searching says what Dial does, and what its last attempts have met, nil before the first ones.
func (d Dialer) searching(tried *error) string {
	text := "looking for the job's store at " + strings.Join(d.Addresses, ", ")
	if tried == nil {
		return text
	}
	return fmt.Sprintf("%s (%s)", text, printable.Text((*tried).Error()))
}

// severalHosts reports whether the addresses are those of more than one host.
func (d Dialer) severalHosts() bool {
	hosts := map[string]bool{}
	for _, address := range d.candidates() {
		host, _, _ := net.SplitHostPort(address)
		hosts[host] = true
	}
	return len(hosts) > 1
}

// hello is a greeting of this process.
func (d Dialer) hello() greeting {
	return greeting{Name: d.Name, Title: d.Title, Size: d.Size, Job: d.Job, Process: rand.Text(), Version: protocol}
}

// Occupied returns the reason if this job's own store answers at an address and refuses this process.
func (d Dialer) Occupied(ctx context.Context, address string) error {
	c, err := d.connect(ctx, address, d.hello(), glance)
	var r *refusal
	if errors.As(err, &r) && r.from == jobsStore {
		return err
	}
	if err == nil {
		return c.Close()
	}
	return nil
}

// connect makes one attempt at one address, of which each of two parts takes bound at most.
func (d Dialer) connect(ctx context.Context, address string, hello greeting, bound time.Duration) (*Client, error) {
	dialing, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	conn, err := gate.Dial(dialing, d.Network, address)
	if err != nil {
		return nil, err
	}
	gate.KeepAlive(conn)
	return d.introduce(ctx, conn, hello, bound)
}

// introduce says who this process is on a new connection.
func (d Dialer) introduce(
	ctx context.Context, conn net.Conn, hello greeting, bound time.Duration,
) (_ *Client, err error) {
	defer context.AfterFunc(ctx, func() { conn.Close() })() // ends what is read
	defer func() {
		if err != nil {
			conn.Close() //nolint:errcheck // nothing is lost
		}
	}()
	secure := tls.Client(conn, d.TLS)
	refused := func(err error) error {
		if errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil {
			return &refusal{conn.RemoteAddr().String(), muteReason, mutePeer}
		}
		return &refusal{conn.RemoteAddr().String(), gate.Reason(secure, err), stranger}
	}
	_ = conn.SetDeadline(time.Now().Add(bound)) // fails if the connection does, as what follows
	if err := secure.Handshake(); err != nil {
		return nil, refused(err)
	}
	var w welcome
	in := json.NewDecoder(secure)
	_ = conn.SetDeadline(time.Now().Add(gate.Patience))
	if err := sender[greeting](secure)([]greeting{hello}); err != nil {
		return nil, refused(err)
	}
	if err := in.Decode(&w); err != nil {
		return nil, refused(err)
	}
	if w.Failed != "" {
		return nil, fmt.Errorf(
			"the store's server at %v cannot serve this process now: %w",
			conn.RemoteAddr(),
			failure(w.Kind, w.Failed, nil),
		)
	}
	if w.Refused != "" {
		reason := printable.Text(w.Refused[:min(len(w.Refused), longestReason)])
		return nil, &refusal{conn.RemoteAddr().String(), reason, jobsStore}
	}
	if w.Version != protocol { // one that has not compared them itself
		return nil, &refusal{conn.RemoteAddr().String(), w.otherVersion(), jobsStore}
	}
	if w.Silence < 0 || w.Silence > 0 && w.Silence < shortestSilence {
		return nil, refused(fmt.Errorf("a silence of %v", w.Silence))
	}
	_ = conn.SetDeadline(time.Time{})
	return remote(secure, in, w.Silence), nil
}
