// Package rendezvous lets the processes of a job find each other before they
// have a communicator: what the launcher put into the environment says who
// they are ([FromEnv]), and a short TCP exchange gives all of them what rank 0
// has to say ([Job.Broadcast]), such as NCCL's unique id.
package rendezvous

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"strconv"
)

// ErrEnvironment: the launcher's variables are missing or contradict each
// other.
var ErrEnvironment = errors.New("launcher's environment")

// Job is one process's place in a job.
type Job struct {
	// Launcher names whose variables were found: "torchrun", "openmpi",
	// "slurm" or "pmi"; "none" for a process on its own.
	Launcher string
	// Rank is this process's number of WorldSize, LocalRank its number among
	// those of this host.
	Rank, WorldSize, LocalRank int
	// Address is where rank 0 listens, as host:port.
	Address string
	// Secret is known to the processes of this job and to nobody else.
	Secret []byte
}

// launcher says how one family of launchers names things. A variable that a
// family does not have is "".
type launcher struct {
	name                  string
	rank, size            string
	localRank, localSize  string
	job                   string // a name of the job
	address               string // of rank 0's host
	port                  string
	portServesTheLauncher string // if "True", the launcher listens on port itself
}

// launchers in the order of preference: torchrun may itself have been started
// by one of the others, and then its ranks count.
var launchers = []launcher{
	{
		name: "torchrun", rank: "RANK", size: "WORLD_SIZE",
		localRank: "LOCAL_RANK", localSize: "LOCAL_WORLD_SIZE", job: "TORCHELASTIC_RUN_ID",
		address: "MASTER_ADDR", port: "MASTER_PORT", portServesTheLauncher: "TORCHELASTIC_USE_AGENT_STORE",
	},
	{
		name: "openmpi", rank: "OMPI_COMM_WORLD_RANK", size: "OMPI_COMM_WORLD_SIZE",
		localRank: "OMPI_COMM_WORLD_LOCAL_RANK", localSize: "OMPI_COMM_WORLD_LOCAL_SIZE", job: "PMIX_NAMESPACE",
		address: "MASTER_ADDR", port: "MASTER_PORT",
	},
	{
		name: "slurm", rank: "SLURM_PROCID", size: "SLURM_NTASKS",
		localRank: "SLURM_LOCALID", job: "SLURM_JOB_ID",
		address: "SLURM_LAUNCH_NODE_IPADDR", port: "MASTER_PORT",
	},
	{
		name: "pmi", rank: "PMI_RANK", size: "PMI_SIZE",
		localRank: "MPI_LOCALRANKID", localSize: "MPI_LOCALNRANKS", job: "PMI_JOBID",
		address: "MASTER_ADDR", port: "MASTER_PORT",
	},
}

// SecretVariable names the environment variable that holds the job's secret.
const SecretVariable = "TUTTI_SECRET"

// FromEnv reads the variables of torchrun, Open MPI, Slurm and PMI launchers
// (MPICH, Intel MPI), in this order; without any the process is a job of one.
// getenv is os.Getenv, or stands for it.
//
// The secret is TUTTI_SECRET, which is to be set the same for all processes. If
// it is not, the launcher's name for the job takes its place: that keeps two
// jobs apart that meet by accident, but not somebody who knows the name.
//
// Rank 0 listens on MASTER_ADDR:MASTER_PORT. Where torchrun itself uses that
// port, it is the next one; where no port is set, one that follows from the
// job's name; where no address is set, this host's loopback address if all
// processes are on this host.
func FromEnv(getenv func(string) string) (Job, error) {
	for _, l := range launchers {
		if getenv(l.rank) != "" && getenv(l.size) != "" {
			return l.read(getenv)
		}
	}
	return Job{Launcher: "none", WorldSize: 1}, nil
}

// read makes a Job of a launcher's variables.
func (l launcher) read(getenv func(string) string) (Job, error) {
	j := Job{Launcher: l.name}
	for _, v := range []struct {
		name     string
		to       *int
		optional bool
	}{
		{l.rank, &j.Rank, false},
		{l.size, &j.WorldSize, false},
		{l.localRank, &j.LocalRank, true},
	} {
		text := getenv(v.name)
		if text == "" && v.optional {
			continue
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 {
			return j, fmt.Errorf("rendezvous: %w of %s: %s=%q is no count", ErrEnvironment, l.name, v.name, text)
		}
		*v.to = n
	}
	if j.Rank >= j.WorldSize {
		return j, fmt.Errorf("rendezvous: %w of %s: %s=%d but %s=%d", ErrEnvironment, l.name, l.rank, j.Rank, l.size, j.WorldSize)
	}
	name := getenv(l.job)
	j.Secret = []byte(getenv(SecretVariable))
	if len(j.Secret) == 0 {
		j.Secret = []byte(l.name + " job " + name)
	}
	host, err := l.host(getenv, j.WorldSize)
	if err != nil {
		return j, err
	}
	port, err := l.listenPort(getenv, name)
	if err != nil {
		return j, err
	}
	j.Address = net.JoinHostPort(host, strconv.Itoa(port))
	return j, nil
}

// host is where rank 0 runs.
func (l launcher) host(getenv func(string) string, size int) (string, error) {
	if host := getenv(l.address); host != "" {
		return host, nil
	}
	if host := getenv("MASTER_ADDR"); host != "" {
		return host, nil
	}
	if size == 1 || l.localSize != "" && getenv(l.localSize) == strconv.Itoa(size) {
		return "127.0.0.1", nil
	}
	return "", fmt.Errorf("rendezvous: %w of %s: several hosts, but MASTER_ADDR does not say which one rank 0 runs on", ErrEnvironment, l.name)
}

// listenPort is the port of rank 0.
func (l launcher) listenPort(getenv func(string) string, job string) (int, error) {
	text := getenv(l.port)
	if text == "" {
		// Above the ports that systems hand out to outgoing connections
		// (32768 to 60999 on Linux) there are some thousand left.
		const first, count = 61000, 4000
		h := fnv.New32a()
		h.Write([]byte(job))
		return first + int(h.Sum32()%count), nil
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("rendezvous: %w of %s: %s=%q is no port", ErrEnvironment, l.name, l.port, text)
	}
	if l.portServesTheLauncher != "" && getenv(l.portServesTheLauncher) == "True" {
		port = port%65535 + 1
	}
	return int(port), nil
}
