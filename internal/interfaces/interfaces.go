// Package interfaces lists the network interfaces of this host.
package interfaces

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// An Interface is a network interface that is up.
type Interface struct {
	Name     string   // a zone of its link-local IPv6 addresses; never ""
	IPs      []net.IP // those of IPv4 first; nil if it has none
	Loopback bool     // its addresses are this host alone
	Virtual  bool     // it leads to this host's containers and virtual machines only
}

// Up returns the interfaces that are up, virtual ones last.
func Up() (list []Interface) {
	all, _ := net.Interfaces()
	for _, i := range all {
		if i.Flags&net.FlagUp == 0 {
			continue
		}
		list = append(list, Interface{
			Name:     i.Name,
			IPs:      ips(i),
			Loopback: i.Flags&net.FlagLoopback != 0,
			Virtual:  isVirtual(i.Name, portsOf(i.Name)),
		})
	}
	slices.SortStableFunc(list, func(a, b Interface) int { return rank(a) - rank(b) })
	return list
}

// rank is the place of an interface's kind in the order of Up.
func rank(i Interface) int {
	if i.Virtual {
		return 1
	}
	return 0
}

// ips returns the addresses of an interface.
func ips(i net.Interface) (list []net.IP) {
	addresses, _ := i.Addrs()
	for _, address := range addresses {
		if n, ok := address.(*net.IPNet); ok {
			list = append(list, n.IP)
		}
	}
	return list
}

// isVirtual reports whether an interface with this name, a bridge if it has ports, leads to this host's containers and
// virtual machines only. Such interfaces often have the same addresses on every host.
func isVirtual(name string, ports []string) bool {
	isPrefix := func(prefix string) bool { return strings.HasPrefix(name, prefix) }
	prefixes := []string{"docker", "br-", "veth", "virbr", "vnet", "cni", "flannel", "podman", "lxc"}
	if !slices.ContainsFunc(prefixes, isPrefix) {
		return false
	}
	// A bridge with a real port has this host's own address on the network behind that port.
	return !slices.ContainsFunc(ports, func(port string) bool { return !isVirtual(port, nil) })
}

// portsOf returns the names of a bridge's ports, nil for other interfaces and outside Linux.
func portsOf(name string) (names []string) {
	ports, _ := os.ReadDir(filepath.Join("/sys/class/net", name, "brif"))
	for _, port := range ports {
		names = append(names, port.Name())
	}
	return names
}
