package tcp

import (
	"context"
	"os"
	"os/exec"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
)

// Addresses of networks that this host is in come first, and link-local ones last, although every host is in theirs.
func TestNearFirst(t *testing.T) {
	addresses := []string{"[fe80::1]:1", "169.254.1.1:1", "198.51.100.1:1", "[2001:db8::1]:1", "127.0.0.1:1"}
	nearFirst(addresses)
	want := []string{"127.0.0.1:1", "198.51.100.1:1", "[2001:db8::1]:1", "[fe80::1]:1", "169.254.1.1:1"}
	assert.Equal(t, want, addresses)
}

// cableVariable has TestRanksBesideLinks run.
const cableVariable = "TUTTI_TEST_BESIDE_LINKS"

// TestLinksLast runs ranks on a host with a routed and a link-local address, whose firewall counts connections to each.
func TestLinksLast(t *testing.T) {
	if os.Getenv(cableVariable) != "" {
		t.Skip("it is TestRanksBesideLinks' process")
	}
	t.Parallel()
	inNamespace(t, `ip link set lo up && ip link add eth0 type veth peer name eth1 &&
		ip link set eth0 addrgenmode none && ip link set eth1 addrgenmode none &&
		ip link set eth1 up && ip link set eth0 up && ip address add 10.0.0.1/8 dev eth0 &&
		ip address add fe80::1/64 dev eth0 nodad && nft add table inet f &&
		nft 'add chain inet f out { type filter hook output priority 0; }' &&
		nft add rule inet f out ip daddr 10.0.0.1 tcp flags '&' '(syn|ack)' == syn counter &&
		nft add rule inet f out ip6 daddr fe80::/10 tcp flags '&' '(syn|ack)' == syn counter`,
		"TestRanksBesideLinks", cableVariable)
}

// TestRanksBesideLinks has ranks publish both addresses, and connect by the routed one without a try at the other.
func TestRanksBesideLinks(t *testing.T) {
	if os.Getenv(cableVariable) == "" {
		t.Skip("TestLinksLast runs it")
	}
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	published := make(chan string, 100)
	stop, err := server.Local("observer").Watch(ctx, "tcp/", func(e store.Event) {
		if !e.Deleted {
			published <- string(e.Value)
		}
	})
	require.NoError(t, err)
	defer stop()
	var all sync.WaitGroup
	for rank := range 2 {
		all.Go(func() {
			kv := server.Local(string(rune('0' + rank)))
			c, err := New(ctx, kv, Config{Rank: rank, WorldSize: 2, TLS: conf, Connections: 1})
			if assert.NoError(t, err) {
				assert.NoError(t, c.Close())
			}
		})
	}
	all.Wait()
	for range 2 {
		assert.Regexp(t, `"10\.0\.0\.1:.*fe80::1`, <-published)
	}
	rules, err := exec.Command("nft", "list", "chain", "inet", "f", "out").CombinedOutput()
	require.NoError(t, err, "%s", rules)
	counts := regexp.MustCompile(`counter packets (\d+)`).FindAllStringSubmatch(string(rules), -1)
	require.Len(t, counts, 2, "%s", rules)
	assert.Equal(t, "1", counts[0][1], "%s", rules)
	assert.Equal(t, "0", counts[1][1], "%s", rules)
}
