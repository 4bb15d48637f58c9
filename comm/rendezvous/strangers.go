package rendezvous

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"
)

// mostStrangers bounds how many connections whose other side has not said who it is
// may be open at rank 0, beyond one for each rank that is expected.
const mostStrangers = 256

// strangers are the connections to a listener whose other side has not said who it is,
// the oldest first. Beyond a bound, the oldest one gives way to the newest.
type strangers struct {
	most int

	mu      sync.Mutex
	open    []net.Conn
	refused tally
}

// accept passes the listener's connections to serve, which calls known or ended, until
// the listener is closed.
func (s *strangers) accept(ctx context.Context, listener net.Listener, serve func(conn net.Conn)) {
	for ctx.Err() == nil {
		conn, err := listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			// Out of descriptors, for instance: the oldest stranger frees one.
			s.giveWay(0)
			if times, due := s.count("accept"); due && ctx.Err() == nil {
				slog.Warn("rendezvous: cannot accept a connection now", "err", err, "times", times)
			}
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		s.mu.Lock()
		s.open = append(s.open, conn)
		s.mu.Unlock()
		s.giveWay(s.most)
		serve(conn)
	}
}

// giveWay closes the oldest connection if there are more than most.
func (s *strangers) giveWay(most int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.open) > most {
		s.open[0].Close() //nolint:errcheck // nothing is lost
		s.open = slices.Delete(s.open, 0, 1)
	}
}

// known notes that a connection's other side has said who it is, or that the
// connection has ended.
func (s *strangers) known(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.open, conn); i >= 0 {
		s.open = slices.Delete(s.open, i, i+1)
	}
}

func (s *strangers) count(what string) (times int, due bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused.count(what)
}

// log logs a refusal, ever more rarely those of one class.
func (s *strangers) log(conn net.Conn, class, reason string) {
	if times, due := s.count(class); due {
		slog.Warn("rendezvous: connection refused", "from", conn.RemoteAddr(), "reason", reason, "times", times)
	}
}
