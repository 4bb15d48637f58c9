package cluster

import (
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/comm"
)

// launcher is how the mpirun of an MPI library starts ranks on the hosts.
type launcher struct {
	name     string         // for --mpi
	programs []string       // its names, the most certain first
	version  *regexp.Regexp // in what it prints with --version
	// arguments of the program for a cluster, with the command.
	arguments func(c Config, command []string) []string
	backend   string // of the ranks, mpi if it is empty
	// environment of the program, and so of the ranks, anywhere and in a cluster.
	anywhere, environment []string
}

// launchers are those that are known. Ranks on one host share memory; between
// hosts both libraries are held to TCP on the hosts' links.
var launchers = []launcher{
	{
		name:     "openmpi",
		programs: []string{"mpirun.openmpi", "mpirun"},
		version:  regexp.MustCompile("Open MPI|OpenRTE|PRRTE"),
		arguments: func(c Config, command []string) []string {
			return append([]string{
				// Also where the environment asks for another one, as in a container it may.
				"--mca", "plm", "rsh", "--mca", "plm_rsh_agent", enter,
				"--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp", "--mca", "btl_tcp_if_include", device,
				// All hosts are the same processors: no rank may have one to itself.
				"--bind-to", "none", "--mca", "mpi_yield_when_idle", "1",
				"--map-by", "slot", "--host", c.hostList(), "-n", fmt.Sprint(c.Hosts * c.PerHost),
			}, command...)
		},
		anywhere: []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"},
	},
	{
		name:     "mpich",
		programs: []string{"mpiexec.hydra", "mpirun.mpich", "mpirun"},
		version:  regexp.MustCompile("HYDRA"),
		arguments: func(c Config, command []string) []string {
			return append([]string{
				"-launcher", "rsh", "-launcher-exec", enter,
				"-hosts", c.hostList(), "-n", fmt.Sprint(c.Hosts * c.PerHost),
			}, command...)
		},
		environment: []string{"UCX_TLS=self,tcp", "UCX_NET_DEVICES=" + device},
	},
	{name: NoMPI, arguments: quoted, backend: "tcp"},
}

// quoted are the words of a command for the shell of [enterScript].
func quoted(_ Config, command []string) (words []string) {
	for _, word := range command {
		words = append(words, "'"+strings.ReplaceAll(word, "'", `'\''`)+"'")
	}
	return words
}

// NoMPI is the name among [MPIs] of jobs over TCP, which need no library.
const NoMPI = "none"

// MPIs are the names of the MPI libraries that can run jobs, and NoMPI.
func MPIs() []string {
	var names []string
	for _, l := range launchers {
		names = append(names, l.name)
	}
	return names
}

// Launcher returns the program that starts jobs of an MPI library, one of [MPIs],
// and what its environment needs.
func Launcher(name string) (path string, environment []string, err error) {
	l, path, err := find(name)
	return path, l.anywhere, err
}

// find returns the launcher of a library and the path of its program; name is
// one of [MPIs], or "" for the first that is installed.
func find(name string) (launcher, string, error) {
	var tried []string
	for _, l := range launchers {
		if name != "" && name != l.name {
			continue
		}
		if l.name == NoMPI {
			return l, "", nil
		}
		for _, program := range l.programs {
			path, err := exec.LookPath(program)
			if err != nil {
				tried = append(tried, program)
				continue
			}
			version, err := exec.Command(path, "--version").CombinedOutput()
			if err == nil && l.version.Match(version) {
				return l, path, nil
			}
			tried = append(tried, fmt.Sprintf("%s (%s)", path, firstLine(version)))
		}
	}
	return launcher{}, "", fmt.Errorf("%w: no launcher of %s: looked for %s; Debian's packages are openmpi-bin and mpich",
		comm.ErrUnavailable, name, strings.Join(slices.Compact(tried), ", "))
}

func firstLine(text []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	return line
}
