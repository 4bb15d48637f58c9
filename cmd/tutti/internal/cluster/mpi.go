package cluster

import (
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/comm"
)

// launcher says how an MPI library's mpirun starts ranks on the hosts.
type launcher struct {
	name     string         // value of --mpi
	programs []string       // its names, the most specific first
	version  *regexp.Regexp // in the output of --version
	// arguments returns the program's arguments for a cluster and a command.
	arguments func(c Config, command []string) []string
	backend   string // of the ranks; mpi if empty
	// anywhere is added to the environment of the program and its ranks in every case, environment only in a cluster.
	anywhere, environment []string
}

// launchers are the known launchers. Ranks on one host share memory. Between hosts both libraries are restricted to
// TCP on the hosts' links.
var launchers = []launcher{
	{
		name:     "openmpi",
		programs: []string{"mpirun.openmpi", "mpirun"},
		version:  regexp.MustCompile("Open MPI|OpenRTE|PRRTE"),
		arguments: func(c Config, command []string) []string {
			return append([]string{
				// Needed where the environment selects another one, as in some containers.
				"--mca", "plm", "rsh", "--mca", "plm_rsh_agent", enter,
				"--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp", "--mca", "btl_tcp_if_include", device,
				// All hosts share the same processors: no rank may have a processor to itself.
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

// quoted quotes the words of a command for the shell in [enterScript].
func quoted(_ Config, command []string) (words []string) {
	for _, word := range command {
		words = append(words, "'"+strings.ReplaceAll(word, "'", `'\''`)+"'")
	}
	return words
}

// NoMPI is the name among [MPIs] for jobs over TCP, which need no library.
const NoMPI = "none"

// MPIs returns the names of the MPI libraries that can run jobs, and NoMPI.
func MPIs() []string {
	var names []string
	for _, l := range launchers {
		names = append(names, l.name)
	}
	return names
}

// Launcher returns the program that starts jobs of an MPI library, one of [MPIs], and the environment that it needs.
func Launcher(name string) (path string, environment []string, err error) {
	l, path, err := find(name)
	return path, l.anywhere, err
}

// find returns the launcher of a library and the path of its program. name is one of [MPIs], or "" for the first
// installed library.
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
