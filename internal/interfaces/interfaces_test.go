package interfaces

import (
	"net"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A bridge is virtual by its name, unless one of its ports leads out of this host.
func TestVirtual(t *testing.T) {
	for _, test := range []struct {
		name  string
		ports []string
		want  bool
	}{
		{name: "docker0", want: true},
		{name: "docker0", ports: []string{"veth1a2b"}, want: true},
		{name: "virbr0", ports: []string{"vnet0", "virbr0-nic"}, want: true},
		{name: "br-12ab", ports: []string{"veth1", "veth2"}, want: true},
		{name: "br-lan", ports: []string{"veth1", "eth0"}},
		{name: "br-ex", ports: []string{"bond0"}},
		{name: "eth0"},
		{name: "enp3s0"},
		{name: "wg0"},
		{name: "bridge0", ports: []string{"veth1"}},
	} {
		assert.Equal(t, test.want, isVirtual(test.name, test.ports), "%v", test)
	}
}

// The list has the addresses of interfaces that are up, and no others.
func TestUp(t *testing.T) {
	var got []string
	for _, i := range Up() {
		known, err := net.InterfaceByName(i.Name)
		require.NoError(t, err)
		assert.NotZero(t, known.Flags&net.FlagUp, i.Name)
		for _, ip := range i.IPs {
			got = append(got, ip.String())
		}
	}
	all, err := net.Interfaces()
	require.NoError(t, err)
	var want []string
	for _, i := range all {
		addresses, err := i.Addrs()
		require.NoError(t, err)
		for _, address := range addresses {
			if i.Flags&net.FlagUp != 0 {
				want = append(want, address.(*net.IPNet).IP.String())
			}
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	assert.Equal(t, want, got)
}
