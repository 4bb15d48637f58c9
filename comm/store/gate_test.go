package store

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/logtest"
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
	here, there := pipe(8 << 10) // there are thousands, and they shake hands
	from := net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), 1))
	p.conns <- &distant{there, from, delay}
	return &distant{here, from, delay}
}

// A store keeps which hosts know another secret, some of many, beside the last refusal of who knows its own.
func TestForeigners(t *testing.T) {
	logtest.Capture(t)
	right, wrong := mustTLS(t, "right"), mustTLS(t, "wrong")
	synctest.Test(t, func(t *testing.T) {
		server, l := NewServer(Options{Job: "one"}), newPipes()
		server.Serve(l, right)
		knock := func(conf *tls.Config, address string) {
			hello := greeting{Name: "rank 1", Process: "p", Version: protocol}
			_, err := Dialer{TLS: conf}.introduce(t.Context(), l.connectFrom(address, 0), hello, glance)
			require.ErrorIs(t, err, ErrRefused)
		}
		knock(right, "10.0.1.1")
		for i := range mostForeigners + 2 {
			for range 2 {
				knock(wrong, fmt.Sprint("10.0.0.", 1+i))
			}
		}
		synctest.Wait()
		list, err := server.Local("observer").List(t.Context(), RefusedKey)
		require.NoError(t, err)
		require.Len(t, list, 1+mostForeigners)
		assert.Contains(t, string(list[0].Value), "looks for the job without a name")
		for _, e := range list[1:] {
			host := strings.TrimPrefix(e.Key, RefusedKey+"/")
			assert.Equal(t, host+":1: "+gate.Secret, string(e.Value))
		}
		require.NoError(t, server.Close())
	})
}

// A process of a version that has derived its certificate otherwise is told from one that knows another secret, by this
// side, whichever of the two calls.
func TestEarlierDerivation(t *testing.T) {
	said := logtest.Capture(t)
	conf, earlier := mustTLS(t, "right"), mustTLS(t, "right, as versions before have derived it")
	earlier.NextProtos = nil
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := NewServer(Options{})
	server.Serve(l, conf)
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	require.Error(t, tls.Client(conn, earlier).Handshake())
	var refused []Entry
	require.Eventually(t, func() bool {
		refused, err = server.Local("observer").List(t.Context(), RefusedKey)
		return err != nil || len(refused) > 0
	}, time.Minute, time.Millisecond)
	require.NoError(t, err)
	assert.Contains(t, string(refused[0].Value), gate.ErrVersion.Error())
	assert.Contains(t, said.String(), gate.ErrVersion.Error())
	require.NoError(t, server.Close())

	l, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close() //nolint:errcheck // nobody connects any more
	go func() {
		if conn, err := l.Accept(); err == nil {
			_ = tls.Server(conn, earlier).Handshake()
		}
	}()
	_, err = Dialer{Addresses: []string{l.Addr().String()}, TLS: conf, Name: "rank 1", Once: true}.Dial(t.Context())
	require.ErrorIs(t, err, ErrRefused)
	assert.ErrorContains(t, err, gate.ErrVersion.Error())
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
			logtest.Capture(t)
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
				time.Sleep(200 * time.Millisecond) // the gate is full
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
