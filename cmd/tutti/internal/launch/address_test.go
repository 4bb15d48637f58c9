package launch

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/internal/interfaces"
)

// The command for other machines can be pasted into a shell.
func TestInvitation(t *testing.T) {
	a := &agent{
		Config:  Config{Ranks: 3, Command: []string{"/home/u/bin/tutti", "train"}, Typed: []string{"train", "--name", "it's mine", ""}},
		known:   "the same TUTTI_SECRET",
		address: "[fe80::1%eth0]:29400",
	}
	assert.Equal(t, `with the same TUTTI_SECRET: run
  tutti launch --join '[fe80::1]:29400' -n 3 train --name 'it'\''s mine' ''
`, a.invitation())
	a.copyName = "my secret"
	a.Typed = nil
	assert.Contains(t, a.invitation(), "-n 3 --secret-file 'my secret' /home/u/bin/tutti train\n")
	a.Grace = time.Minute
	a.Bind = true
	a.NoPrefix = true
	assert.Contains(t, a.invitation(), "-n 3 --grace 1m0s --bind --no-prefix --secret-file")
}

// The command holds the settings that ranks of all machines need alike. Of the ranks' listening address, it holds the
// port.
func TestInvitationSettings(t *testing.T) {
	for variable, want := range map[string]string{
		"TUTTI_CHECK=10s":                   "run\n  TUTTI_CHECK=10s tutti launch --join a:1 -n 1 ./p",
		"TUTTI_RECORD=100":                  "run\n  TUTTI_RECORD=100 tutti launch --join a:1 -n 1 ./p",
		"TUTTI_RECORD=1 0":                  "run\n  TUTTI_RECORD='1 0' tutti launch --join a:1 -n 1 ./p",
		"TUTTI_TCP_LISTEN=:29500":           "tutti launch --join a:1 -n 1 --tcp-listen :29500 ./p",
		"TUTTI_TCP_LISTEN=10.0.0.1:29500":   "tutti launch --join a:1 -n 1 --tcp-listen :29500 ./p",
		"TUTTI_TCP_LISTEN=10.0.0.1":         "tutti launch --join a:1 -n 1 ./p",
		"TUTTI_TCP_LISTEN=10.0.0.1:0":       "tutti launch --join a:1 -n 1 ./p",
		"TUTTI_TCP_SILENCE=20s":             "tutti launch --join a:1 -n 1 --tcp-silence 20s ./p",
		"TUTTI_TCP_CONNECTIONS=4":           "tutti launch --join a:1 -n 1 --tcp-connections 4 ./p",
		"TUTTI_TCP_ADVERTISE=203.0.113.1:1": "tutti launch --join a:1 -n 1 ./p",
	} {
		t.Run(variable, func(t *testing.T) {
			name, value, _ := strings.Cut(variable, "=")
			t.Setenv(name, value)
			a := &agent{Config: Config{Ranks: 1, Command: []string{"./p"}}, address: "a:1"}
			assert.Contains(t, a.invitation(), want)
		})
	}
}

// Link-local addresses name their interface.
func TestAddresses(t *testing.T) {
	assert.Equal(t, "fe80::1%eth0", zoned(net.ParseIP("fe80::1"), "eth0"))
	assert.Equal(t, "10.0.0.1", zoned(net.ParseIP("10.0.0.1"), "eth0"))
	for address, want := range map[string]string{
		"[fe80::1%eth0]:1": "[fe80::1]:1", "[fe80::1]:1": "[fe80::1]:1", "[2001:db8::1]:1": "[2001:db8::1]:1",
		"10.0.0.1:1": "10.0.0.1:1", "host:1": "host:1",
	} {
		assert.Equal(t, want, withoutZone(address), address)
	}
	assert.True(t, isLink(net.ParseIP("fe80::1")))
	assert.False(t, isLink(net.ParseIP("169.254.0.1")))
	assert.Equal(t, "169.254.0.1", zoned(net.ParseIP("169.254.0.1"), "eth0"))
	for address, want := range map[string]bool{"169.254.0.1": true, "10.0.0.1": false, "fe80::1": false} {
		assert.Equal(t, want, isOfCable(net.ParseIP(address)), address)
	}
}

// Without a default route, any address of an interface to other machines comes before those of interfaces to this
// machine's containers.
func TestUnroutedAddress(t *testing.T) {
	lo := network("lo", "127.0.0.1", "::1")
	lo.Loopback = true
	docker := network("docker0", "172.17.0.1", "fe80::d")
	docker.Virtual = true
	bare := network("br-12ab", "fe80::b")
	bare.Virtual = true
	for _, test := range []struct {
		want string
		all  []interfaces.Interface
	}{
		{"", []interfaces.Interface{lo}},
		{"fe80::1%eth0", []interfaces.Interface{lo, docker, network("eth0", "fe80::1")}},
		{"169.254.1.1", []interfaces.Interface{docker, network("eth0", "fe80::1"), network("eth1", "169.254.1.1")}},
		{"10.0.0.1", []interfaces.Interface{docker, network("eth0", "fe80::1"), network("eth1", "10.0.0.1", "fe80::2")}},
		{"2001:db8::1", []interfaces.Interface{network("eth0", "169.254.1.1"), network("eth1", "2001:db8::1")}},
		{"172.17.0.1", []interfaces.Interface{lo, bare, docker, network("eth0")}},
		{"fe80::b%br-12ab", []interfaces.Interface{lo, bare, network("eth0")}},
	} {
		assert.Equal(t, test.want, unroutedAddress(test.all), "%v", test.all)
	}
}

// network returns an interface with these addresses.
func network(name string, addresses ...string) interfaces.Interface {
	i := interfaces.Interface{Name: name}
	for _, address := range addresses {
		i.IPs = append(i.IPs, net.ParseIP(address))
	}
	return i
}
