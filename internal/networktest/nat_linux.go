package networktest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A Namespace is the name of a network namespace of ip netns.
type Namespace string

// NAT is a set of private networks with one host each, behind routers that translate addresses. Their hosts have the
// same address and cannot reach each other. All can reach one outside host, which cannot reach them.
type NAT struct {
	Outside Namespace
	Hosts   []Namespace
}

// Address is the outside address of a host.
func (n *NAT) Address(host int) string { return fmt.Sprintf("10.77.%d.1", host) }

// NewNAT makes such networks until the test ends. It skips the test if that is not possible.
func NewNAT(t testing.TB, hosts int) *NAT {
	t.Helper()
	namespace := func(role string, i int) Namespace {
		name := fmt.Sprintf("tutti-%d-%s%d", os.Getpid(), role, i)
		shell(t, true, "ip netns add "+name)
		t.Cleanup(func() {
			_ = exec.Command("ip", "netns", "del", name).Run()
		})
		shell(t, false, "ip -n "+name+" link set lo up")
		return Namespace(name)
	}
	n := &NAT{Outside: namespace("outside", 0)}
	for i := range hosts {
		host := namespace("host", i)
		router := namespace("router", i)
		n.Hosts = append(n.Hosts, host)
		shell(t, false, strings.NewReplacer(
			"OUTSIDE", string(n.Outside), "ROUTER", string(router), "HOST", string(host), "NUMBER", fmt.Sprint(i),
		).Replace(`
			ip -n OUTSIDE link add toNUMBER type veth peer name wan netns ROUTER
			ip -n OUTSIDE addr add 10.77.NUMBER.1/24 dev toNUMBER
			ip -n OUTSIDE link set toNUMBER up
			ip -n ROUTER addr add 10.77.NUMBER.2/24 dev wan
			ip -n ROUTER link set wan up
			ip -n ROUTER link add lan type veth peer name wan netns HOST
			ip -n ROUTER addr add 192.168.1.1/24 dev lan
			ip -n ROUTER link set lan up
			ip -n HOST addr add 192.168.1.2/24 dev wan
			ip -n HOST link set wan up
			ip -n HOST route add default via 192.168.1.1
			ip netns exec ROUTER sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
			ip netns exec ROUTER nft 'add table ip nat'
			ip netns exec ROUTER nft 'add chain ip nat out { type nat hook postrouting priority 100; }'
			ip netns exec ROUTER nft 'add rule ip nat out oifname "wan" masquerade'
		`))
	}
	return n
}

// shell runs commands, and fails or skips the test if one of them fails.
func shell(t testing.TB, skips bool, commands string) {
	t.Helper()
	out, err := exec.Command("sh", "-ec", commands).CombinedOutput()
	if err != nil && skips {
		t.Skipf("needs root and network namespaces: %v: %s", err, out)
	}
	if err != nil {
		t.Fatalf("%s: %v: %s", commands, err, out)
	}
}

// Do calls f in the namespace, in which its sockets are created. f must stay in its goroutine.
func (n Namespace) Do(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with the goroutine
		result <- func() error {
			file, err := os.Open(filepath.Join("/run/netns", string(n)))
			if err != nil {
				return err
			}
			defer file.Close() //nolint:errcheck // it was only read
			if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
				return err
			}
			return f()
		}()
	}()
	return <-result
}
