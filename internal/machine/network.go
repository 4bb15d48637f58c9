package machine

import (
	"os"
	"strings"
)

// Network returns a name for this host and, on Linux, its network interfaces as this process sees them. Processes that
// share a loopback interface have the same name.
func Network() string {
	name, _ := os.Hostname()
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	network, _ := os.Readlink("/proc/self/ns/net")
	return name + " " + strings.TrimSpace(string(boot)) + " " + network
}
