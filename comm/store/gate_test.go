package store

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/gate"
)

// distant is an end of a connection whose other side is at an address, and hears what is written after a while.
type distant struct {
	net.Conn
	from  net.Addr
	delay time.Duration
}

func (d *distant) RemoteAddr() net.Addr { return d.from }

func (d *distant) Write(b []byte) (int, error) {
	time.Sleep(d.delay)
	return d.Conn.Write(b)
}

// connectFrom is connect of somebody at an address, with a delay each way.
func (p *pipes) connectFrom(address string, delay time.Duration) net.Conn {
	here, there := net.Pipe()
	from := net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), 1))
	p.conns <- &distant{there, from, delay}
	return &distant{here, from, delay}
}

// A process that is far away gets in while strangers connect faster than its handshake goes, at once unless they have its
// address.
func TestStrangersDoNotCrowdOut(t *testing.T) {
	const delay = 50 * time.Millisecond
	conf := mustTLS(t, "s")
	numbered := func(format string, count int) (list []string) {
		for i := range count {
			list = append(list, fmt.Sprintf(format, i))
		}
		return list
	}
	for name, c := range map[string]struct {
		strangers []string
		rate      time.Duration // a connection each
		attempts  int
	}{
		"one address":           {[]string{"10.0.0.9"}, 100 * time.Microsecond, 1},
		"eight addresses":       {numbered("10.0.1.%d", 8), 100 * time.Microsecond, 1},
		"many of a host's IPv6": {numbered("fd00::1:%x", 1000), 100 * time.Microsecond, 1},
		"IPv4 written as IPv6":  {[]string{"::ffff:10.0.0.9"}, 100 * time.Microsecond, 1},
		"the process's address": {[]string{"10.0.0.1"}, 500 * time.Microsecond, 60}, // each gets in with a chance of some 40 %
	} {
		t.Run(name, func(t *testing.T) {
			logged(t)
			synctest.Test(t, func(t *testing.T) {
				server, l := NewServer(Options{}), newPipes()
				server.Serve(l, conf)
				enough := make(chan struct{})
				gone := make(chan struct{})
				go func() {
					defer close(gone)
					for i := 0; ; i++ {
						l.connectFrom(c.strangers[i%len(c.strangers)], 0)
						select {
						case <-enough:
							return
						case <-time.After(c.rate):
						}
					}
				}()
				time.Sleep(time.Second) // the gate is full
				attempts := 1
				for ; ; attempts++ {
					kv, err := Dialer{TLS: conf}.introduce(t.Context(), l.connectFrom("10.0.0.1", delay), greeting{Name: "1", Version: protocol}, glance)
					if err == nil {
						require.NoError(t, kv.Set(t.Context(), "k", nil))
						require.NoError(t, kv.Close())
						break
					}
					require.Less(t, attempts, c.attempts)
				}
				close(enough)
				<-gone
				require.NoError(t, server.Close())
				time.Sleep(2 * gate.Patience)
			})
		})
	}
}
