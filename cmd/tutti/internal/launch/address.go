package launch

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/tutti-go/tutti/internal/env"
	hardware "github.com/tutti-go/tutti/internal/machine"
)

// loopback is the address of a job that is on one machine.
const loopback = "127.0.0.1"

// reachableAddress is the address by which other machines reach this one, as far as that can be told: the one of its
// way to the world, or one of an interface to a network, or one of a link alone, of IPv6 with its zone. It is "" if
// there is none.
func reachableAddress() string {
	// Nothing is sent: the system chooses the source for addresses that documents use.
	for _, to := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} {
		conn, err := net.Dial("udp", to)
		if err != nil {
			continue
		}
		ip := conn.LocalAddr().(*net.UDPAddr).IP
		_ = conn.Close()
		if ip.IsGlobalUnicast() {
			return ip.String()
		}
	}
	interfaces, _ := net.Interfaces()
	slices.SortStableFunc(interfaces, func(a, b net.Interface) int {
		return virtual(a.Name) - virtual(b.Name)
	})
	for _, suits := range []func(net.IP) bool{net.IP.IsGlobalUnicast, isOfCable, isLink} {
		for _, i := range interfaces {
			if ip := firstAddress(i, suits); ip != nil {
				return zoned(ip, i.Name)
			}
		}
	}
	return ""
}

// isLink reports whether an address is one of IPv6 that holds on a link alone.
func isLink(ip net.IP) bool { return ip.To4() == nil && ip.IsLinkLocalUnicast() }

// isOfCable reports whether an address is one of IPv4 that a host takes where nobody gives it one, as on a cable
// between two machines.
func isOfCable(ip net.IP) bool { return ip.To4() != nil && ip.IsLinkLocalUnicast() }

// zoned is the text of an address of an interface.
func zoned(ip net.IP, name string) string {
	if isLink(ip) {
		return ip.String() + "%" + name
	}
	return ip.String()
}

// withoutZone is an address, as host:port, as other machines know it: a zone is an interface of this one. They try all
// of theirs.
func withoutZone(address string) string {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return address
	}
	return netip.AddrPortFrom(a.Addr().WithZone(""), a.Port()).String()
}

// firstAddress is the first address of an interface that suits, nil if none does.
func firstAddress(i net.Interface, suits func(net.IP) bool) net.IP {
	if i.Flags&net.FlagUp == 0 || i.Flags&net.FlagLoopback != 0 {
		return nil
	}
	addresses, _ := i.Addrs()
	for _, address := range addresses {
		if n, ok := address.(*net.IPNet); ok && suits(n.IP) {
			return n.IP
		}
	}
	return nil
}

// virtual is 1 for the names of interfaces to containers and virtual machines of this host, which have the same
// addresses on every host.
func virtual(name string) int {
	for _, prefix := range []string{"docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc"} {
		if strings.HasPrefix(name, prefix) {
			return 1
		}
	}
	return 0
}

// leaveLoopback has ranks listen to the network where the store is at a loopback address though the job has other
// machines: they reach it through a tunnel, which is none for the ranks.
func (a *agent) leaveLoopback(all []machine) {
	id := hardware.Network()
	alone := !slices.ContainsFunc(all, func(m machine) bool { return m.ID != id })
	host, _, _ := net.SplitHostPort(a.address)
	if ip := net.ParseIP(host); alone || host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return
	}
	a.env = append(a.env, "MASTER_ADDR="+cmp.Or(reachableAddress(), loopback))
}

// listMachines are those that are present.
func (a *agent) listMachines(ctx context.Context) (all []machine) {
	listed, _ := a.kv.List(ctx, machines) // without the store, the job ends soon
	for _, entry := range listed {
		var m machine
		if m.read(entry.Value) == nil {
			all = append(all, m)
		}
	}
	return all
}

// commonSettings are variables that must be equal on all ranks of a job, with the flags of launchers that set them, ""
// for none.
var commonSettings = []struct{ variable, flag string }{
	{env.Backend, ""},
	{env.Check, ""},
	{env.Record, ""},
	{env.TCPConnections, "--tcp-connections"},
	{env.TCPListen, "--tcp-listen"},
	{env.TCPSilence, "--tcp-silence"},
}

// settings are those of this machine's environment that other machines need: words before a command, and its flags.
func settings(getenv func(string) string) (before, flags []string) {
	for _, s := range commonSettings {
		value := getenv(s.variable)
		if s.variable == env.TCPListen {
			value = listenPort(value)
		}
		switch {
		case value == "":
		case s.flag == "":
			before = append(before, s.variable+"="+value)
		default:
			flags = append(flags, s.flag, value)
		}
	}
	return before, flags
}

// listenPort is the port of an address on which ranks of this machine listen, as others take it, "" if there is none.
// The host is ignored: it means this machine.
func listenPort(address string) string {
	_, port, err := net.SplitHostPort(address)
	if err != nil || port == "0" {
		return ""
	}
	return ":" + port
}

// invitation is what to do on other machines: a command that can be pasted as it is.
func (a *agent) invitation() string {
	before, flags := settings(os.Getenv)
	words := []string{"tutti", "launch", "--join", withoutZone(a.address), "-n", strconv.Itoa(a.Ranks)}
	words = append(words, flags...)
	if cmp.Or(a.Grace, DefaultGrace) != DefaultGrace {
		words = append(words, "--grace", a.Grace.String())
	}
	if a.Bind {
		words = append(words, "--bind")
	}
	if a.NoPrefix {
		words = append(words, "--no-prefix")
	}
	if a.copyName != "" {
		words = append(words, "--secret-file", a.copyName)
	}
	if a.Job != "" {
		words = append(words, "--job", a.Job)
	}
	words = append(words, a.typed()...)
	for i, word := range words {
		words[i] = quoted(word)
	}
	for i, setting := range before { // an assignment whose name is quoted would be a command
		name, value, _ := strings.Cut(setting, "=")
		before[i] = name + "=" + quoted(value)
	}
	words = append(before, words...)
	return fmt.Sprintf("with %s: run\n  %s\n", a.known, strings.Join(words, " "))
}

// typed is the ranks' command in the user's words.
func (a *agent) typed() []string {
	if a.Typed == nil {
		return a.Command
	}
	return a.Typed
}

// plainWord is one that shells take as it is.
var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// quoted is a word as shells read it.
func quoted(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
