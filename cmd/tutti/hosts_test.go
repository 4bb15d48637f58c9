//go:build unix

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/jobtest"
)

// fakeSSH is an ssh client that runs the command here, as on another host: in a home directory and with few
// variables. Some hosts are down, or have no tutti, or a different one.
const fakeSSH = `#!/bin/sh
printf '%s\n' "$@" >> "$FAKE/arguments"
env >> "$FAKE/environment"
while :; do case $1 in -o) shift 2;; -*) shift;; *) break;; esac; done
host=$1
shift
command=$*
there() { command=$(echo "$command" | sed "s#$TUTTI#$1#"); }
case $host in
down.invalid) echo banner >&2; echo "ssh: connect to host down.invalid port 22: Connection refused" >&2; exit 255;;
locked.invalid) echo "x@locked.invalid: Permission denied (publickey)." >&2; exit 255;;
bare.invalid) there /nowhere/tutti;;
other.invalid) there "$FAKE/other";;
old.invalid) there "$FAKE/old";;
esac
cd "$FAKE"
echo Welcome
exec env -i HOME="$FAKE" PATH=/usr/bin:/bin sh -c "$command"
`

// numberedSSH runs a client and records the process number for each host.
const numberedSSH = `#!/bin/sh
for word do case $word in *.invalid) echo $$ > "$FAKE/$word.pid";; esac; done
exec "$FAKE/client" "$@"
`

// spreadJob is a job of launch --hosts with another ssh.
func spreadJob(t *testing.T, script string, args ...string) (cmd *exec.Cmd, fake string) {
	t.Helper()
	fake = t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(fake, name), []byte(text), 0o700))
	}
	write("ssh", numberedSSH)
	write("client", script)
	write("other", "#!/bin/sh\nprintf '\\0tutti-launch started v0.0.1\\n' >&2\ncat\n")
	write("old", "#!/bin/sh\necho 'tutti: unknown command \"launch-inside\" for \"tutti\"' >&2\necho \"Run 'tutti --help' for usage.\" >&2\nexit 2\n")
	cmd = command(t, build(t), append([]string{"launch"}, args...)...)
	cmd.Dir = t.TempDir()
	cmd.Env = append(cmd.Env, "FAKE="+fake, "TUTTI="+build(t), "PATH="+fake+":"+os.Getenv("PATH"))
	return cmd, fake
}

// finish runs a job to its end.
func finish(cmd *exec.Cmd) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	cmd.Stdout = &out
	cmd.Stderr = &errs
	_ = cmd.Run()
	return out.String(), patience.ReplaceAllString(errs.String(), ""), cmd.ProcessState.ExitCode()
}

// patience matches the lines that a launcher prints on a slow machine.
var patience = regexp.MustCompile(`(?m)^tutti: after .*\n|^(.*: )?tutti: .* (still running|to end).*\n`)

// One command runs the ranks of several hosts, in the order of the hosts, with this host's settings and directory.
// Only standard input contains the secret.
func TestHosts(t *testing.T) {
	t.Parallel()
	cmd, fake := spreadJob(t, fakeSSH, "--hosts", "alpha.invalid:2,localhost,alpha.invalid", "sh", "-c",
		`echo "$TUTTI_RANK of $TUTTI_WORLD_SIZE, $TUTTI_LOCAL_RANK here, $PWD, $TUTTI_CHECK$NCCL_DEBUG"; echo noise >&2`)
	const secret = "a secret that nobody else knows"
	cmd.Env = append(cmd.Env, "TUTTI_CHECK=20s", "NCCL_DEBUG=INFO", "TUTTI_SECRET="+secret)
	stdout, stderr, code := finish(cmd)
	require.Zero(t, code, stderr)
	said := strings.Split(strings.TrimSpace(stdout), "\n")
	slices.Sort(said)
	var want, noise []string
	for rank := range 3 {
		want = append(want, fmt.Sprintf("alpha.invalid: [%d] %d of 4, %d here, %s, 20sINFO", rank, rank, rank, cmd.Dir))
		noise = append(noise, fmt.Sprintf("alpha.invalid: [%d] noise", rank))
	}
	assert.Equal(t, append(want, fmt.Sprintf("localhost: [3] 3 of 4, 0 here, %s, 20sINFO", cmd.Dir)), said)
	said = strings.Split(strings.TrimSpace(stderr), "\n")
	slices.Sort(said)
	assert.Equal(t, append(noise, "localhost: [3] noise"), said)
	arguments, err := os.ReadFile(filepath.Join(fake, "arguments"))
	require.NoError(t, err)
	assert.NotContains(t, string(arguments), secret)
	assert.NotContains(t, string(arguments), "noise", "the job's words either")
}

// Launchers on one machine listen on different ports.
func TestHostsOfOneMachine(t *testing.T) {
	t.Parallel()
	cmd, _ := spreadJob(t, fakeSSH, "--no-prefix", "--hosts", "localhost:1,127.0.0.1:2", "sh", "-c", `echo "$TUTTI_RANK: $TUTTI_LOCAL_RANK of $TUTTI_LOCAL_WORLD_SIZE"`)
	stdout, stderr, code := finish(cmd)
	require.Zero(t, code, stderr)
	said := strings.Split(strings.TrimSpace(stdout), "\n")
	slices.Sort(said)
	assert.Equal(t, []string{"0: 0 of 3", "1: 1 of 3", "2: 2 of 3"}, said)
}

// Launchers on one machine share its processors, and refuse more bound ranks than processors.
func TestBoundHostsOfOneMachine(t *testing.T) {
	t.Parallel()
	const hosts = "localhost:1,127.0.0.1:1"
	cmd, _ := spreadJob(t, fakeSSH, "--bind", "--no-prefix", "--hosts", hosts, "sh", "-c", "grep Cpus_allowed_list /proc/self/status")
	stdout, stderr, code := finish(cmd)
	switch {
	case runtime.GOOS != "linux":
		assert.Equal(t, 1, code)
		assert.Contains(t, stderr, "ranks can be bound to processors on Linux only")
	case runtime.NumCPU() < 2:
		assert.Equal(t, 1, code)
		assert.Contains(t, stderr, "2 ranks on")
	default:
		require.Zero(t, code, stderr)
		said := strings.Split(strings.TrimSpace(stdout), "\n")
		require.Len(t, said, 2)
		assert.NotEqual(t, said[0], said[1])
	}
}

// A job whose secret is random or in a file passes it in no variable of ssh.
func TestHostsHaveTheSecretOfAFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "secret")
	for _, options := range [][]string{nil, {"--secret-file", file}} {
		cmd, fake := spreadJob(t, fakeSSH, slices.Concat(options, []string{"--no-prefix", "--hosts", "a.invalid,b.invalid:2", "sh", "-c", "echo $TUTTI_SECRET"})...)
		stdout, stderr, code := finish(cmd)
		require.Zero(t, code, stderr)
		secret, _, _ := strings.Cut(stdout, "\n")
		require.GreaterOrEqual(t, len(secret), 16)
		assert.Equal(t, strings.Repeat(secret+"\n", 3), stdout, "all hosts have the same")
		if options != nil {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			assert.Equal(t, secret, strings.TrimSpace(string(text)))
		}
		seen, err := os.ReadFile(filepath.Join(fake, "environment"))
		require.NoError(t, err)
		assert.NotContains(t, string(seen), secret)
	}
}

// The ranks of several hosts train together, to the same weights as goroutines, and rank 0 prints.
func TestHostsTrain(t *testing.T) {
	t.Parallel()
	options := "train --epochs 1 --pattern oktopk --json --out " + t.TempDir()
	want, stderr, err := execute(t, build(t), append(strings.Fields(options), "--ranks", "3")...)
	require.NoError(t, err, stderr)
	hosts := append(strings.Fields("--no-prefix --hosts a.invalid:2,b.invalid "+options), "--backend", "tcp")
	cmd, _ := spreadJob(t, fakeSSH, hosts...)
	got, stderr, code := finish(cmd)
	require.Zero(t, code, stderr)
	type result struct {
		Hash string `json:"hash"`
	}
	assert.Equal(t, lines[result](t, want), lines[result](t, got))
	assert.NotEmpty(t, lines[result](t, got)[0].Hash)
}

// twoNetworks has two hosts joined by a cable, and runs a job from a machine without a network.
const twoNetworks = `set -e
mount -t tmpfs tutti /mnt
touch /mnt/a.invalid /mnt/b.invalid
unshare --net=/mnt/a.invalid true
unshare --net=/mnt/b.invalid true
nsenter --net=/mnt/a.invalid ip link add eth0 type veth peer name eth0 netns /mnt/b.invalid
up='ip link set lo up && ip link set eth0 up && ip address add dev eth0'
nsenter --net=/mnt/a.invalid sh -c "$up 192.168.1.5/24"
nsenter --net=/mnt/b.invalid sh -c "$up 192.168.1.6/24"
exec "$@"
`

// Hosts that reach each other train together, started from a machine that neither reaches except by ssh.
func TestHostsOfAnotherNetwork(t *testing.T) {
	t.Parallel()
	inside := namespaces(t)
	script := strings.Replace(fakeSSH, "exec env", `exec nsenter --net=/mnt/"$host" env`, 1)
	train := "train --epochs 1 --pattern dense --json --out " + t.TempDir()
	options := strings.Fields("--no-prefix --hosts a.invalid,b.invalid:2 " + train + " --backend tcp")
	cmd, _ := spreadJob(t, script, options...)
	words := slices.Concat(inside(twoNetworks), []string{"sh"}, cmd.Args)
	cmd.Path, cmd.Args = mustFind(t, words[0]), words
	stdout, stderr, code := finish(cmd)
	require.Zero(t, code, stderr)
	type result struct {
		Ranks int    `json:"ranks"`
		Hash  string `json:"hash"`
	}
	got := lines[result](t, stdout)
	want, stderr, err := execute(t, build(t), strings.Fields(train+" --ranks 3")...)
	require.NoError(t, err, stderr)
	assert.Equal(t, lines[result](t, want), got)
}

// mustFind returns the file of a program.
func mustFind(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	require.NoError(t, err)
	return path
}

// A single line says why a host takes no part. It names the host, the reason and a remedy.
func TestHostsThatTakeNoPart(t *testing.T) {
	t.Parallel()
	program := []string{"sh", "-c", "echo runs"}
	for host, want := range map[string]string{
		"down.invalid":   "down.invalid cannot be reached: ssh: connect to host down.invalid port 22: Connection refused: `ssh down.invalid true` has to work without a prompt",
		"locked.invalid": "locked.invalid cannot be reached: x@locked.invalid: Permission denied (publickey).: `ssh locked.invalid true` has to work without a prompt",
		"bare.invalid":   "bare.invalid has no tutti that runs, neither TUTTI nor one in the PATH of ssh: copy it (scp TUTTI bare.invalid:TUTTI)",
		"other.invalid":  "other.invalid has tutti v0.0.1, and this machine tutti VERSION: all hosts of a job use one build (scp TUTTI other.invalid:TUTTI)",
		"old.invalid":    "old.invalid has another tutti, which does not know of --hosts: unknown command \"launch-inside\" for \"tutti\": all hosts of a job use one build (scp TUTTI old.invalid:TUTTI)",
	} {
		for _, hosts := range []string{"localhost," + host, host + ",localhost", host} {
			for _, kind := range [][]string{nil, {"--min", "1"}} {
				cmd, _ := spreadJob(t, fakeSSH, slices.Concat(kind, []string{"--hosts", hosts}, program)...)
				stdout, stderr, code := finish(cmd)
				version, _, err := execute(t, build(t), "--version")
				require.NoError(t, err)
				_, version, _ = strings.Cut(strings.TrimSpace(version), " ")
				text := strings.ReplaceAll(strings.ReplaceAll(want, "TUTTI", build(t)), "VERSION", version)
				assert.Equal(t, "tutti: "+text+"\n", stderr, hosts)
				assert.Equal(t, 1, code)
				if kind == nil {
					assert.Empty(t, stdout)
				}
			}
		}
	}
	cmd, _ := spreadJob(t, fakeSSH, "--hosts", "localhost,a.invalid", "./missing")
	_, stderr, code := finish(cmd)
	assert.Equal(t, 1, code)
	assert.Regexp(t, `^tutti: (localhost|a.invalid): ./missing is neither a command of tutti nor a program: .*\n$`, stderr)
}

// An elastic job is over when the ranks of all hosts have ended, including a host that comes after the others have
// gone.
func TestAHostThatComesLate(t *testing.T) {
	t.Parallel()
	script := strings.Replace(fakeSSH, "case $host in\n", `case $host in
late.invalid) while [ ! -e "$FAKE/ended" ]; do sleep 0.05; done;;
`, 1)
	body := `echo "rank $TUTTI_RANK"; touch "$HOME/ended"`
	cmd, _ := spreadJob(t, script, "--min", "1", "--no-prefix", "--hosts", "a.invalid,late.invalid", "sh", "-c", body)
	stdout, stderr, code := finish(cmd)
	require.Zero(t, code, stderr)
	assert.Equal(t, "rank 0\nrank 1\n", stdout)
}

// A host without the directory uses its home directory, and the launcher says so.
func TestHostsWithoutTheDirectory(t *testing.T) {
	t.Parallel()
	script := strings.Replace(fakeSSH, "\nexec env", "\nrmdir \"$GONE\"\nexec env", 1)
	cmd, fake := spreadJob(t, script, "--hosts", "a.invalid", "pwd")
	cmd.Env = append(cmd.Env, "GONE="+cmd.Dir)
	stdout, stderr, code := finish(cmd)
	require.Zero(t, code, stderr)
	assert.Equal(t, "a.invalid: [0] "+fake+"\n", stdout)
	assert.Equal(t, fmt.Sprintf("a.invalid: tutti: chdir %s: no such file or directory: the ranks of this host run in %s\n", cmd.Dir, fake), stderr)
}

// A failed rank ends the job on all hosts with its exit code, and is named with its host.
func TestARankOfAHostFails(t *testing.T) {
	t.Parallel()
	cmd, _ := spreadJob(t, fakeSSH, "--hosts", "a.invalid:2,b.invalid:2", "sh", "-c", "[ $TUTTI_RANK != 3 ] || exit 7; sleep 600")
	_, stderr, code := finish(cmd)
	assert.Equal(t, 7, code)
	assert.Regexp(t, `^tutti: rank 3 on .*: exit status 7\n$`, stderr)
}

// A job whose output is not read ends as its ranks did, even if the output exceeds the launcher's buffer.
func TestHostsWhoseOutputIsNotRead(t *testing.T) {
	for _, bytes := range []int{1_150_000, 1_500_000} {
		for _, code := range []int{0, 7} {
			t.Run(fmt.Sprint(bytes, code), func(t *testing.T) {
				t.Parallel()
				body := fmt.Sprintf(`head -c %d /dev/zero | tr '\0' x | fold -w 99 >&2; exit %d`, bytes, code)
				cmd, _ := spreadJob(t, fakeSSH, "--no-prefix", "--hosts", "localhost", "sh", "-c", body)
				read, write, err := os.Pipe()
				require.NoError(t, err)
				cmd.Stderr = write
				require.NoError(t, cmd.Start())
				require.NoError(t, write.Close())
				ended := make(chan struct{})
				go func() {
					_ = cmd.Wait()
					close(ended)
				}()
				select {
				case <-ended:
					assert.Equal(t, code, cmd.ProcessState.ExitCode())
				case <-time.After(time.Minute):
					assert.Fail(t, "the job does not end")
					_ = cmd.Process.Kill()
					<-ended
				}
				require.NoError(t, read.Close())
			})
		}
	}
}

// A user signal to the launcher reaches the ranks of all hosts, in jobs of any kind.
func TestHostsHaveUserSignals(t *testing.T) {
	t.Parallel()
	for _, kind := range [][]string{nil, {"--min", "1"}} {
		body := `trap "exit 0" USR1; echo ready; while :; do sleep 0.05; done`
		cmd, _ := spreadJob(t, fakeSSH, slices.Concat(kind, []string{"--hosts", "a.invalid:2,b.invalid", "sh", "-c", body})...)
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		ready := bufio.NewScanner(stdout)
		for range 3 {
			require.True(t, ready.Scan())
		}
		require.NoError(t, cmd.Process.Signal(syscall.SIGUSR1))
		assert.NoError(t, cmd.Wait())
	}
}

// sshFiles makes the settings of an ssh server and client. The script is such a client.
func sshFiles(t *testing.T, address, port string) (server, dir, script string) {
	t.Helper()
	server, err := exec.LookPath("/usr/sbin/sshd")
	if err != nil {
		t.Skip("needs OpenSSH's server")
	}
	client, err := exec.LookPath("ssh")
	if err != nil {
		t.Skip("needs OpenSSH's client")
	}
	who, err := user.Current()
	require.NoError(t, err)
	dir = t.TempDir()
	for _, name := range []string{"host", "key"} {
		out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(dir, name)).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	settings := fmt.Sprintf("Port %s\nListenAddress %s\nHostKey %s/host\nAuthorizedKeysFile %s/key.pub\n"+
		"StrictModes no\nPermitRootLogin yes\nUsePAM no\nPidFile none\n", port, address, dir, dir)
	require.NoError(t, os.WriteFile(dir+"/sshd", []byte(settings), 0o600))
	settings = fmt.Sprintf("Host a.invalid b.invalid\nHostName %s\nPort %s\nUser %s\nIdentityFile %s/key\nIdentitiesOnly yes\n"+
		"StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n", address, port, who.Username, dir)
	require.NoError(t, os.WriteFile(dir+"/config", []byte(settings), 0o600))
	if os.Geteuid() == 0 {
		require.NoError(t, os.MkdirAll("/run/sshd", 0o755))
	}
	return server, dir, fmt.Sprintf("#!/bin/sh\nexec %s -F %s/config \"$@\"\n", client, dir)
}

// sshServer starts an ssh server for this test and returns a client for it.
func sshServer(t *testing.T) (script string) {
	t.Helper()
	_, port, _ := strings.Cut(jobtest.Address(t, 1), ":")
	server, dir, script := sshFiles(t, "127.0.0.1", port)
	daemon := command(t, server, "-D", "-e", "-f", dir+"/sshd")
	log, err := daemon.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, daemon.Start())
	read := bufio.NewScanner(log)
	for read.Scan() && !strings.Contains(read.Text(), "listening on") {
	}
	go io.Copy(io.Discard, log) //nolint:errcheck
	t.Cleanup(func() {
		_ = daemon.Process.Kill()
		_ = daemon.Wait()
	})
	probe := exec.Command("ssh", "-F", dir+"/config", "a.invalid", "true")
	if out, err := probe.CombinedOutput(); err != nil {
		t.Skipf("OpenSSH does not connect here: %v: %s", err, out)
	}
	return script
}

// Nothing of a job is left on any host when it is interrupted, its launcher is killed, or an ssh connection is cut:
// with this test's client, and with OpenSSH.
func TestHostsEndTogether(t *testing.T) {
	heedSignals(t)
	for name, client := range map[string]func(*testing.T) string{
		"fake":    func(*testing.T) string { return fakeSSH },
		"OpenSSH": sshServer,
	} {
		t.Run(name, func(t *testing.T) {
			script := client(t)
			kinds := [][]string{nil, {"--min", "1"}}
			if testing.Short() {
				kinds = kinds[:1]
			}
			for _, kind := range kinds {
				for _, way := range []string{"interrupt", "kill", "disconnect", "disconnect the first"} {
					t.Run(strings.Join(kind, " ")+way, func(t *testing.T) { endTogether(t, script, kind, way) })
				}
			}
		})
	}
}

// endTogether ends a job in the given way once all of its ranks run.
func endTogether(t *testing.T, script string, kind []string, way string) {
	alive := filepath.Join(t.TempDir(), "alive")
	require.NoError(t, syscall.Mkfifo(alive, 0o600))
	body := `exec 3> "$0"; echo ready $TUTTI_LOCAL_RANK; while :; do sleep 0.1; done`
	args := slices.Concat(kind, []string{"--grace", "5s", "--hosts", "a.invalid:2,b.invalid:1", "sh", "-c", body, alive})
	cmd, fake := spreadJob(t, script, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	ranks, err := os.Open(alive) // it ends when no process of a rank is left
	require.NoError(t, err)
	ready := bufio.NewScanner(stdout)
	for range 3 {
		require.True(t, ready.Scan(), "%s", &stderr)
	}
	switch way {
	case "interrupt":
		require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	case "kill":
		require.NoError(t, cmd.Process.Kill())
	case "disconnect":
		disconnect(t, fake, "b.invalid")
		if kind != nil { // the other host's ranks continue
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		}
	case "disconnect the first":
		disconnect(t, fake, "a.invalid")
	}
	_, err = io.ReadAll(ranks)
	require.NoError(t, err)
	for ready.Scan() {
	}
	require.Error(t, cmd.Wait())
	code := cmd.ProcessState.ExitCode()
	switch {
	case way == "interrupt":
		assert.Equal(t, 130, code, "%s", &stderr)
		assert.Equal(t, "tutti: interrupted\n", patience.ReplaceAllString(stderr.String(), ""))
	case way == "disconnect" && kind != nil:
		assert.Equal(t, 143, code, "%s", &stderr)
	case way != "kill":
		assert.Equal(t, 1, code, "%s", &stderr)
		assert.Regexp(t, "was lost on|has ended", stderr.String())
	}
}

// A hanging launcher's host is named within the silence of ranks, and nothing of the job is left when the launcher
// runs again. An elastic job goes on without that host, unless it is the first.
func TestAHostThatHangs(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("needs the system's list of processes")
	}
	elastic := []string{"--min", "1"}
	t.Run("OpenSSH", func(t *testing.T) { hang(t, sshServer(t), nil, 1) })
	t.Run("one of two", func(t *testing.T) { hang(t, fakeSSH, nil, 1) })
	if testing.Short() {
		return
	}
	t.Run("the first", func(t *testing.T) { hang(t, fakeSSH, nil, 0) })
	t.Run("the first of an elastic job", func(t *testing.T) { hang(t, fakeSSH, elastic, 0) })
	t.Run("one of an elastic job", func(t *testing.T) { hang(t, fakeSSH, elastic, 1) })
}

// hang stops a host's launcher once all ranks of a job run.
func hang(t *testing.T, script string, kind []string, host int) {
	t.Parallel()
	alive := filepath.Join(t.TempDir(), "alive")
	require.NoError(t, syscall.Mkfifo(alive, 0o600))
	body := `exec 3> "$0"; read -r _ _ _ guard _ < /proc/$PPID/stat; read -r _ _ _ launcher _ < /proc/$guard/stat
		echo "$TUTTI_RANK $launcher"; while :; do sleep 0.1; done`
	args := slices.Concat(kind, []string{"--no-prefix", "--grace", "5s", "--hosts", "a.invalid,b.invalid", "sh", "-c", body, alive})
	cmd, _ := spreadJob(t, script, args...)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	ranks, err := os.Open(alive) // it ends when no process of a rank is left
	require.NoError(t, err)
	ready := bufio.NewScanner(stdout)
	launchers := make([]int, 2)
	for range launchers {
		require.True(t, ready.Scan())
		var rank, launcher int
		_, err := fmt.Sscan(ready.Text(), &rank, &launcher)
		require.NoError(t, err)
		launchers[rank] = launcher
	}
	require.NoError(t, syscall.Kill(launchers[host], syscall.SIGSTOP))
	name := []string{"a", "b"}[host] + ".invalid"
	want := regexp.MustCompile(`^tutti: ` + name + ` \(\S+\): nothing has come from its launcher for 10s: is the machine down or hung, or the network to it cut\?`)
	said := bufio.NewScanner(stderr)
	for said.Scan() && !want.MatchString(said.Text()) {
	}
	require.Regexp(t, want, said.Text())
	_ = syscall.Kill(launchers[host], syscall.SIGCONT) // it was killed if its host is this machine
	if kind != nil && host > 0 {
		assert.Contains(t, said.Text(), "; the job goes on without it")
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	}
	_, err = io.ReadAll(ranks)
	require.NoError(t, err)
	for ready.Scan() || said.Scan() {
	}
	require.Error(t, cmd.Wait())
	code := 1
	if kind != nil && host > 0 {
		code = 143
	}
	assert.Equal(t, code, cmd.ProcessState.ExitCode())
}

// pulledCable has a host with an ssh server at the other end of a cable, which is pulled once all ranks of a job run.
// It waits until nothing of the job is left on either side.
const pulledCable = `
mount -t tmpfs tutti /mnt
touch /mnt/net
unshare --net=/mnt/net true
ip link add eth0 type veth peer name eth0 netns /mnt/net
up='ip link set lo up && ip link set eth0 up && ip address add dev eth0'
sh -c "$up 192.168.1.5/24"
nsenter --net=/mnt/net sh -c "$up 192.168.1.6/24"
nsenter --net=/mnt/net "$SSHD" -D -f "$FILES/sshd" & server=$!
until ssh b.invalid true; do kill -0 $server || exit 77; sleep 0.1; done
"$@" > out 2> err & starter=$!
until test "$(grep -c ready out)" = $RANKS; do kill -0 $starter || { cat err; exit 1; }; sleep 0.05; done
ip link set eth0 down
wait $starter; echo $? > code
left() { ps -e -o args= > now; grep -q -e '^[^ ]*tutti launch' -e '^rank-keeper' -e '^sh -c echo ready' now; }
while left; do sleep 0.1; done
`

// TestPulledCable pulls the cable between a launcher and a host that OpenSSH connects. The launcher names the host.
// Nothing of the job is left on the other side, whether the job's first host is there or here.
func TestPulledCable(t *testing.T) {
	t.Parallel()
	inside := namespaces(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a server of ssh in a namespace")
	}
	for hosts, ranks := range map[string]int{"b.invalid:2": 2, "localhost,b.invalid": 2} {
		t.Run(hosts, func(t *testing.T) {
			t.Parallel()
			server, files, script := sshFiles(t, "192.168.1.6", "22")
			body := `echo ready; while :; do sleep 0.1; done`
			cmd, _ := spreadJob(t, script, "--tcp-silence", "2s", "--grace", "2s", "--no-prefix", "--hosts", hosts, "sh", "-c", body)
			cmd.Env = append(cmd.Env, "SSHD="+server, "FILES="+files, fmt.Sprint("RANKS=", ranks))
			words := slices.Concat(inside(pulledCable), []string{"sh"}, cmd.Args)
			cmd.Path, cmd.Args = mustFind(t, words[0]), words
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState.ExitCode() == 77 {
				t.Skipf("OpenSSH does not connect here: %s", out)
			}
			require.NoError(t, err, "%s", out)
			read := func(name string) string {
				text, err := os.ReadFile(filepath.Join(cmd.Dir, name))
				require.NoError(t, err)
				return string(text)
			}
			assert.Equal(t, "1\n", read("code"))
			assert.Regexp(t, `(?m)^tutti: b\.invalid \(\S+\): nothing has come from its launcher for 2s: `+
				`is the machine down or hung, or the network to it cut\?`, read("err"))
		})
	}
}

// disconnect kills the ssh client of a host.
func disconnect(t *testing.T, fake, host string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(fake, host+".pid"))
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
}
