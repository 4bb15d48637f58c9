package jobtest

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
)

// taken counts the ports that this process has assigned.
var taken atomic.Int64

// Address returns a loopback address for this test alone, at a port on which nobody listens: tests of other processes
// do not get it. The following ports, ports of them in all, also belong to the test.
func Address(t testing.TB, ports int) string {
	t.Helper()
	// A process has its own host if all of 127.0.0.0/8 exists. The ports are below the system's ephemeral ports, and
	// differ from those of most other processes, for listeners on all hosts.
	const first, span, block = 10_000, 20_000, 256
	pid := os.Getpid()
	host := fmt.Sprintf("127.%d.%d.%d", 1+pid>>16&0x7f, pid>>8&0xff, pid&0xff)
	if runtime.GOOS == "darwin" {
		host = "127.0.0.1"
	}
	for range span {
		port := first + (pid*block+int(taken.Add(int64(ports)))-ports)%span
		if free(host, port, ports) {
			return net.JoinHostPort(host, strconv.Itoa(port))
		}
	}
	t.Fatalf("no %d free ports at %s", ports, host)
	return ""
}

// free reports whether nobody listens on some ports.
func free(host string, port, ports int) bool {
	for i := range ports {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port+i)))
		if err != nil || l.Close() != nil {
			return false
		}
	}
	return true
}
