package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/launch"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/env"
)

// tools are the programs that make a cluster: iproute2, util-linux and the name
// of a host.
var tools = []string{"ip", "tc", "mount", "unshare", "nsenter", "setsid", "hostname"}

const systemDirs = ":/usr/sbin:/sbin"

// namespaces are the arguments of unshare that make a cluster's own; the user's,
// in which everybody is root, only for who is not.
func namespaces() []string {
	args := []string{"--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"}
	if os.Geteuid() != 0 {
		args = append(args, "--user", "--map-root-user")
	}
	return args
}

// Available returns nil where jobs of an MPI library (one of [MPIs], "" for any)
// can run on clusters, else an error wrapping [comm.ErrUnavailable] that says what
// is missing.
func Available(mpi string) error {
	if err := possible(); err != nil {
		return err
	}
	_, _, err := find(mpi)
	return err
}

// possible returns nil where clusters can be made.
func possible() error {
	if runtime.GOOS != "linux" {
		return fmt.Errorf("%w: emulated clusters are made of Linux's namespaces, and this is %s",
			comm.ErrUnavailable, runtime.GOOS)
	}
	// Users other than root often lack the directories of iproute2.
	if path := os.Getenv("PATH"); !strings.HasSuffix(path, systemDirs) {
		if err := os.Setenv("PATH", path+systemDirs); err != nil {
			return err
		}
	}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w: emulated clusters need the program %s (Debian's packages iproute2, util-linux and hostname)",
				comm.ErrUnavailable, tool)
		}
	}
	// The second one as inside, where mounts are made.
	out, err := exec.Command("unshare", append(namespaces(), "mount", "-t", "tmpfs", "tutti", shared)...).CombinedOutput()
	if err != nil {
		hint := ""
		if os.Geteuid() != 0 {
			hint = "; root may be permitted to, with sudo and the path of this program"
			if self, err := os.Executable(); err == nil {
				hint += ": sudo " + self
			}
		}
		return fmt.Errorf("%w: emulated clusters need namespaces, which this user or container may not make: %s%s",
			comm.ErrUnavailable, firstLine(out), hint)
	}
	return nil
}

// Inside is the hidden command of this program that makes the cluster, in
// its own namespaces.
const Inside = "cluster-inside"

// NetworkVariable is the environment variable that tells ranks of their network,
// see [Config.Network].
const NetworkVariable = "TUTTI_NETWORK"

// job is what the process inside is told.
type job struct {
	Config
	Launcher    string   // the program of an MPI library, "" without MPI
	Args        []string // of the launcher, or the words of a rank's command line
	Environment []string // in addition to the environment of this process
}

// newJob is a command as a job of a launcher, whose program is at path.
func newJob(c Config, l launcher, path string, command []string) job {
	return job{
		Config:   c,
		Launcher: path,
		Args:     l.arguments(c, command),
		Environment: slices.Concat(
			[]string{
				// Where launchers leave what they forget: gone with the cluster.
				"TMPDIR=" + shared,
				NetworkVariable + "=" + c.Network(),
				env.Backend + "=" + cmp.Or(l.backend, "mpi"),
			},
			l.anywhere,
			l.environment,
		),
	}
}

// Grace of an emulated cluster: a job has longer to end than its launcher gives the ranks, so that it is the launcher
// that ends those that do not.
const (
	jobGrace = 10 * time.Second
	grace    = 15 * time.Second
)

// Run makes a cluster and runs a command on it as a job of the MPI library of
// that name (see [MPIs]; "" for what is installed), one process for each rank.
// program is this program, which has the hidden command [Inside]. The cluster is
// gone when Run returns. When ctx ends, the job is told to end, and ended after
// a time of grace. A job that fails is a [launch.End]; what went wrong has been said.
func Run(ctx context.Context, c Config, mpi, program string, command []string, stdout, stderr io.Writer) error {
	if err := c.Validate(); err != nil {
		return err
	}
	if err := possible(); err != nil {
		return err
	}
	l, path, err := find(mpi)
	if err != nil {
		return err
	}
	description, err := json.Marshal(newJob(c, l, path, command))
	if err != nil {
		return err
	}
	// A separate session: what the terminal sends goes to this process, which
	// tells the one inside by its standard input.
	args := append(append([]string{"unshare"}, namespaces()...), program, Inside, string(description))
	cmd := exec.CommandContext(ctx, "setsid", args...)
	cmd.Stdout = stdout
	cmd.Stderr = stderr
	control, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	cmd.Cancel = func() error {
		_, err := control.Write([]byte{byte(launch.Signal(ctx))})
		return err
	}
	cmd.WaitDelay = grace
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.As(err, &exit):
		return &launch.End{Code: max(exit.ExitCode(), 1)}
	}
	return err
}

// RunInside makes the cluster that description says, and runs its job. One that
// fails is a [launch.End], without a text if that has been said. The first byte of
// control is the signal that ends the job; the end of control ends this process, and
// with it, the first of its namespaces, everything inside.
func RunInside(description string, control io.Reader, stdout, stderr io.Writer) error {
	ctx, end := context.WithCancelCause(context.Background())
	defer end(nil)
	go func() {
		var number [1]byte
		if n, _ := control.Read(number[:]); n > 0 {
			end(launch.Signaled(number[0]))
			_, _ = io.Copy(io.Discard, control)
		}
		os.Exit(1)
	}()
	var j job
	if err := json.Unmarshal([]byte(description), &j); err != nil {
		return fmt.Errorf("%s is not a command to call: %w", Inside, err)
	}
	links, err := j.make()
	if err != nil {
		return fmt.Errorf("making the cluster: %w", err)
	}
	err = j.run(ctx, stdout, stderr)
	if ctx.Err() != nil { // it has heeded that, or not begun
		err = nil
	}
	return cmp.Or(err, j.report(links, stderr))
}

// make makes the cluster, with forwarders if it has some.
func (j job) make() (links forwarders, err error) {
	// Its place in the file system, where the files are written.
	if err := runAll([][]string{{"mount", "-t", "tmpfs", "tutti", shared}, {"mkdir", root}}); err != nil {
		return nil, err
	}
	for path, text := range j.files() {
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			return nil, err
		}
	}
	if j.forwards() {
		if links, err = forward(j.Config); err != nil {
			return nil, err
		}
	}
	return links, runAll(j.commands())
}

// runAll runs commands one after the other, up to the first that fails.
func runAll(commands [][]string) error {
	for _, command := range commands {
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s%s: %w: %s", lacks(command), strings.Join(command, " "), err, firstLine(out))
		}
	}
	return nil
}

// lacks says, in front of the error of a command, what the kernel lacks if it is
// what not all kernels have.
func lacks(command []string) string {
	if slices.Contains(command, "tbf") {
		return "--rate needs the queueing discipline tbf, which this kernel does not seem to have " +
			"(CONFIG_NET_SCH_TBF, module sch_tbf): "
	}
	return ""
}

// run runs the job, which is told to end when ctx does.
func (j job) run(ctx context.Context, stdout, stderr io.Writer) error {
	environment := j.Environment
	if os.Getenv(env.Secret) == "" { // not in the description: others can see command lines
		environment = append(environment, env.Secret+"="+rand.Text()+rand.Text())
	}
	for _, e := range environment {
		name, value, _ := strings.Cut(e, "=")
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	if j.Launcher == "" {
		return j.launch(ctx, stdout, stderr)
	}
	cmd := exec.CommandContext(ctx, j.Launcher, j.Args...)
	cmd.Stdout = stdout
	cmd.Stderr = stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	err := cmd.Run()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return &launch.End{Code: max(exit.ExitCode(), 1)}
	}
	return err
}

// launch runs the job's ranks without MPI.
func (j job) launch(ctx context.Context, stdout, stderr io.Writer) error {
	var hosts []launch.Host
	for i := range j.Hosts {
		hosts = append(hosts, launch.Host{
			Name:  host(i),
			Enter: []string{enter, host(i), "exec"},
		})
	}
	return launch.Run(ctx, launch.Config{
		Command:  j.Args,
		Ranks:    j.Hosts * j.PerHost,
		Machines: 1,
		Listen:   headAddress + launch.DefaultListen,
		Wait:     time.Minute,
		Grace:    jobGrace,
		Hosts:    hosts,
		Plain:    true,
		Out:      stdout,
		Err:      stderr,
	})
}

// report says what the links carried: a job that was to communicate and did so
// past them would show.
func (j job) report(links forwarders, out io.Writer) error {
	text, err := exec.Command("ip", "-json", "-statistics", "link", "show", "master", bridge).Output()
	if err != nil {
		return err
	}
	var ports []struct {
		Stats struct {
			Received struct{ Bytes float64 } `json:"rx"`
		} `json:"stats64"`
	}
	if err := json.Unmarshal(text, &ports); err != nil {
		return err
	}
	var sum, longest float64
	for _, link := range ports {
		sum += link.Stats.Received.Bytes
		longest = max(longest, link.Stats.Received.Bytes)
	}
	carried := ""
	if links != nil {
		carried = links.report()
	}
	_, err = fmt.Fprintf(out, "tutti: %s: %.1f MB were sent over the links, at most %.1f MB by a host%s\n",
		j.Network(), sum/1e6, longest/1e6, carried)
	return err
}
