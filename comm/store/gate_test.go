package store

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
				time.Sleep(2 * patience)
			})
		})
	}
}

// Of several addresses that of most handshakes gives way, and of these each one may.
func TestWhoGivesWay(t *testing.T) {
	g := &Gate{Most: 6}
	open := map[string][]*distant{}
	connect := func(address string) {
		here, _ := net.Pipe()
		c := &distant{here, net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), 1)), 0}
		open[address] = append(open[address], c)
		g.begin(c)
		g.evict(g.Most)
	}
	left := func(address string) (n int) {
		for _, c := range open[address] {
			if c.SetDeadline(time.Time{}) == nil {
				n++
			}
		}
		return n
	}
	for range 3 {
		connect("10.0.0.1")
	}
	for range 100 {
		connect("10.0.0.2")
	}
	assert.Equal(t, []int{3, 3}, []int{left("10.0.0.1"), left("10.0.0.2")})
	for range 100 {
		connect("10.0.0.3")
	}
	assert.Equal(t, []int{2, 2, 2}, []int{left("10.0.0.1"), left("10.0.0.2"), left("10.0.0.3")})
	for _, list := range open {
		for _, c := range list {
			g.end(c)
		}
	}
	assert.Zero(t, g.count)
	assert.Empty(t, g.handshakes)

	oldest := 0
	for range 200 {
		open = map[string][]*distant{}
		for range 2 * g.Most {
			connect("10.0.0.1")
		}
		if open["10.0.0.1"][0].SetDeadline(time.Time{}) == nil {
			oldest++
		}
		g.evict(0)
	}
	assert.Positive(t, oldest, "always the oldest")
	assert.Less(t, oldest, 200, "never the oldest")
}

// What is in the way of an address is no error: no address at all counts as one.
func TestSourceOfAConnection(t *testing.T) {
	for address, want := range map[string]string{
		"1.2.3.4:5": "1.2.3.4/32", "[::ffff:1.2.3.4]:5": "1.2.3.4/32", "[2001:db8:1:2:3:4:5:6]:7": "2001:db8:1:2::/64", "[fe80::1%eth0]:5": "fe80::/64",
	} {
		at := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address))
		assert.Equal(t, want, source(&distant{from: at}).String())
	}
	assert.Equal(t, netip.Prefix{}, source(&distant{from: &net.TCPAddr{}}))
	assert.Equal(t, netip.Prefix{}, source(&distant{from: &net.UnixAddr{}}))
}
