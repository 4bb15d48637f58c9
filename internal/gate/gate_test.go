package gate

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/interfaces"
)

// distant is an end of a connection whose other side is at an address.
type distant struct {
	net.Conn
	from net.Addr
}

func (d *distant) RemoteAddr() net.Addr { return d.from }

// Of several addresses the one with most handshakes gives way, and of these each one may.
func TestWhoGivesWay(t *testing.T) {
	g := &Gate{Places: 6}
	open := map[string][]*distant{}
	connect := func(address string) {
		here, _ := net.Pipe()
		c := &distant{here, net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), 1))}
		open[address] = append(open[address], c)
		g.begin(c)
		g.evict(g.Places)
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
		for range 2 * g.Places {
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

// An address in an unexpected form is no error: no address at all counts as one.
func TestSourceOfAConnection(t *testing.T) {
	for address, want := range map[string]string{
		"1.2.3.4:5": "1.2.3.4/32", "[::ffff:1.2.3.4]:5": "1.2.3.4/32", "[2001:db8:1:2:3:4:5:6]:7": "2001:db8:1:2::/64", "[fe80::1%eth0]:5": "fe80::/64",
	} {
		from := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address))
		assert.Equal(t, want, source(&distant{from: from}).String())
	}
	assert.Equal(t, netip.Prefix{}, source(&distant{from: &net.TCPAddr{}}))
	assert.Equal(t, netip.Prefix{}, source(&distant{from: &net.UnixAddr{}}))
}

// A listener on all interfaces has this host's addresses, and loopback ones only if there are no others.
func TestAddresses(t *testing.T) {
	l, err := net.Listen("tcp", ":0")
	require.NoError(t, err)
	defer l.Close() //nolint:errcheck // nothing is lost
	alone := !slices.ContainsFunc(interfaces.Up(), func(i interfaces.Interface) bool { return !i.Loopback && i.IPs != nil })
	list := Addresses(l)
	require.NotEmpty(t, list)
	for _, address := range list {
		a, err := netip.ParseAddrPort(address)
		require.NoError(t, err)
		assert.Equal(t, alone, a.Addr().IsLoopback(), list)
	}
}

// network returns an interface with these addresses.
func network(name string, isVirtual bool, addresses ...string) interfaces.Interface {
	i := interfaces.Interface{Name: name, Virtual: isVirtual}
	for _, address := range addresses {
		i.IPs = append(i.IPs, net.ParseIP(address))
	}
	return i
}

// Link-local addresses of real interfaces are offered after all others, because they may be the only common ones.
func TestAddressesOfInterfaces(t *testing.T) {
	lo := network("lo", false, "127.0.0.1", "::1")
	cable := network("eth0", false, "169.254.1.1", "fe80::1")
	lan := network("eth1", false, "10.0.0.1", "2001:db8::1", "fe80::2")
	bare := network("docker0", true, "fe80::d")
	docker := network("docker0", true, "172.17.0.1", "fe80::d")
	for _, test := range []struct {
		all  []interfaces.Interface
		want []string
	}{
		{[]interfaces.Interface{lo}, []string{"127.0.0.1:5", "[::1]:5"}},
		{[]interfaces.Interface{lo, cable}, []string{"169.254.1.1:5", "[fe80::1]:5"}},
		{[]interfaces.Interface{lo, cable, docker}, []string{"172.17.0.1:5", "169.254.1.1:5", "[fe80::1]:5"}},
		{
			[]interfaces.Interface{lo, cable, lan, docker},
			[]string{"10.0.0.1:5", "[2001:db8::1]:5", "172.17.0.1:5", "169.254.1.1:5", "[fe80::1]:5", "[fe80::2]:5"},
		},
		{[]interfaces.Interface{lo, docker}, []string{"172.17.0.1:5"}},
		{[]interfaces.Interface{lo, bare}, []string{"[fe80::d]:5"}},
	} {
		assert.Equal(t, test.want, addresses(test.all, 5), "%v", test.all)
	}
	assert.Equal(t, []string{"eth0", "eth1"}, realZones([]interfaces.Interface{lo, cable, lan, docker}))
	assert.Equal(t, []string{"docker0"}, realZones([]interfaces.Interface{lo, docker}))
	assert.Empty(t, realZones([]interfaces.Interface{lo}))
}

// Addresses of links are tried on the links of this host.
func TestZoned(t *testing.T) {
	same := []string{"10.0.0.1:1", "[fe80::1%eth9]:2", "[2001:db8::1]:3", "host:4"}
	assert.Equal(t, same, Zoned(same))
	var want []string
	for _, zone := range realZones(interfaces.Up()) {
		want = append(want, "[fe80::1%"+zone+"]:5")
	}
	assert.Equal(t, want, Zoned([]string{"[fe80::1]:5"}))
	assert.Equal(t, []string{"[fe80::1]:5"}, zoned([]string{"[fe80::1]:5"}, nil), "an attempt says what is missing")
}

// TestNoSuchLink: the error of a link-local address says which interfaces this host has.
func TestNoSuchLink(t *testing.T) {
	_, err := Dial(t.Context(), nil, "[fe80::1%nosuch]:5")
	assert.ErrorContains(t, err, `"nosuch" is no interface of this host with a link-local IPv6 address`)
	known := errors.New("connection refused")
	for _, address := range []string{"10.0.0.1:1", "[2001:db8::1]:3", "host:4", "[fe80::1%eth0]:2", "[fe80::1%2]:2"} {
		assert.Equal(t, known, linkError(address, []string{"eth0"}, known), address)
	}
	for _, address := range []string{"[fe80::1]:5", "[fe80::1%eth0]:5"} {
		err := linkError(address, nil, known)
		assert.ErrorIs(t, err, known)
		assert.ErrorContains(t, err, "no interface of this host has a link-local IPv6 address")
	}
}

// closer is a connection whose Close waits for a gate's lock, as a program's own network may for anything.
type closer struct {
	net.Conn
	gate *Gate
}

func (c *closer) Close() error {
	c.gate.mu.Lock()
	defer c.gate.mu.Unlock()
	return c.Conn.Close()
}

// Connections are closed without the gate's lock: a program's may take its time.
func TestEvictWithoutTheLock(t *testing.T) {
	g := &Gate{}
	here, there := net.Pipe()
	g.begin(&closer{here, g})
	ended := make(chan struct{})
	go func() {
		g.evict(0)
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		require.FailNow(t, "the lock is held")
	}
	_, err := there.Read(make([]byte, 1))
	require.Error(t, err)
}
