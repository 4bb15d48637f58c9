//go:build unix

package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/jobtest"
)

// Flags of tcp become variables of the ranks.
func TestLaunchFlagsOfTCP(t *testing.T) {
	t.Parallel()
	stdout, stderr, err := execute(t, build(t), "launch", "--tcp-silence", "30s", "--tcp-listen", "127.0.0.1", "sh", "-c", "echo $TUTTI_TCP_SILENCE $TUTTI_TCP_LISTEN")
	require.NoError(t, err, stderr)
	assert.Equal(t, "[0] 30s 127.0.0.1\n", stdout)

	_, stderr, err = execute(t, build(t), "train", "--backend", "tcp", "--tcp-silence", "30", "--epochs", "1")
	require.Error(t, err)
	assert.Contains(t, stderr, `TUTTI_TCP_SILENCE="30"`)
}

// Ranks of tutti launch train together if no backend is named, and separately on a backend that cannot join
// processes.
func TestLaunchedRanksTrainTogether(t *testing.T) {
	t.Parallel()
	hash := regexp.MustCompile(`"hash":"([0-9a-f]{16})"`)
	train := []string{"train", "--epochs", "1", "--pattern", "dense", "--json", "--out", t.TempDir()}
	stdout, stderr, err := execute(t, build(t), append(train, "--ranks", "2")...)
	require.NoError(t, err, stderr)
	want := hash.FindString(stdout)
	require.NotEmpty(t, want, stdout)
	stdout, stderr, err = execute(t, build(t), append([]string{"launch", "-n", "2", "--no-prefix"}, train...)...)
	require.NoError(t, err, stderr)
	assert.Equal(t, []string{want}, hash.FindAllString(stdout, -1), "rank 0 alone prints")
	assert.NotContains(t, stderr, "a world of its own")
	stdout, stderr, err = execute(t, build(t), append([]string{"launch", "-n", "2"}, append(train, "--backend", "local")...)...)
	require.NoError(t, err, stderr)
	assert.Len(t, hash.FindAllString(stdout, -1), 2)
	assert.Contains(t, stderr, "a world of its own")
}

// A member that nobody joins says what it waits for, and ends in order when it is interrupted. The directory for
// pictures stays, because other members may use it.
func TestInterruptedAlone(t *testing.T) {
	t.Parallel()
	heedSignals(t)
	out := filepath.Join(t.TempDir(), "pictures")
	secret := filepath.Join(t.TempDir(), "secret")
	address := jobtest.Address(t, 1)
	cmd := command(t, build(t), "launch", "-n", "1", "--min", "2", "--listen", address, "--secret-file", secret, "train", "--elastic", "--pattern", "dense", "--out", out)
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var text []string
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		if text = append(text, lines.Text()); strings.Contains(lines.Text(), "1 of at least 2 members are here") {
			require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
		}
	}
	_ = cmd.Wait()
	assert.Equal(t, 130, cmd.ProcessState.ExitCode(), text)
	assert.DirExists(t, out)
	assert.Equal(t, []string{"[0] tutti: interrupted", "tutti: interrupted"}, text[max(len(text)-2, 0):])
}

// A machine whose launcher is asked to end leaves an elastic job in order: no member's residual is lost.
func TestAMachineLeaves(t *testing.T) {
	t.Parallel()
	heedSignals(t)
	secret, address := filepath.Join(t.TempDir(), "secret"), jobtest.Address(t, 1)
	train := []string{"train", "--elastic", "--pattern", "oktopk", "--epochs", "100000", "--out", t.TempDir()}
	start := func(options ...string) (cmd *exec.Cmd, text *[]string, until func(string)) {
		text = new([]string)
		cmd = command(t, build(t), append(append([]string{"launch", "--secret-file", secret}, options...), train...)...)
		stderr, err := cmd.StderrPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewScanner(stderr)
		return cmd, text, func(pattern string) {
			for looked := regexp.MustCompile(pattern); lines.Scan(); {
				if *text = append(*text, lines.Text()); looked.MatchString(lines.Text()) {
					return
				}
			}
		}
	}
	first, said, until := start("-n", "2", "--min", "2", "--listen", address)
	until(`epoch .*members="rank ., rank ."`)
	second, _, rest := start("-n", "1", "--join", address)
	until(`epoch .*members="rank ., rank ., rank 2"`)
	require.NoError(t, second.Process.Signal(syscall.SIGTERM))
	rest("no such line: to the end")
	_ = second.Wait()
	assert.Equal(t, 143, second.ProcessState.ExitCode())
	until(`epoch .*members="rank ., rank ."`)
	require.NoError(t, first.Process.Signal(syscall.SIGINT))
	until("no such line: to the end")
	_ = first.Wait()
	assert.Equal(t, 130, first.ProcessState.ExitCode())
	assert.NotContains(t, strings.Join(*said, "\n"), "residuals of lost members")
}

// twoMachines runs the scripts $FIRST and $SECOND in two networks joined by a cable, and ends with the first exit
// code other than 0. The second one has the secret that the first one has or makes. Everything disappears with the
// namespaces.
const twoMachines = `set -e
mount -t tmpfs tutti /mnt
touch /mnt/net
unshare --net=/mnt/net true
ip link add eth0 type veth peer name eth0 netns /mnt/net
up='ip link set lo up && ip link set eth0 up && ip address add dev eth0'
sh -c "$up 192.168.1.5/24"
nsenter --net=/mnt/net sh -c "$up 192.168.1.6/24"
sh -c "$FIRST" > first 2> first.err & first=$!
until grep -q -- --join first.err; do kill -0 $first && sleep 0.1; done
test -e secret || cp -p .config/tutti/secret .
nsenter --net=/mnt/net sh -c "$SECOND" > second 2> second.err
wait $first
`

// namespaces returns a function that makes commands run a script in separate namespaces.
func namespaces(t *testing.T) (inside func(script string) []string) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("needs namespaces of Linux")
	}
	unshare := []string{"unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"}
	if os.Geteuid() != 0 {
		unshare = append(unshare, "--user", "--map-root-user")
	}
	inside = func(script string) []string { return append(slices.Clone(unshare), "sh", "-c", script) }
	probe := inside("mount -t tmpfs tutti /mnt && ip link add eth0 type veth peer name eth1 && nsenter --version")
	if out, err := exec.Command(probe[0], probe[1:]...).CombinedOutput(); err != nil {
		t.Skipf("needs namespaces, iproute2 and util-linux: %v: %s", err, out)
	}
	return inside
}

// Two machines without MPI train together by the two commands in each document, to the same weights as ranks of one
// process.
func TestTwoMachinesByTheDocuments(t *testing.T) {
	t.Parallel()
	inside := namespaces(t)
	tutti := build(t)
	const options = " --epochs 2 --pattern dense,oktopk --json"
	hashes := regexp.MustCompile(`"hash":"([0-9a-f]{16})"`)
	stdout, stderr, err := execute(t, tutti, strings.Fields("train --ranks 4 --out "+t.TempDir()+options)...)
	require.NoError(t, err, stderr)
	want := hashes.FindAllStringSubmatch(stdout, -1)
	require.Len(t, want, 2, stdout)
	for _, document := range []string{"README.md", "docs/launch.md"} {
		t.Run(document, func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile("../../" + document)
			require.NoError(t, err)
			commands := regexp.MustCompile(`(?m)^tutti launch .*(--machines|--join) .*train --backend tcp`).FindAllStringSubmatch(string(text), -1)
			require.Len(t, commands, 2)
			require.Equal(t, [2]string{"--machines", "--join"}, [2]string{commands[0][1], commands[1][1]})
			script := func(command string) string {
				return strings.Replace(strings.Replace(command, "tutti", tutti, 1), "FIRST", "192.168.1.5", 1) + options
			}
			dir := t.TempDir()
			all := inside(twoMachines)
			cmd := command(t, all[0], all[1:]...)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "FIRST="+script(commands[0][0]), "SECOND="+script(commands[1][0]),
				"HOME="+dir, "XDG_CONFIG_HOME=", "TUTTI_MPI_LIB=/nowhere")
			out, err := cmd.CombinedOutput()
			read := func(name string) string {
				text, _ := os.ReadFile(filepath.Join(dir, name))
				return string(text)
			}
			require.NoError(t, err, "%s%s%s", out, read("first.err"), read("second.err"))
			assert.Equal(t, want, hashes.FindAllStringSubmatch(read("first"), -1))
			assert.Empty(t, hashes.FindString(read("second")), "rank 0 prints")
		})
	}
}

// cable is twoMachines with addresses that are valid only on the cable, $ONE and $TWO, and different interface names.
// Both machines run the commands $BESIDE for further networks before.
// The second machine runs the command that the first one prints, unchanged.
const cable = `set -e
mount -t tmpfs tutti /mnt
touch /mnt/net
unshare --net=/mnt/net true
ip link add eth0 type veth peer name cable7 netns /mnt/net
up='ip link set lo up; ip link set $1 addrgenmode none; ip link set $1 up; ip address add $2 dev $1 $3'
sh -ec "$BESIDE$up" up eth0 $ONE
nsenter --net=/mnt/net sh -ec "$BESIDE$up" up cable7 $TWO
tutti launch --listen :29400 --machines 2 -n 1 $COMMAND > first 2> first.err & first=$!
until grep -q -- --join first.err; do kill -0 $first && sleep 0.1; done
sed -n 's/^  tutti launch --join/tutti launch --join/p' first.err > command
nsenter --net=/mnt/net sh -e command > second 2> second.err
wait $first
`

// Two machines whose addresses are valid only on their cable find each other by the command that the first one
// prints. For IPv6 the command names no interface, because interfaces differ between the machines.
func TestTwoMachinesOnACable(t *testing.T) {
	t.Parallel()
	inside := namespaces(t)
	tutti := build(t)
	// Containers' bridges have the same address on every host.
	const bridge = "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up; "
	for name, addresses := range map[string][3]string{
		"IPv4":                {"169.254.1.1/16", "169.254.1.2/16"},
		"IPv6":                {"fe80::1/64 nodad", "fe80::2/64 nodad"},
		"IPv4 beside docker0": {"169.254.1.1/16", "169.254.1.2/16", bridge},
		"IPv6 beside docker0": {"fe80::1/64 nodad", "fe80::2/64 nodad", bridge},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			all := inside(cable)
			cmd := command(t, all[0], all[1:]...)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "ONE="+addresses[0], "TWO="+addresses[1], "BESIDE="+addresses[2], "HOME="+dir, "XDG_CONFIG_HOME=",
				"TUTTI_SECRET=a secret of tests, and long enough", "PATH="+filepath.Dir(tutti)+":"+os.Getenv("PATH"),
				"COMMAND=train --backend tcp --epochs 1 --pattern dense --json", "TUTTI_MPI_LIB=/nowhere")
			out, err := cmd.CombinedOutput()
			read := func(name string) string {
				text, _ := os.ReadFile(filepath.Join(dir, name))
				return string(text)
			}
			require.NoError(t, err, "%s%s%s", out, read("first.err"), read("second.err"))
			assert.NotContains(t, read("command"), "127.0.0.1")
			assert.NotContains(t, read("command"), "eth0")
			assert.Contains(t, read("first"), `"hash":`)
		})
	}
}
