package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"
)

// serve is rank 0's side.
func (j Job) serve(ctx context.Context, payload []byte) error {
	listener, err := j.listen(ctx)
	if err != nil {
		return err
	}
	return newServer(j, payload).run(ctx, listener)
}

// listen listens on the first port that is free, of the [ports] that ranks try. The name by
// which other ranks know rank 0's host may be no address of that host (behind a network
// address translation), or another one here: Debian resolves the host's own name to
// 127.0.1.1. So rank 0 listens on all addresses, unless j.Address is a loopback address.
func (j Job) listen(ctx context.Context) (net.Listener, error) {
	host, _, err := net.SplitHostPort(j.Address)
	if err != nil {
		return nil, err
	}
	reach := "every user of this host"
	if !isLoopback(host) {
		host, reach = "", "the network"
	}
	if j.Guessable || len(j.Secret) == 0 {
		slog.Warn("rendezvous: "+reach+" can connect to rank 0, and the job has no secret but its name; set "+SecretVariable+
			" to something random, the same for all processes", "launcher", j.Launcher)
	}
	var inUse []error
	for i := range ports {
		address, err := j.portAddress(host, i)
		if err != nil {
			return nil, err
		}
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
		if err == nil {
			if i > 0 {
				slog.Warn("rendezvous: the port of rank 0 is in use by others; listening on another one", "at", address, "err", inUse[0])
			}
			return listener, nil
		}
		inUse = append(inUse, err)
		// If it is this job's, there are two processes of rank 0.
		var r *refusal
		if _, err := j.ask(ctx, address, newHello(0, j.WorldSize)); errors.As(err, &r) && r.proven {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w; %w", context.Cause(ctx), errors.Join(inUse...))
		}
	}
	return nil, errors.Join(inUse...)
}

// visitor is a connection to rank 0.
type visitor struct {
	conn  net.Conn
	who   hello // if known
	known bool  // it knows the secret
	has   bool  // it has the payload
}

// server is rank 0 while it answers the others.
type server struct {
	job       Job
	payload   []byte
	strangers strangers

	mu     sync.Mutex
	claims map[int]*visitor // by rank: connections that have the payload, or are about to get it
	lastly string           // the last refusal of a rank that knows the secret
}

func newServer(j Job, payload []byte) *server {
	return &server{job: j, payload: payload, strangers: strangers{most: j.WorldSize + mostStrangers}, claims: make(map[int]*visitor)}
}

// run answers until every rank has the payload or ctx ends. It closes the listener.
func (s *server) run(ctx context.Context, listener net.Listener) error {
	ctx, finish := context.WithCancel(ctx)
	defer finish()
	defer context.AfterFunc(ctx, func() { listener.Close() })()
	defer listener.Close() //nolint:errcheck // nothing is lost

	var wg sync.WaitGroup
	s.strangers.accept(ctx, listener, func(conn net.Conn) {
		wg.Go(func() {
			v := &visitor{conn: conn}
			defer s.dismiss(v)
			defer context.AfterFunc(ctx, func() { conn.Close() })()
			s.answer(v)
			if len(s.missing()) == 0 {
				finish()
			}
		})
	})
	wg.Wait()
	missing := s.missing()
	if len(missing) == 0 {
		return nil
	}
	err := fmt.Errorf("ranks %v did not come: %w", missing, context.Cause(ctx))
	if s.lastly != "" {
		err = fmt.Errorf("%w; refused: %s", err, s.lastly)
	}
	return err
}

// dismiss ends a connection. A rank that did not get the payload may connect again, also
// as another process.
func (s *server) dismiss(v *visitor) {
	v.conn.Close() //nolint:errcheck // nothing is lost
	s.strangers.known(v.conn)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.claims[v.who.rank] == v && !v.has {
		delete(s.claims, v.who.rank)
	}
}

// answer is rank 0's side of one connection. It logs and returns the reason of a refusal,
// "" if there is none.
func (s *server) answer(v *visitor) (reason string) {
	t := &talk{conn: v.conn, key: s.job.key()}
	refuse := func(reason string) string {
		s.note(v, reason)
		return reason
	}
	if v.conn.SetDeadline(time.Now().Add(patience)) != nil || t.greet() != nil {
		return refuse(reasonSilence)
	}
	who, reason := t.hear()
	if reason == "" {
		reason = s.claim(v, who)
	}
	switch reason {
	case "":
	case reasonSilence, reasonLanguage:
		return refuse(reason)
	default:
		refuse(reason) // before the reply has consequences
		_ = t.reply(replyRefusal, []byte(reason))
		return reason
	}
	if err := t.give(s.payload); err != nil {
		return refuse(fmt.Sprintf("rank %d went away: %v", who.rank, err))
	}
	if ok, err := t.check("receipt"); !ok {
		return refuse(fmt.Sprintf("rank %d did not say that it has the payload (%v)", who.rank, err))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v.has = true
	s.claims[who.rank] = v
	return ""
}

// claim notes the rank of a visitor, or returns why it cannot have that rank. A process
// that connects again may have lost its first connection.
func (s *server) claim(v *visitor, who hello) (reason string) {
	s.strangers.known(v.conn)
	s.mu.Lock()
	defer s.mu.Unlock()
	v.who, v.known = who, true
	first := s.claims[who.rank]
	switch {
	case who.size != s.job.WorldSize:
		return fmt.Sprintf("rank %d of %d in a job of %d", who.rank, who.size, s.job.WorldSize)
	case who.rank == 0:
		return "rank 0 is here already: two processes have the same rank"
	case who.rank >= who.size:
		return fmt.Sprintf("rank %d in a job of %d", who.rank, who.size)
	case first != nil && first.who.public != who.public:
		return fmt.Sprintf("rank %d is here already, from %v: two processes have the same rank", who.rank, first.conn.RemoteAddr())
	}
	s.claims[who.rank] = v
	return ""
}

// note logs a refusal.
func (s *server) note(v *visitor, reason string) {
	class := reason
	if v.known {
		class = reasonKnown
		s.mu.Lock()
		s.lastly = fmt.Sprintf("%v: %s", v.conn.RemoteAddr(), reason)
		s.mu.Unlock()
	}
	s.strangers.log(v.conn, class, reason)
}

// missing lists the ranks that have no payload yet.
func (s *server) missing() (ranks []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r := 1; r < s.job.WorldSize; r++ {
		if v := s.claims[r]; v == nil || !v.has {
			ranks = append(ranks, r)
		}
	}
	return ranks
}
