package launch

import (
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
)

// The command for other machines can be pasted into a shell.
func TestInvitation(t *testing.T) {
	a := &agent{
		Config:  Config{Ranks: 3, Command: []string{"/home/u/bin/tutti", "train"}, Typed: []string{"train", "--name", "it's mine", ""}},
		known:   "the same TUTTI_SECRET",
		address: "[fe80::1%eth0]:29400",
	}
	assert.Equal(t, `with the same TUTTI_SECRET: run
  tutti launch --join '[fe80::1%eth0]:29400' -n 3 train --name 'it'\''s mine' ''
`, a.invitation())
	a.copyName = "my secret"
	a.Typed = nil
	assert.Contains(t, a.invitation(), "-n 3 --secret-file 'my secret' /home/u/bin/tutti train\n")
}

// Addresses of a link have their interface, and interfaces to containers come last.
func TestAddresses(t *testing.T) {
	assert.Equal(t, "fe80::1%eth0", zoned(net.ParseIP("fe80::1"), "eth0"))
	assert.Equal(t, "10.0.0.1", zoned(net.ParseIP("10.0.0.1"), "eth0"))
	assert.True(t, isLink(net.ParseIP("fe80::1")))
	assert.False(t, isLink(net.ParseIP("169.254.0.1")))
	for name, want := range map[string]int{"docker0": 1, "br-12ab": 1, "eth0": 0, "enp3s0": 0, "bridge0": 0, "wg0": 0} {
		assert.Equal(t, want, virtual(name), name)
	}
}
