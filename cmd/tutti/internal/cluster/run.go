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

// tools are the programs that make a cluster, from iproute2, util-linux and hostname.
var tools = []string{"ip", "tc", "mount", "unshare", "nsenter", "setsid", "hostname"}

const systemDirs = ":/usr/sbin:/sbin"

// namespaces returns unshare's arguments for a cluster's namespaces. They include a user namespace, in which
// everybody is root, unless the user is root already.
func namespaces() []string {
	args := []string{"--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"}
	if os.Geteuid() != 0 {
		args = append(args, "--user", "--map-root-user")
	}
	return args
}

// Available returns nil if jobs of an MPI library (one of [MPIs], "" for any) can run on clusters. Otherwise its
// error wraps [comm.ErrUnavailable] and says what is missing.
func Available(mpi string) error {
	if err := possible(); err != nil {
		return err
	}
	_, _, err := find(mpi)
	return err
}

// possible returns nil if clusters can be made.
func possible() error {
	if runtime.GOOS != "linux" {
		return fmt.Errorf("%w: emulated clusters are made of Linux's namespaces, and this is %s",
			comm.ErrUnavailable, runtime.GOOS)
	}
	// The PATH of users other than root often lacks iproute2's directories.
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
	// The second mount is like the one inside the cluster.
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

// Inside is the hidden command of this program that makes the cluster in separate namespaces.
const Inside = "cluster-inside"

// NetworkVariable is the environment variable that describes the network to ranks, see [Config.Network].
const NetworkVariable = "TUTTI_NETWORK"

// job is the description that the process inside receives.
type job struct {
	Config
	Launcher    string   // path of an MPI library's mpirun, "" without MPI
	Args        []string // of the launcher, or the words of a rank's command line
	Environment []string // in addition to the environment of this process
}

// newJob makes a job from a command and a launcher, whose program is at path.
func newJob(c Config, l launcher, path string, command []string) job {
	return job{
		Config:   c,
		Launcher: path,
		Args:     l.arguments(c, command),
		Environment: slices.Concat(
			[]string{
				// Files that launchers forget disappear with the cluster.
				"TMPDIR=" + shared,
				NetworkVariable + "=" + c.Network(),
				env.Backend + "=" + cmp.Or(l.backend, "mpi"),
			},
			l.anywhere,
			l.environment,
		),
	}
}

// Grace periods of an emulated cluster. A job gets longer than its launcher gives the ranks, so the launcher is the
// one to kill ranks that do not end.
const (
	jobGrace = 10 * time.Second
	grace    = 15 * time.Second
)

// Run makes a cluster and runs a command on it as a job of an MPI library (one of [MPIs], "" for an installed one),
// with one process per rank. program is the path of this program, which has the hidden command [Inside]. The cluster
// is gone when Run returns. When ctx ends, the job is asked to end, and is killed after a grace period. A failed job
// returns a [launch.End], whose reason has been printed.
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
	// A separate session: signals from the terminal reach only this process, which tells the one inside through its
	// standard input.
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

// RunInside makes the cluster in description and runs its job. A failed job returns a [launch.End], without a text if
// that has been printed. The first byte of control is the signal that ends the job. The end of control ends this
// process and with it, as the first process of its namespaces, everything inside.
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
	if ctx.Err() != nil { // the job has heeded it, or has not begun
		err = nil
	}
	return cmp.Or(err, j.report(links, stderr))
}

// make makes the cluster, with its forwarders if there are any.
func (j job) make() (links forwarders, err error) {
	// The directory in the file system for the cluster's files.
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

// runAll runs commands one after the other until one fails.
func runAll(commands [][]string) error {
	for _, command := range commands {
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s%s: %w: %s", lacks(command), strings.Join(command, " "), err, firstLine(out))
		}
	}
	return nil
}

// lacks returns a prefix for a command's error that names the kernel feature it needs, if not all kernels have that
// feature.
func lacks(command []string) string {
	if slices.Contains(command, "tbf") {
		return "--rate needs the queueing discipline tbf, which this kernel does not seem to have " +
			"(CONFIG_NET_SCH_TBF, module sch_tbf): "
	}
	return ""
}

// run runs the job. When ctx ends, the job is asked to end.
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

// report prints the traffic of each link, which reveals a job that communicated without using the links.
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
