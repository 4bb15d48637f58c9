package cluster

import (
	"fmt"
	"path"
	"strings"
)

// root holds the cluster's namespaces and scripts. It is a separate file system that hides the machine's directory,
// so shared memory that ranks forget disappears with it. A host sees its own part at the same path.
const (
	shared = "/dev/shm"
	root   = shared + "/cluster"
)

// head is the name of the place where mpirun runs. It is no host, but is on the same network by an unlimited link.
const head = "head"

func host(i int) string {
	return fmt.Sprintf("host%d", i)
}
func cable(i int) string { return fmt.Sprintf("cable%d", i) } // the host's end, before it is moved there
func address(i int) string {
	return fmt.Sprintf("10.77.0.%d", i+1)
}

const congestion = "/proc/sys/net/ipv4/tcp_congestion_control"

const (
	headAddress = "10.77.0.254"
	netmask     = "/24"
	// device is the name of a host's link inside the host. Outside, at the bridge, the link has the host's name.
	device = "eth0"
	bridge = "br0"
)

// enterScript runs a shell command on a host, like ssh: enter HOST COMMAND... It gives the command a /sys of the
// host, where libraries look for network devices. The mounts belong to the command alone: a mount namespace for the
// host could not be kept without a process, because the kernel refuses some binds.
const enterScript = `#!/bin/sh
host=` + root + `/$1
shift
exec nsenter --net=$host/net --uts=$host/uts --ipc=$host/ipc unshare --mount sh -c "
mount --rbind $host/sys /sys || exit
mount --rbind $host/shm ` + shared + ` || exit
$*"
`

// enter is the path of the script.
const enter = root + "/enter"

// files returns the contents of the cluster's files by path.
func (c Config) files() map[string]string {
	names := fmt.Sprintf("127.0.0.1 localhost\n%s %s\n", headAddress, head)
	for i := range c.Hosts {
		names += fmt.Sprintf("%s %s\n", address(i), host(i))
	}
	return map[string]string{enter: enterScript, root + "/hosts": names}
}

// commands returns the commands that make the cluster, in order.
func (c Config) commands() [][]string {
	commands := [][]string{
		{"mount", "--bind", root + "/hosts", "/etc/hosts"},
		{"hostname", head},
		{"ip", "link", "set", "lo", "up"},
		{"ip", "link", "add", bridge, "type", "bridge"},
		{"ip", "address", "add", headAddress + netmask, "dev", bridge},
		{"ip", "link", "set", bridge, "up"},
	}
	for i := range c.Hosts {
		commands = append(commands, c.hostCommands(i)...)
	}
	return commands
}

// hostCommands returns the commands that make a host and its link.
func (c Config) hostCommands(i int) [][]string {
	name := host(i)
	segment := fmt.Sprint(c.Rate.segment())
	dir := path.Join(root, name)
	net := dir + "/net"
	uts := dir + "/uts"
	ipc := dir + "/ipc"
	inside := func(command ...string) []string {
		return append([]string{"nsenter", "--net=" + net}, command...)
	}
	commands := [][]string{
		{"mkdir", "-p", dir + "/sys", dir + "/shm/" + path.Base(root)},
		{"touch", net, uts, ipc},
		{"mount", "--bind", root, dir + "/shm/" + path.Base(root)},
		{"unshare", "--net=" + net, "--uts=" + uts, "--ipc=" + ipc, "hostname", name},
		inside("mount", "-t", "sysfs", "sysfs", dir+"/sys"),
		// Limits of processors and memory stay in force.
		{"mount", "--rbind", "/sys/fs/cgroup", dir + "/sys/fs/cgroup"},
	}
	if c.forwards() { // its devices exist already, and connections fill long links
		commands = append(commands,
			[]string{"ip", "link", "set", cable(i), "netns", net, "name", device},
			inside("ip", "link", "set", device, "gso_max_size", segment, "txqueuelen", "10000"),
			[]string{"ip", "link", "set", name, "gso_max_size", segment, "txqueuelen", "10000"},
			inside("sh", "-c", "cd /proc/sys/net/ipv4 && echo 4096 131072 67108864 | tee tcp_rmem > tcp_wmem"))
	} else {
		commands = append(commands,
			[]string{
				"ip", "link", "add", name, "gso_max_size", segment, "type", "veth", "peer", "name", device,
				"gso_max_size", segment, "netns", net,
			})
	}
	limit := func(name string) []string {
		return []string{
			"tc",
			"qdisc",
			"add",
			"dev",
			name,
			"root",
			"tbf",
			"rate",
			c.Rate.String(),
			"burst",
			fmt.Sprint(c.Rate.burst()),
			"limit",
			"64m",
		}
	}
	return append(commands,
		[]string{"ip", "link", "set", name, "master", bridge, "up"},
		inside("ip", "link", "set", "lo", "up"),
		// The same on every machine, without estimates of the rate.
		inside("sh", "-c", "echo cubic > "+congestion+" || echo reno > "+congestion),
		inside("ip", "address", "add", address(i)+netmask, "dev", device),
		inside("ip", "link", "set", device, "up"),
		// Down to the host, and up from it. The queue is long enough that it loses nothing.
		limit(name),
		inside(limit(device)...))
}

// hostList lists the hosts and their numbers of ranks in the form that both launchers read.
func (c Config) hostList() string {
	var list []string
	for i := range c.Hosts {
		list = append(list, fmt.Sprintf("%s:%d", host(i), c.PerHost))
	}
	return strings.Join(list, ",")
}
