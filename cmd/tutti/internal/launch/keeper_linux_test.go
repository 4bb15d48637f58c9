package launch

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/env"
)

// markVariable marks all processes of a test.
const markVariable = "TUTTI_TEST_MARK"

// mark marks the processes that a test starts from now on. left lists the marked processes that have not ended.
func mark(t *testing.T) (left func() []string) {
	t.Helper()
	text := fmt.Sprintf("%s-%d", t.Name(), os.Getpid())
	t.Setenv(markVariable, text)
	return func() []string {
		var all []string
		paths, err := filepath.Glob("/proc/[0-9]*/environ")
		require.NoError(t, err)
		for _, path := range paths {
			environment, err := os.ReadFile(path)
			if err == nil && bytes.Contains(environment, []byte(markVariable+"="+text+"\x00")) {
				command, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
				all = append(all, strings.ReplaceAll(string(command), "\x00", " "))
			}
		}
		return all
	}
}

// shell starts ranks that run a shell script.
func shell(t *testing.T, ctx context.Context, script string, change func(*Config)) *started {
	t.Helper()
	return begin(t, ctx, "unused", func(c *Config) {
		c.Command = []string{"sh", "-c", script}
		c.Ranks = 1
		change(c)
	})
}

// wrappers run a script ($0) in the ways in which users start programs.
var wrappers = map[string]string{
	"alone":          `exec sh -c "$0"`,
	"shell":          `sh -c "$0"; true`,
	"background":     `sh -c "$0" & wait`,
	"forgotten":      `sh -c "$0" & exit 0`,
	"session":        `setsid --wait sh -c "$0"`,
	"daemon":         `setsid sh -c 'setsid sh -c "$0" & exit 0' "$0" & sleep 100`,
	"no-environment": `sh -c 'exec env -i PATH="$PATH" sh -c "$0"' "$0"; true`,
}

// Processes behind any wrapper are told to end. They have time to save their state, and can print meanwhile.
func TestWrappedProcessesHaveTheirGrace(t *testing.T) {
	for name, wrapper := range wrappers {
		if name == "forgotten" { // its rank ends by itself
			continue
		}
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "saved")
			script := `trap 'echo told; told=1' TERM; echo ready
				while test -z "$told"; do sleep 0.05; done
				for i in 1 2 3; do sleep 0.5; done
				echo saving; echo saved > ` + file

			ctx, cancel := context.WithCancelCause(t.Context())
			s := begin(t, ctx, "unused", func(c *Config) {
				c.Command = []string{"sh", "-c", wrapper, script}
				c.Ranks = 1
			})
			s.says(t, "ready")
			cancel(Signaled(syscall.SIGTERM))
			assert.Equal(t, 143, ended(t, s.wait(t)).Code)
			assert.FileExists(t, file)
			assert.Contains(t, s.out.String(), "[0] saving\n")
			assert.Equal(t, 1, strings.Count(s.out.String(), "told"), "each process gets the signal once")
		})
	}
}

// Processes that ignore the signal are killed at the end of their grace, behind any wrapper.
func TestWrappedProcessesAreKilled(t *testing.T) {
	for name, wrapper := range wrappers {
		t.Run(name, func(t *testing.T) {
			left := mark(t)
			ctx, cancel := context.WithCancelCause(t.Context())
			s := begin(t, ctx, "unused", func(c *Config) {
				c.Command = []string{"sh", "-c", wrapper, `trap "" TERM INT HUP; echo ready; while :; do sleep 0.05; done`}
				c.Ranks = 1
				c.Grace = 300 * time.Millisecond
			})
			s.says(t, "ready")
			cancel(Signaled(syscall.SIGINT))
			err := s.wait(t)
			if name != "forgotten" {
				assert.Equal(t, 130, ended(t, err).Code)
			}
			assert.Empty(t, left())
		})
	}
}

// A rank's processes are gone before the next round and at the end of the job. The rank may have failed, been killed or
// succeeded.
func TestNothingOfARankIsLeft(t *testing.T) {
	for name, c := range map[string]struct {
		end  string
		code int
	}{
		"fails":    {"exit 3", 3},
		"killed":   {"kill -9 $$", 137},
		"succeeds": {"exit 0", 0},
	} {
		t.Run(name, func(t *testing.T) {
			left := mark(t)
			// Each round counts all workers, by a name that nobody else has.
			worker := fmt.Sprintf("8%d", os.Getpid())
			count := fmt.Sprintf(`grep -lsxz [8]%d /proc/[0-9]*/cmdline | wc -l`, os.Getpid())
			script := fmt.Sprintf(`echo $(%s) workers; sleep %s & setsid sleep %s & %s`, count, worker, worker, c.end)
			s := shell(t, t.Context(), script, func(cfg *Config) { cfg.Restarts = 2 })
			err := s.wait(t)
			rounds := 1
			if c.code != 0 {
				assert.Equal(t, c.code, ended(t, err).Code)
				rounds = 3
			} else {
				require.NoError(t, err)
				const said = `^\[0\] tutti: the rank's command has ended, and process \d+ \(sleep\) and 1 more that it has started are told to end`
				assert.Regexp(t, said, s.err.String())
			}
			assert.Equal(t, strings.Repeat("[0] 0 workers\n", rounds), s.out.String())
			assert.Empty(t, left())
		})
	}
}

// The same holds in an elastic job, in which other ranks continue.
func TestNothingOfAMemberIsLeft(t *testing.T) {
	left := mark(t)
	worker := fmt.Sprintf("9%d", os.Getpid())
	script := fmt.Sprintf(`test $TUTTI_RANK = 1 && { sleep 3; exit 0; }
		echo $(grep -lsxz [9]%d /proc/[0-9]*/cmdline | wc -l) workers; sleep %s & setsid sleep %s & exit 3`, os.Getpid(), worker, worker)
	s := shell(t, t.Context(), script, func(c *Config) { c.Ranks, c.Min, c.Restarts = 2, 1, 1 })
	require.NoError(t, s.wait(t))
	assert.Equal(t, "[0] 0 workers\n[0] 0 workers\n", s.out.String())
	assert.Empty(t, left())
}

// All processes of a launcher end when it is killed, behind any wrapper.
func TestAKilledLauncherLeavesNothing(t *testing.T) {
	for name, wrapper := range wrappers {
		t.Run(name, func(t *testing.T) {
			left := mark(t)
			launcher := exec.Command(os.Args[0])
			launcher.Env = append(os.Environ(), launcherVariable+"="+wrapper, env.Secret+"=")
			read, write, err := os.Pipe()
			require.NoError(t, err)
			launcher.Stdout = write
			launcher.Stderr = write
			require.NoError(t, launcher.Start())
			require.NoError(t, write.Close())
			_, err = read.Read(make([]byte, 100)) // "ready"
			require.NoError(t, err)
			require.NoError(t, launcher.Process.Kill())
			require.Error(t, launcher.Wait())
			_, err = io.Copy(io.Discard, read) // until all processes have closed it
			require.NoError(t, err)
			require.Eventually(t, func() bool { return len(left()) == 0 }, time.Minute, time.Millisecond)
		})
	}
}

// killings are the ways in which users kill a job's processes. Each spares a process that then kills the others.
var killings = map[string]func(p place, victim, launcher place) bool{
	"by name":    func(_ place, victim, launcher place) bool { return victim.goesBy(launcher.name) },
	"by group":   func(_ place, victim, launcher place) bool { return victim.group == launcher.group },
	"by session": func(_ place, victim, launcher place) bool { return victim.session == launcher.session },
	"launcher and keeper": func(keeper place, victim, launcher place) bool {
		return victim.pid == launcher.pid || victim.pid == keeper.pid
	},
	"launcher and guard": func(keeper place, victim, launcher place) bool {
		return victim.pid == launcher.pid || victim.pid == keeper.parent
	},
	"guard": func(keeper place, victim, _ place) bool { return victim.pid == keeper.parent },
}

// place describes a process.
type place struct {
	pid, parent, group, session int
	name                        string // name in lists
	command                     string // command with its arguments
}

// newPlace finds a process. ok is false if it has ended.
func newPlace(t *testing.T, pid int) (p place, ok bool) {
	t.Helper()
	directory := filepath.Join("/proc", strconv.Itoa(pid))
	status, err := os.ReadFile(filepath.Join(directory, "stat"))
	if err != nil {
		return place{}, false
	}
	p = place{pid: pid, name: processName(pid)}
	_, err = fmt.Sscanf(string(status[bytes.LastIndexByte(status, ')')+2:]), "%s %d %d %d", new(string), &p.parent, &p.group, &p.session)
	require.NoError(t, err)
	command, _ := os.ReadFile(filepath.Join(directory, "cmdline"))
	p.command = strings.ReplaceAll(string(command), "\x00", " ")
	return p, true
}

// goesBy reports whether pkill, killall or pkill -f finds a process by a name.
func (p place) goesBy(name string) bool {
	return strings.Contains(p.name, name) || strings.Contains(p.command, name)
}

// No process of a rank is left, behind any wrapper, when its launcher is killed together with all processes of the
// launcher's name, process group or session, with the rank's keeper, or with the keepers' guard. No process is left
// either when the guard alone is killed.
func TestKilledAtOneInstant(t *testing.T) {
	for kind, chosen := range killings {
		for name, wrapper := range wrappers {
			t.Run(kind+"/"+name, func(t *testing.T) {
				if name == "forgotten" { // whose rank ends by itself
					return
				}
				left := mark(t)
				file := filepath.Join(t.TempDir(), "word") // in the commands of all processes of the rank
				script := "echo $PPID; exec sh -c '" + strings.ReplaceAll(wrapper, "'", `'\''`) + `' "$0 # ` + file + `"`
				cmd := exec.Command(os.Args[0])
				cmd.Env = append(os.Environ(), launcherVariable+"="+script, env.Secret+"=")
				cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
				stdout, err := cmd.StdoutPipe()
				require.NoError(t, err)
				require.NoError(t, cmd.Start())
				var pid int
				said := bufio.NewReader(stdout)
				_, err = fmt.Fscanf(said, "[0] %d\n[0] ready\n", &pid)
				require.NoError(t, err)
				launcher, _ := newPlace(t, cmd.Process.Pid)
				keeper, _ := newPlace(t, pid)
				var victims []int
				for _, p := range append(listProcesses().descend(cmd.Process.Pid), entry{pid: cmd.Process.Pid}) {
					victim, ok := newPlace(t, p.pid)
					if ok && chosen(keeper, victim, launcher) {
						victims = append(victims, p.pid)
					}
				}
				require.NotEmpty(t, victims)
				for _, s := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} { // no process acts between the kills
					for _, pid := range victims {
						_ = syscall.Kill(pid, s)
					}
				}
				require.Error(t, cmd.Wait())
				require.Eventually(t, func() bool {
					return len(left()) == 0 && len(withWord(t, file)) == 0
				}, time.Minute, time.Millisecond)
			})
		}
	}
}

// Programs of ranks end behind wrappers when the launcher, the keeper and the guard are killed at one instant, as by
// killall with the program's file.
func TestAllOfALauncherIsKilled(t *testing.T) {
	for name, wrapper := range map[string]string{
		"alone":       `exec "$0"`,
		"shell":       `"$0"; true`,
		"background":  `"$0" & wait`,
		"session":     `setsid --wait "$0"`,
		"double fork": `(setsid "$0" &); exec sleep 100`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they mostly wait
			program := filepath.Join(t.TempDir(), "program")
			require.NoError(t, os.Symlink(os.Args[0], program))
			script := "echo $PPID; export " + rankVariable + "=idles; exec sh -c '" + strings.ReplaceAll(wrapper, "'", `'\''`) + "' " + program
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), launcherVariable+"="+script, env.Secret+"=")
			stdout, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			var pid int
			said := bufio.NewReader(stdout)
			_, err = fmt.Fscanf(said, "[0] %d\n", &pid)
			require.NoError(t, err)
			line, err := said.ReadString('\n')
			require.NoError(t, err)
			require.Contains(t, line, "idles")
			keeper, ok := newPlace(t, pid)
			require.True(t, ok)
			for _, s := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} { // no process acts between the kills
				for _, pid := range []int{cmd.Process.Pid, keeper.parent, keeper.pid} {
					_ = syscall.Kill(pid, s)
				}
			}
			require.Error(t, cmd.Wait())
			require.Eventually(t, func() bool { return len(withWord(t, program)) == 0 }, time.Minute, time.Millisecond)
		})
	}
}

// A launcher has one process, the guard, in addition to a keeper for each rank. When the guard is killed, all ranks of
// an elastic job start again, under another guard.
func TestOneGuard(t *testing.T) {
	left := mark(t)
	file := filepath.Join(t.TempDir(), "over")
	script := `echo $PPID $TUTTI_RESTART; while ! test -e ` + file + `; do sleep 0.05; done`
	s := shell(t, t.Context(), script, func(c *Config) { c.Ranks, c.Min, c.Restarts, c.NoPrefix = 3, 1, 1, true })
	guards := map[int]bool{}
	for start := range 2 {
		round := map[int]bool{}
		begun := func() bool { return strings.Count(s.out.String(), fmt.Sprintf(" %d\n", start)) == 3 }
		require.Eventually(t, begun, time.Minute, time.Millisecond)
		for line := range strings.Lines(s.out.String()) {
			var keeper, restart int
			_, err := fmt.Sscanf(line, "%d %d", &keeper, &restart)
			require.NoError(t, err)
			if restart == start {
				p, ok := newPlace(t, keeper)
				require.True(t, ok)
				round[p.parent] = true
			}
		}
		require.Len(t, round, 1)
		for guard := range round {
			assert.False(t, guards[guard], "it was killed")
			guards[guard] = true
			if start == 0 {
				require.NoError(t, syscall.Kill(guard, syscall.SIGKILL))
			}
		}
	}
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, s.wait(t))
	const said = `(?m)^tutti: rank \d on \S+: the guard of all ranks \(orphan-guard, process \d+\) has ended: signal: killed \(out of memory\?`
	assert.Len(t, regexp.MustCompile(said).FindAllString(s.err.String(), -1), 3, s.err.String())
	assert.Empty(t, left())
}

// A rank fails, and all its processes end, when its keeper is killed, behind any wrapper.
func TestAKilledKeeper(t *testing.T) {
	for name, wrapper := range wrappers {
		t.Run(name, func(t *testing.T) {
			if name == "forgotten" { // whose rank ends by itself
				return
			}
			left := mark(t)
			file := filepath.Join(t.TempDir(), "keeper")
			s := begin(t, t.Context(), "unused", func(c *Config) {
				script := `trap "" TERM INT HUP; echo ready; while :; do sleep 0.05; done # ` + file
				c.Command = []string{"sh", "-c", "echo $PPID > " + file + "; exec sh -c '" + strings.ReplaceAll(wrapper, "'", `'\''`) + `' "$0"`, script}
				c.Ranks = 1
			})
			s.says(t, "ready")
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
			require.NoError(t, err)
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
			end := ended(t, s.wait(t))
			assert.Equal(t, 137, end.Code)
			assert.Contains(t, end.Text, fmt.Sprintf(": its keeper (rank-keeper, process %d) has ended: signal: killed (out of memory?", pid))
			assert.Empty(t, left())
			assert.Empty(t, withWord(t, file), "also without its environment")
		})
	}
}

// A keeper that the runtime of its program has ended, as when it may start no more threads, was not killed for want of memory.
func TestACrashedKeeper(t *testing.T) {
	left := mark(t)
	s := shell(t, t.Context(), `kill -ABRT $PPID; while :; do sleep 0.05; done`, one)
	end := ended(t, s.wait(t))
	assert.Equal(t, 1, end.Code, "2 is wrong usage")
	assert.Regexp(t, `: its keeper \(rank-keeper, process \d+\), not its program, has crashed: exit status 2 \(too many processes\? see ulimit -u\)$`, end.Text)
	assert.Empty(t, left())
}

// The same holds for the guard, with which all ranks end.
func TestACrashedGuard(t *testing.T) {
	left := mark(t)
	s := shell(t, t.Context(), `kill -ABRT $(ps -o ppid= -p $PPID); while :; do sleep 0.05; done`, one)
	end := ended(t, s.wait(t))
	assert.Equal(t, 1, end.Code)
	assert.Regexp(t, `: the guard of all ranks \(orphan-guard, process \d+\), not its program, has crashed: exit status 2 `, end.Text)
	assert.Empty(t, left())
}

// A rank's own exit code is the job's.
func TestARankThatCrashes(t *testing.T) {
	end := ended(t, shell(t, t.Context(), "exit 2", one).wait(t))
	assert.Equal(t, 2, end.Code)
	assert.Regexp(t, `: exit status 2$`, end.Text)
}

// A signal for a process that has ended does not reach the next process of its number.
func TestReusedNumbers(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	require.NoError(t, cmd.Start())
	now, ok := readStatus(cmd.Process.Pid)
	require.True(t, ok)
	earlier := now
	earlier.start--
	require.ErrorIs(t, earlier.signal(syscall.SIGKILL), syscall.ESRCH)
	require.NoError(t, now.signal(syscall.SIGTERM))
	var exit *exec.ExitError
	require.ErrorAs(t, cmd.Wait(), &exit)
	assert.Equal(t, syscall.SIGTERM, exit.Sys().(syscall.WaitStatus).Signal())
	require.ErrorIs(t, now.signal(syscall.SIGKILL), syscall.ESRCH)
}

// A process starts later than its parent, and has one time of its start.
func TestStartTimes(t *testing.T) {
	parent, ok := readStatus(os.Getppid())
	require.True(t, ok)
	self, ok := readStatus(os.Getpid())
	require.True(t, ok)
	again, _ := readStatus(os.Getpid())
	assert.Positive(t, parent.start)
	assert.GreaterOrEqual(t, self.start, parent.start)
	assert.Equal(t, self.start, again.start)
}

// A guard that is stopped ends with its launcher nevertheless.
func TestAStoppedGuardOfAKilledLauncher(t *testing.T) {
	left := mark(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), launcherVariable+`=echo $PPID; exec sh -c "$0"`, env.Secret+"=")
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var pid int
	_, err = fmt.Fscanf(bufio.NewReader(stdout), "[0] %d\n[0] ready\n", &pid)
	require.NoError(t, err)
	keeper, ok := newPlace(t, pid)
	require.True(t, ok)
	require.NoError(t, syscall.Kill(keeper.parent, syscall.SIGSTOP))
	require.Eventually(t, func() bool { return listProcesses().stopped(keeper.parent) }, time.Minute, time.Millisecond)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Eventually(t, func() bool { return len(left()) == 0 }, time.Minute, time.Millisecond)
}

// A rank that cannot be started for a bound of the system's is said with where the bound is.
func TestBounds(t *testing.T) {
	for err, want := range map[error]string{
		os.NewSyscallError("pipe2", syscall.EMFILE):                      "pipe2: too many open files (see ulimit -n)",
		&os.PathError{Op: "fork/exec", Path: "/sh", Err: syscall.EAGAIN}: "fork/exec /sh: resource temporarily unavailable (too many processes? see ulimit -u)",
		syscall.ENOENT: "no such file or directory",
	} {
		assert.EqualError(t, withRemedy(err), want)
	}
	for _, limit := range []string{"11", "12", "13", "14", "15", "16"} { // of which one at least lets a launcher come so far
		cmd := exec.Command("sh", "-c", `ulimit -n `+limit+`; exec "$0"`, os.Args[0])
		cmd.Env = append(os.Environ(), launcherVariable+"=exit 0 #", env.Secret+"=")
		text, _ := cmd.CombinedOutput()
		if strings.HasPrefix(string(text), "rank 0 on ") && strings.Contains(string(text), "(see ulimit -n)\n") {
			return
		}
		t.Logf("limit %s: %s", limit, text)
	}
	t.Error("no limit was said")
}

// A job for which the user may not start enough processes and threads ends with one line.
func TestTooFewProcesses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs to become another user")
	}
	become := []string{"setpriv", "--reuid", "64321", "--clear-groups", "env"} // a user without processes
	if out, err := exec.Command(become[0], append(become[1:], "prlimit", "--nproc=100", "true")...).CombinedOutput(); err != nil {
		t.Skipf("needs setpriv and prlimit: %v: %s", err, out)
	}
	program, err := os.Open(os.Args[0])
	require.NoError(t, err)
	defer program.Close() //nolint:errcheck // nothing was written
	for name, c := range map[string]struct {
		words []string
		say   string
	}{
		"user": {become, `^launch: resources are exhausted: this job takes 14 processes and threads or more, and of the user's 12 \(ulimit -u\), \d+ are in use\n$`},
		"root": {[]string{"env"}, `^<nil>\n$`}, // whom the system does not bound
	} {
		t.Run(name, func(t *testing.T) {
			// The other user may not enter the program's folder.
			words := append(c.words, "GOMAXPROCS=1", "sh", "-c", `exec prlimit --nproc=12 /proc/self/fd/3`)
			cmd := exec.Command(words[0], words[1:]...)
			cmd.Env = append(os.Environ(), launcherVariable+"=exit 0 #", env.Secret+"=")
			cmd.ExtraFiles = []*os.File{program}
			text, _ := cmd.CombinedOutput()
			assert.Regexp(t, c.say, string(text))
		})
	}
}

// A launcher in a PID namespace without its own /proc starts no rank, whose processes it could not find, and says what
// to mount.
func TestAnotherNamespacesProc(t *testing.T) {
	unshare := []string{"unshare", "--pid", "--fork", "--kill-child"}
	if os.Geteuid() != 0 {
		unshare = append(unshare, "--user", "--map-root-user")
	}
	if exec.Command(unshare[0], append(unshare[1:], "true")...).Run() != nil {
		t.Skip("needs to make namespaces")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, unshare[0], append(unshare[1:], os.Args[0])...)
	cmd.Env = append(os.Environ(), launcherVariable+"=sleep 1000 & exit 3 #", env.Secret+"=")
	text, err := cmd.CombinedOutput()
	require.Error(t, err)
	const said = `^rank 0 on \S+: /proc is that of another PID namespace: unshare --mount-proc mounts its own\n$`
	assert.Regexp(t, said, string(text))
}

// A launcher ends after the keeper was killed, even if it may not kill one of the rank's processes.
func TestAKilledKeeperOfAnotherUsersProcess(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs to become another user")
	}
	path, err := exec.LookPath("setpriv")
	if err != nil {
		t.Skip("needs setpriv")
	}
	launcher := exec.Command(path, "--bounding-set", "-kill", os.Args[0])
	script := `setpriv --reuid 65534 --clear-groups sleep 100 & echo $PPID $!; wait`
	launcher.Env = append(os.Environ(), launcherVariable+"="+script, env.Secret+"=")
	stdout, err := launcher.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, launcher.Start())
	var keeper, other int
	said := bufio.NewReader(stdout)
	_, err = fmt.Fscanf(said, "[0] %d %d\n", &keeper, &other)
	require.NoError(t, err)
	defer syscall.Kill(other, syscall.SIGKILL) //nolint:errcheck // it ends after 100 s
	require.Eventually(t, func() bool { return processName(other) == "sleep" }, time.Minute, time.Millisecond)
	require.NoError(t, syscall.Kill(keeper, syscall.SIGKILL))
	_, err = io.Copy(io.Discard, said)
	require.NoError(t, err)
	require.Error(t, launcher.Wait())
	assert.NoError(t, syscall.Kill(other, 0), "the launcher has not waited for it")
}

// withWord returns the commands of all processes, without zombies, that contain a text.
func withWord(t *testing.T, text string) (all []string) {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, path := range paths {
		command, _ := os.ReadFile(path)
		if strings.Contains(string(command), text) {
			all = append(all, string(command))
		}
	}
	return all
}

// A stopped keeper, a stopped guard or both do not delay the end.
func TestStoppedKeepers(t *testing.T) {
	for name, chosen := range map[string][2]bool{"keeper": {true, false}, "guard": {false, true}, "both": {true, true}} {
		t.Run(name, func(t *testing.T) {
			left := mark(t)
			ctx, cancel := context.WithCancelCause(t.Context())
			s := shell(t, ctx, `echo $PPID; setsid sleep 1000 & trap "" TERM; while :; do sleep 0.05; done`, func(c *Config) {
				c.Grace = 300 * time.Millisecond
			})
			s.says(t, "\n")
			var pid int
			_, err := fmt.Sscanf(s.out.String(), "[0] %d", &pid)
			require.NoError(t, err)
			keeper, ok := newPlace(t, pid)
			require.True(t, ok)
			for i, pid := range []int{keeper.pid, keeper.parent} {
				if chosen[i] {
					require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
				}
			}
			cancel(Signaled(syscall.SIGTERM))
			assert.Equal(t, 143, ended(t, s.wait(t)).Code)
			assert.Empty(t, left())
		})
	}
}

// A rank that a user has stopped does not delay the end.
func TestAStoppedRank(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	s := shell(t, ctx, `trap 'echo saved; exit 0' TERM; echo ready; kill -STOP $$; while :; do sleep 0.05; done`, one)
	s.says(t, "ready")
	cancel(Signaled(syscall.SIGTERM))
	assert.Equal(t, 143, ended(t, s.wait(t)).Code)
	assert.Contains(t, s.out.String(), "saved", "it goes on, to end in order")
}

// A rank that is stopped before it is connected to others, one of an elastic job, and a keeper are named while the others wait,
// and once.
func TestAStoppedRankIsSaid(t *testing.T) {
	for name, c := range map[string]struct {
		least   int    // members
		victim  string // of the signal
		command string // the victim's
	}{"fixed": {0, "$$", "sh"}, "elastic": {1, "$$", "sh"}, "keeper": {0, "$PPID", keeperName}} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			s := shell(t, ctx, `test $TUTTI_RANK = 1 && kill -STOP `+c.victim+`; trap 'exit 0' TERM; while :; do sleep 0.05; done`, func(cfg *Config) {
				cfg.Ranks, cfg.Min = 2, c.least
			})
			s.reports(t, "resumes it")
			said := regexp.MustCompile(`^tutti: rank 1 on \S+: process (\d+) \(` + c.command + `\) is stopped, and others may wait for it; kill -CONT \d+ resumes it\n$`)
			require.Regexp(t, said, s.err.String())
			pid, err := strconv.Atoi(said.FindStringSubmatch(s.err.String())[1])
			require.NoError(t, err)
			require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
			cancel(Signaled(syscall.SIGTERM))
			assert.Equal(t, 143, ended(t, s.wait(t)).Code)
			assert.Equal(t, 1, strings.Count(s.err.String(), "is stopped"))
		})
	}
}

// User signals reach the processes of a rank that handle them, on all machines, and end no process.
func TestUserSignals(t *testing.T) {
	first, second := pair(t)
	script := `sh -c 'trap "echo USR1" USR1; trap "echo USR2; exit 0" USR2; echo ready; while :; do sleep 0.05; done'; echo wrapper is here`
	command := func(c *Config) { c.Command, c.Ranks = []string{"sh", "-c", script}, 1 }
	a := begin(t, t.Context(), "unused", func(c *Config) { first(c); command(c) })
	b := begin(t, t.Context(), "unused", func(c *Config) { second(c); command(c); c.Wait = time.Minute })
	a.says(t, "ready")
	b.says(t, "ready")
	for _, s := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2} {
		require.NoError(t, syscall.Kill(os.Getpid(), s))
		name := map[syscall.Signal]string{syscall.SIGUSR1: "USR1", syscall.SIGUSR2: "USR2"}[s]
		a.says(t, name)
		b.says(t, name)
	}
	require.NoError(t, a.wait(t), "%s", &a.err)
	require.NoError(t, b.wait(t), "%s", &b.err)
	assert.Contains(t, a.out.String(), "wrapper is here")
}

// A launcher reports that a user signal between two rounds, or before the first one, reaches no rank. The signal
// reaches no rank of a later round. Neither does a signal of an earlier round.
func TestUserSignalsBetweenRounds(t *testing.T) {
	first, second := pair(t)
	file := filepath.Join(t.TempDir(), "succeed")
	script := fmt.Sprintf(`trap "echo told in round $TUTTI_RESTART; told=1" USR1; echo round $TUTTI_RESTART
		while test $TUTTI_RESTART = 0 -a -z "$told"; do sleep 0.05; done
		test -e %s || exit 3`, file)
	command := func(c *Config) { c.Command, c.Ranks, c.Restarts = []string{"sh", "-c", script}, 1, 1000 }
	const nobody = "user defined signal 2 reaches no rank: no rank runs now"
	a := begin(t, t.Context(), "unused", func(c *Config) { first(c); command(c) })
	a.reports(t, "on the other machines")
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGUSR2))
	a.reports(t, nobody)
	b := begin(t, t.Context(), "unused", func(c *Config) { second(c); command(c) })
	a.says(t, "round 0")
	b.says(t, "round 0")
	before := strings.Count(a.err.String(), nobody)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGUSR1))
	a.says(t, "round 3") // each pause is longer than the one before
	require.Eventually(t, func() bool {
		assert.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGUSR2))
		return strings.Count(a.err.String(), nobody) > before
	}, time.Minute, 50*time.Millisecond)
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, a.wait(t), "%s", &a.err)
	require.NoError(t, b.wait(t), "%s", &b.err)
	assert.NotRegexp(t, `told in round [2-9]`, a.out.String()+b.out.String())
}

// A job ends although nobody reads its output: when it is told to end, when a rank fails, and when all ranks succeed.
func TestTheEndWaitsForNoReader(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		signal bool
		code   int
	}{
		"told":     {"yes", true, 143},
		"fails":    {"test $TUTTI_RANK = 0 && exit 3; yes", false, 3},
		"succeeds": {"yes | head -n 100000", false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			left := mark(t)
			stuck := stuckReader{make(chan struct{})}
			defer close(stuck.released)
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			s := shell(t, ctx, c.script, func(cfg *Config) { cfg.Ranks, cfg.Out = 2, stuck })
			if c.signal {
				require.Eventually(t, func() bool { return strings.Contains(strings.Join(left(), "\n"), "yes") }, time.Minute, time.Millisecond)
				cancel(Signaled(syscall.SIGTERM))
			}
			err := s.wait(t)
			if c.code == 0 {
				require.NoError(t, err)
			} else {
				assert.Equal(t, c.code, ended(t, err).Code)
			}
			assert.Contains(t, s.err.String(), "nobody reads the output")
			assert.Empty(t, left())
		})
	}
}

// Restarts wait longer each time, up to a bound.
func TestPauses(t *testing.T) {
	assert.Equal(t, time.Second, pause(0))
	assert.Equal(t, 2*time.Second, pause(1))
	assert.Equal(t, 16*time.Second, pause(4))
	assert.Equal(t, 30*time.Second, pause(5))
	assert.Equal(t, 30*time.Second, pause(1_000_000))
}

// A signal in a pause between two rounds ends the job on both machines, whichever launcher receives it.
func TestSignalsInAPause(t *testing.T) {
	for i, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		t.Run(signal.String(), func(t *testing.T) {
			first, second := pair(t)
			command := func(c *Config) { c.Command, c.Ranks, c.Restarts = []string{"sh", "-c", "exit 3"}, 1, 1000 }
			ctx, cancel := context.WithCancelCause(t.Context())
			contexts := []context.Context{ctx, t.Context()}
			a := begin(t, contexts[i%2], "unused", func(c *Config) { first(c); command(c) })
			b := begin(t, contexts[1-i%2], "unused", func(c *Config) { second(c); command(c) })
			a.reports(t, " of 1000 in ")
			cancel(Signaled(signal))
			for _, s := range []*started{a, b} {
				end := ended(t, s.wait(t))
				assert.Equal(t, 128+int(signal), end.Code)
				assert.Contains(t, end.Text, Signaled(signal).Error()+" on ")
			}
		})
	}
}

// A guard or keeper whose program does not call Keep may not start a rank. Otherwise each would start the next, without
// end.
func TestKeepersOfKeepers(t *testing.T) {
	program := os.Args[0]
	defer func() { os.Args[0] = program }()
	for _, name := range []string{guardName, keeperName} {
		os.Args[0] = name
		_, err := newGuard()
		require.ErrorContains(t, err, "does not call Keep")
	}
}

// User signals of an elastic job reach the ranks of all machines once each. A machine whose session of the store was
// lost meanwhile is no exception.
func TestElasticUserSignals(t *testing.T) {
	first, second := pair(t)
	script := `trap "echo got USR1" USR1; trap "echo got USR2; exit 0" USR2; echo ready; while :; do sleep 0.05; done`
	command := func(c *Config) { c.Command, c.Ranks, c.Min, c.Machines = []string{"sh", "-c", script}, 1, 1, 1 }
	var s started
	cfg := Config{Version: "v1", Wait: time.Minute, Out: &s.out, Err: &s.err}
	first(&cfg)
	command(&cfg)
	a := newAgent(cfg)
	require.NoError(t, a.connect(t.Context()))
	defer a.kv.Close() //nolint:errcheck // nothing is lost
	ends := make(chan error, 1)
	go func() { ends <- a.elastic(t.Context()) }()
	l := newLink(t, cfg.Listen)
	b := begin(t, t.Context(), "unused", func(c *Config) {
		second(c)
		command(c)
		c.Join = []string{l.Addr().String()}
	})
	s.says(t, "ready")
	b.says(t, "ready")
	a.pass(syscall.SIGUSR1)
	s.says(t, "got USR1")
	b.says(t, "got USR1")
	l.set(true)
	<-l.attempts
	a.pass(syscall.SIGUSR2)
	s.says(t, "got USR2")
	assert.NotContains(t, b.out.String(), "got USR2")
	l.set(false)
	b.says(t, "got USR2")
	require.NoError(t, b.wait(t), "%s", &b.err)
	require.NoError(t, <-ends)
	for _, out := range []string{s.out.String(), b.out.String()} {
		assert.Equal(t, 1, strings.Count(out, "got USR1"), out)
	}
}
