// Package cluster makes an emulated cluster on one Linux machine. Each host is a set of namespaces (network, host
// name, System V IPC). A bridge joins the hosts. The kernel limits the rate of each host's link, and the link's
// forwarder adds delay and loss. An MPI library starts ranks on the hosts as it would on machines, with a script
// instead of ssh. Without MPI, package launch starts them.
//
// The cluster lives in namespaces that belong to the processes inside. Mounts, links and processes end with the first
// of these processes, which ends when the program that made it ends, however that happens. There is nothing to
// remove, and a killed run leaves nothing behind.
package cluster

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/launch"
)

// Config describes a cluster.
type Config struct {
	Hosts int // at most maxHosts
	// PerHost is the number of ranks on each host; they share memory.
	PerHost int
	// Rate of each link, in each direction.
	Rate Rate
	// Delay from one host to another, in whole microseconds, and Loss, the percentage of lost packets. If either is
	// set, a forwarder of this program carries the packets of hosts; otherwise the kernel does.
	Delay time.Duration
	Loss  float64
}

// maxHosts fill the addresses 10.77.0.1 to 10.77.0.250.
const maxHosts = 250

// maxPerHost exceeds the processors of any machine, which all hosts share.
const maxPerHost = 1024

// Default is the cluster of `tutti cluster` without flags.
func Default() Config {
	return Config{Hosts: 4, PerHost: 1, Rate: 1e9}
}

// Validate returns an error that names the first invalid setting.
func (c Config) Validate() error {
	switch {
	case c.Hosts < 1 || c.Hosts > maxHosts:
		return fmt.Errorf("%d hosts are not in [1, %d]", c.Hosts, maxHosts)
	case c.PerHost < 1 || c.PerHost > maxPerHost:
		return fmt.Errorf("%d ranks per host are not in [1, %d]", c.PerHost, maxPerHost)
	case c.Hosts*c.PerHost > launch.MaxRanks:
		return fmt.Errorf("%d hosts with %d ranks each are more than %d ranks", c.Hosts, c.PerHost, launch.MaxRanks)
	case c.Rate < minRate || c.Rate > maxRate:
		return fmt.Errorf("rate %v is not in [%v, %v]", c.Rate, minRate, maxRate)
	case c.Delay < 0 || c.Delay > 10*time.Second || c.Delay%time.Microsecond != 0:
		return fmt.Errorf("delay %v is not in [0, 10s], in whole microseconds", c.Delay)
	case !(c.Loss >= 0 && c.Loss < 100):
		return fmt.Errorf("loss %v is not in [0, 100) percent", c.Loss)
	}
	return nil
}

// Network describes the links, such as "4 hosts, 1gbit, delay 50us, loss 0.1%".
func (c Config) Network() string {
	text := backend.Counted(c.Hosts, "host") + ", " + c.Rate.String()
	if c.Delay > 0 {
		text += fmt.Sprintf(", delay %dus", c.Delay.Microseconds())
	}
	if c.Loss > 0 {
		text += fmt.Sprintf(", loss %v%%", c.Loss)
	}
	return text
}

// forwards reports whether a forwarder carries the packets of hosts.
func (c Config) forwards() bool {
	return c.Delay > 0 || c.Loss > 0
}

// Rate is a number of bits per second.
type Rate uint64

// A slower link would need more than a second for one packet of the largest size.
const (
	minRate Rate = 64e3
	maxRate Rate = 1e12
)

var rateUnits = []struct {
	suffix string
	bits   Rate
}{{"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}, {"bit", 1}}

// ParseRate parses a rate in tc's notation: 100mbit, 1gbit, 2.5gbit.
func ParseRate(text string) (Rate, error) {
	for _, unit := range rateUnits {
		number, ok := strings.CutSuffix(strings.ToLower(text), unit.suffix)
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(number, 64)
		if bits := v * float64(unit.bits); err == nil && bits >= 1 && bits <= float64(maxRate) {
			return Rate(math.Round(bits)), nil
		}
		break
	}
	return 0, fmt.Errorf("%q is not a rate (want bits per second such as 100mbit or 1gbit)", text)
}

// String writes the rate in [ParseRate]'s notation, with the largest unit of which the rate is a multiple.
func (r Rate) String() string {
	for _, unit := range rateUnits {
		if r >= unit.bits && r%unit.bits == 0 {
			return strconv.FormatUint(uint64(r/unit.bits), 10) + unit.suffix
		}
	}
	return "0bit"
}

// burst is the number of bytes that an idle link passes at once: an eighth of a millisecond's worth. That is little
// compared with MPI's time for a message, and leaves space for a few Ethernet packets.
func (r Rate) burst() int {
	return max(8192, int(r/8/8000))
}

// segment is the size of the pieces in which the kernel hands data to a link. With the headers of their packets they
// must fit the burst.
func (r Rate) segment() int {
	return min(65536, r.burst()*3/4)
}
