package tcp_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestStuckConnection: of several connections of a pair the second one carries nothing any more, while signs of life come over the first. The
// ranks take each other for lost. The test has its own network.
func TestStuckConnection(t *testing.T) {
	const variable = "TUTTI_TEST_NETWORK"
	if os.Getenv(variable) == "" {
		t.Parallel()
		unshare := []string{"--net"}
		if os.Geteuid() != 0 {
			unshare = append(unshare, "--user", "--map-root-user")
		}
		setup := "ip link set lo up && ip rule add pref 100 lookup local && ip rule del pref 0"
		if out, err := exec.Command("unshare", append(unshare, "sh", "-c", setup)...).CombinedOutput(); err != nil {
			t.Skipf("needs namespaces and iproute2: %v: %s", err, out)
		}
		inside := exec.CommandContext(t.Context(), "unshare", append(unshare, "sh", "-c", setup+` && exec "$0" "$@"`, os.Args[0], "-test.run", "^"+t.Name()+"$")...)
		inside.Env = append(os.Environ(), variable+"=1")
		out, err := inside.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return
	}
	tcp.Stuck(t, 0)
	rt := cpu.New()
	const elements = 4 << 20
	comms := open(t, 2, func(c *tcp.Config) { c.Connections, c.Silence = 3, time.Second })
	own, other := tcp.Ports(comms[0], 1, 1)
	for _, ports := range [][2]int{{own, other}, {other, own}} {
		rule := fmt.Sprintf("rule add pref 10 ipproto tcp sport %d dport %d blackhole", ports[0], ports[1])
		out, err := exec.Command("ip", strings.Fields(rule)...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_ = comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) error {
		x, err := rt.Allocate(4 * elements)
		require.NoError(t, err)
		for err == nil {
			if err = c.AllReduce(x, x, elements, dtype.F32, comm.Sum); err == nil {
				err = c.Sync(ctx)
			}
		}
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.ErrorContains(t, err, "connection lost")
		return err
	})
}
