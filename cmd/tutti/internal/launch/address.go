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
	"github.com/tutti-go/tutti/internal/interfaces"
	hardware "github.com/tutti-go/tutti/internal/machine"
)

// loopback is the address of a job on one machine.
const loopback = "127.0.0.1"

// reachableAddress returns the address by which other machines most likely reach this one. It prefers the source
// address of the default route. The result is "" if there is none.
func reachableAddress() string {
	// Nothing is sent: the system chooses the source for addresses that are reserved for documentation.
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
	return unroutedAddress(interfaces.Up())
}

// unroutedAddress returns the address by which other machines most likely reach one without a default route. It prefers
// any address of an interface to other machines. Of these, it prefers a global address to one that holds on one link. A
// link's IPv6 address has its zone. The result is "" if there is none.
func unroutedAddress(all []interfaces.Interface) string {
	for _, isVirtual := range []bool{false, true} {
		for _, suits := range []func(net.IP) bool{net.IP.IsGlobalUnicast, isOfCable, isLink} {
			for _, i := range all {
				if i.Loopback || i.Virtual != isVirtual {
					continue
				}
				if n := slices.IndexFunc(i.IPs, suits); n >= 0 {
					return zoned(i.IPs[n], i.Name)
				}
			}
		}
	}
	return ""
}

// isLoopback reports whether a host is this machine under its loopback address.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// isLink reports whether an address is a link-local IPv6 address.
func isLink(ip net.IP) bool { return ip.To4() == nil && ip.IsLinkLocalUnicast() }

// isOfCable reports whether an address is a link-local IPv4 address. Hosts choose one when nobody assigns an address,
// such as on a cable between two machines.
func isOfCable(ip net.IP) bool { return ip.To4() != nil && ip.IsLinkLocalUnicast() }

// zoned returns the text of an interface's address.
func zoned(ip net.IP, name string) string {
	if isLink(ip) {
		return ip.String() + "%" + name
	}
	return ip.String()
}

// withoutZone returns an address (host:port) as other machines know it. A zone names an interface of this machine.
// Other machines try all of theirs.
func withoutZone(address string) string {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return address
	}
	return netip.AddrPortFrom(a.Addr().WithZone(""), a.Port()).String()
}

// leaveLoopback makes ranks listen on the network if the store has a loopback address but the job has other machines.
// Those machines reach the store through a tunnel, which does not carry the ranks' connections.
func (a *agent) leaveLoopback(all []machine) {
	id := hardware.Network()
	alone := !slices.ContainsFunc(all, func(m machine) bool { return m.ID != id })
	host, _, _ := net.SplitHostPort(a.address)
	if alone || !isLoopback(host) {
		return
	}
	a.env = append(a.env, "MASTER_ADDR="+cmp.Or(reachableAddress(), loopback))
}

// listMachines returns the machines that are present.
func (a *agent) listMachines(ctx context.Context) (all []machine) {
	listed, _ := a.kv.List(ctx, machines) // if the store is lost, the job ends soon
	for _, entry := range listed {
		var m machine
		if m.read(entry.Value) == nil {
			all = append(all, m)
		}
	}
	return all
}

// commonSettings lists the variables that must be equal on all ranks of a job, with the launcher's flag for each. ""
// means that there is no flag.
var commonSettings = []struct{ variable, flag string }{
	{env.Backend, ""},
	{env.Check, ""},
	{env.Record, ""},
	{env.TCPConnections, "--tcp-connections"},
	{env.TCPListen, "--tcp-listen"},
	{env.TCPSilence, "--tcp-silence"},
}

// settings returns this machine's settings that other machines need: words before the command, and flags.
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

// listenPort returns the port that ranks listen on, in the form for other machines, "" if there is none. It drops the
// host, which means this machine.
func listenPort(address string) string {
	_, port, err := net.SplitHostPort(address)
	if err != nil || port == "0" {
		return ""
	}
	return ":" + port
}

// invitation returns the instructions for other machines, with a command that can be pasted as it is.
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
	for i, setting := range before { // a shell would run a quoted assignment as a command
		name, value, _ := strings.Cut(setting, "=")
		before[i] = name + "=" + quoted(value)
	}
	words = append(before, words...)
	return fmt.Sprintf("with %s: run\n  %s\n", a.known, strings.Join(words, " "))
}

// typed returns the ranks' command in the user's words.
func (a *agent) typed() []string {
	if a.Typed == nil {
		return a.Command
	}
	return a.Typed
}

// plainWord matches words that shells take unquoted.
var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// quoted returns a word in a form that shells read as that word.
func quoted(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
