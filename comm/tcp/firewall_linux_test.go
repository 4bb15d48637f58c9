package tcp

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/logtest"
)

const (
	firewallVariable = "TUTTI_TEST_BEHIND_FIREWALL"
	droppedAddress   = "127.0.0.1:5555"
)

// TestFirewall runs ranks in a network namespace whose firewall drops what goes to rank 0.
func TestFirewall(t *testing.T) {
	if os.Getenv(firewallVariable) != "" {
		t.Skip("it is TestRanksBehindFirewall's process")
	}
	t.Parallel()
	inNamespace(t, `ip link set lo up && nft add table ip f && nft 'add chain ip f in { type filter hook input priority 0; }' &&
		nft add rule ip f in tcp dport 5555 drop`, "TestRanksBehindFirewall", firewallVariable)
}

// inNamespace runs a test, which a variable tells that it is to run, in a network namespace that commands set up.
func inNamespace(t *testing.T, commands, test, variable string) {
	self, err := os.Executable()
	require.NoError(t, err)
	network := commands + ` && exec "$0" -test.run='^` + test + `$' -test.v`
	cmd := exec.CommandContext(t.Context(), "unshare", "--net", "sh", "-c", network, self)
	cmd.Env = append(os.Environ(), variable+"=1")
	out, err := cmd.CombinedOutput()
	if !strings.Contains(string(out), test) {
		t.Skipf("no namespace with a firewall here: %v: %s", err, out)
	}
	require.NoError(t, err, "%s", out)
}

// TestRanksBehindFirewall has both sides of a connection say that it cannot be made, where it was tried, and why.
func TestRanksBehindFirewall(t *testing.T) {
	if os.Getenv(firewallVariable) == "" {
		t.Skip("TestFirewall runs it")
	}
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	log := logtest.Capture(t)
	server := store.NewServer(store.Options{})
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for rank := range 2 {
		all.Go(func() {
			kv := server.Local(string(rune('0' + rank)))
			_, err := New(ctx, kv, Config{Rank: rank, WorldSize: 2, TLS: conf, Listen: []string{droppedAddress, "localhost"}[rank]})
			assert.ErrorIs(t, err, comm.ErrCanceled)
			assert.ErrorContains(t, err, droppedAddress)
			assert.ErrorContains(t, err, "timeout (does a firewall let the machines reach each other?)")
		})
	}
	for rank, text := range []string{
		"it reports that this rank cannot be reached at [" + droppedAddress + "]",
		"cannot be reached at [" + droppedAddress + "]",
	} {
		require.Eventually(t, func() bool { return said(log, rank, text, "timeout") },
			time.Minute, 10*time.Millisecond, "rank %d", rank)
	}
	first := linesOf(log, 1)[0]
	assert.Contains(t, first, "no answer yet from ["+droppedAddress+"]", "it speaks before the first attempt has failed")
	cancel()
	all.Wait()
}
