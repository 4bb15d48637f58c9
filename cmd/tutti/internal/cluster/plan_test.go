package cluster

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// lines formats commands as a user would type them. The prefix that enters a namespace becomes the host's name in
// brackets.
func lines(commands [][]string) []string {
	var all []string
	for _, c := range commands {
		line := strings.Join(c, " ")
		if rest, ok := strings.CutPrefix(line, "nsenter --net="+root+"/"); ok {
			name, command, _ := strings.Cut(rest, "/net ")
			line = "[" + name + "] " + command
		}
		all = append(all, line)
	}
	return all
}

func TestLinksAreShapedInBothDirections(t *testing.T) {
	c := Config{Hosts: 2, PerHost: 1, Rate: 1e9}
	plan := lines(c.commands())
	for _, line := range []string{
		"tc qdisc add dev host0 root tbf rate 1gbit burst 15625 limit 64m",
		"[host0] tc qdisc add dev eth0 root tbf rate 1gbit burst 15625 limit 64m",
		"tc qdisc add dev host1 root tbf rate 1gbit burst 15625 limit 64m",
		"[host1] tc qdisc add dev eth0 root tbf rate 1gbit burst 15625 limit 64m",
	} {
		assert.Contains(t, plan, line)
	}
	assert.Contains(t, plan, "ip link add host0 gso_max_size 11718 type veth peer name eth0 gso_max_size 11718 netns "+root+"/host0/net")
	c.Loss = 0.5
	plan = lines(c.commands())
	assert.Contains(t, plan, "ip link set cable0 netns "+root+"/host0/net name eth0")
	assert.Contains(t, plan, "[host0] tc qdisc add dev eth0 root tbf rate 1gbit burst 15625 limit 64m")
	assert.NotContains(t, strings.Join(plan, "\n"), "veth", "a forwarder has the devices")
}

func TestAllHostsHaveNamesAndAddressesOfTheirOwn(t *testing.T) {
	c := Config{Hosts: maxHosts, PerHost: 1, Rate: 1e9}
	network := netip.MustParsePrefix(headAddress + netmask).Masked()
	seen := map[string]bool{head: true, headAddress: true, bridge: true}
	plan := strings.Join(lines(c.commands()), "\n") + "\n"
	for i := range c.Hosts {
		name, addr := host(i), address(i)
		assert.False(t, seen[name] || seen[addr], name)
		seen[name], seen[addr] = true, true
		assert.Less(t, len(name), 16, "the kernel's limit for devices")
		assert.True(t, network.Contains(netip.MustParseAddr(addr)), addr)
		assert.Contains(t, c.files()[root+"/hosts"], addr+" "+name+"\n")
		assert.Contains(t, plan, "["+name+"] ip address add "+addr+netmask+" dev eth0\n")
	}
}

func TestScriptIsOne(t *testing.T) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Skip("needs a shell")
	}
	cmd := exec.Command(sh, "-n")
	cmd.Stdin = strings.NewReader(enterScript)
	out, err := cmd.CombinedOutput()
	assert.NoError(t, err, "%s", out)
}

func TestJobsOfBothLibraries(t *testing.T) {
	c := Config{Hosts: 3, PerHost: 2, Rate: 1e9}
	for _, l := range launchers {
		j := newJob(c, l, "/bin/run", []string{"program", "an argument"})
		line := strings.Join(j.Args, " ")
		assert.Contains(t, MPIs(), l.name)
		if l.name == NoMPI {
			assert.Equal(t, []string{"'program'", "'an argument'"}, j.Args)
			assert.Contains(t, j.Environment, "TUTTI_BACKEND=tcp")
			continue
		}
		assert.Equal(t, "/bin/run", j.Launcher)
		assert.Equal(t, []string{"program", "an argument"}, j.Args[len(j.Args)-2:])
		assert.Contains(t, line, "host0:2,host1:2,host2:2", l.name)
		assert.Contains(t, line, " -n 6 ", l.name)
		assert.Contains(t, line, enter, l.name)
		assert.Subset(t, j.Environment, []string{"TUTTI_NETWORK=3 hosts, 1gbit", "TUTTI_BACKEND=mpi", "TMPDIR=/dev/shm"}, l.name)
	}
}

func TestMissingLaunchersAreSaid(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, _, err := find("mpich")
	assert.ErrorContains(t, err, "no launcher of mpich: looked for mpiexec.hydra, mpirun.mpich, mpirun;")
	l, _, err := find("")
	assert.NoError(t, err)
	assert.Equal(t, NoMPI, l.name)
}

func TestCommandsThatFailSayWhatKernelsLack(t *testing.T) {
	assert.Regexp(t, "^--rate needs .* tbf,.* sch_tbf", lacks([]string{"tc", "qdisc", "add", "dev", "x", "root", "tbf"}))
	assert.Empty(t, lacks([]string{"ip", "link"}))
	err := runAll([][]string{{"false", "with", "words"}, {"never"}})
	if _, lookErr := exec.LookPath("false"); lookErr == nil {
		assert.ErrorContains(t, err, "false with words: exit status 1")
	}
}
