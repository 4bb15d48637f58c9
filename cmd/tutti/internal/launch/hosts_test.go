package launch

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Hosts are in mpirun's notation.
func TestParseSlots(t *testing.T) {
	for text, want := range map[string][]Slots{
		"a":                     {{"a", 1}},
		"a:4,b:2":               {{"a", 4}, {"b", 2}},
		"a, b ,a:2":             {{"a", 3}, {"b", 1}},
		"me@a.example:3":        {{"me@a.example", 3}},
		"10.0.0.1:2,[fe80::1]":  {{"10.0.0.1", 2}, {"fe80::1", 1}},
		"[fe80::1%eth0]:8":      {{"fe80::1%eth0", 8}},
		"localhost,127.0.0.1:4": {{"localhost", 1}, {"127.0.0.1", 4}},
	} {
		got, err := ParseSlots(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "a,,b", ":4", "a:", "a:0", "a:-1", "a:x", "a:4097", "-oProxyCommand=x", "a b", "a'b", "fe80::1", "fe80::1:x", "[::1",
		"a\nb", "a\x1b[31m", "a:3000,a:3000"} {
		_, err := ParseSlots(text)
		require.Error(t, err, text)
	}
}

// The job's variables go to other hosts. The secret and this machine's addresses do not.
func TestJobVariables(t *testing.T) {
	environment := []string{"PATH=/bin", "TUTTI_SECRET=x", "TUTTI_SECRET_FILE=y", "TUTTI_CHECK=1", "NCCL_DEBUG=INFO", "TUTTIX=1", "HOME=/",
		"TUTTI_TCP_LISTEN=10.0.0.5:29500", "TUTTI_TCP_ADVERTISE=192.0.2.1"}
	assert.Equal(t, []string{"TUTTI_CHECK=1", "NCCL_DEBUG=INFO", "TUTTI_TCP_LISTEN=:29500"}, jobVariables(environment))
}

// Launchers of one machine give their ranks different local ranks.
func TestLocalRanks(t *testing.T) {
	s := &spread{}
	s.hosts = []*remote{
		{Slots: Slots{"localhost", 2}, local: true},
		{Slots: Slots{"b", 4}},
		{Slots: Slots{"127.0.0.1", 3}, local: true},
		{Slots: Slots{"c", 5}},
	}
	var got [][2]int
	for _, h := range s.hosts {
		a := s.assignment(h)
		got = append(got, [2]int{a.LocalFirst, a.LocalSize})
	}
	assert.Equal(t, [][2]int{{0, 5}, {0, 4}, {2, 5}, {0, 5}}, got)
}

// The command that copies this program can be pasted.
func TestCopying(t *testing.T) {
	for host, want := range map[string]string{
		"a":          " (scp '/opt/my bin/tutti' 'a:/opt/my bin/tutti')",
		"fe80::1":    " (scp '/opt/my bin/tutti' '[fe80::1]:/opt/my bin/tutti')",
		"me@fe80::1": " (scp '/opt/my bin/tutti' 'me@[fe80::1]:/opt/my bin/tutti')",
	} {
		s := &spread{self: "/opt/my bin/tutti"}
		assert.Equal(t, want, s.copying(&remote{Slots: Slots{host, 1}}))
	}
}
