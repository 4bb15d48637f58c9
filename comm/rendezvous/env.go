// Package rendezvous lets the processes of a job find each other before they have a communicator. Their launcher's
// environment variables tell their ranks ([FromEnv]). They share a store ([Job.Connect]), in which they meet under a
// number that rank 0 sets ([Job.Round]).
//
//	env.go      which launcher started the process, and so its rank and where rank 0 is
//	secret.go   what only processes of the job know
//	connect.go  the way to the store, which rank 0 or the launcher serves
//	round.go    how the ranks meet in it
package rendezvous

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/keeper"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/waiting"
)

// ErrEnvironment means that the launcher's variables are missing or contradict each other.
var ErrEnvironment = errors.New("launcher's environment")

// Job is one process's place in a job.
type Job struct {
	// Launcher is the launcher whose variables were found: "tutti", "torchrun", "openmpi",
	// "slurm", "flux", "pmi", "mvapich" or "jsrun", or "none" for a single process.
	Launcher string
	// Rank is this process's number of WorldSize, LocalRank its number on this host.
	Rank, WorldSize, LocalRank int
	// Address is where the other ranks reach rank 0, as host:port. Rank 0 listens on all
	// interfaces, or on the loopback address if it is one. If another program has the port,
	// rank 0 listens on one of the next three.
	Address string
	// Secret is known to the processes of this job and to nobody else; it has at least 16 bytes. Without one, only a
	// loopback address is used, with the user's secret ([UserSecretFile]).
	Secret []byte
	// Guessable: Secret is the job's name. It keeps apart jobs that meet by accident, but does
	// not keep out a process that knows the name. On a loopback address the user's secret does;
	// elsewhere rank 0 warns of it.
	Guessable bool
	// Hosted: the launcher keeps the job's store at Address, not rank 0.
	Hosted bool
	// Stores are the addresses of the job's store, each as host:port, if several processes serve it. They replace
	// Address, and the first one that answers is used. Empty unless tutti launch sets it.
	Stores []string
	// Name is the job's name in a store of several jobs, "" in a store of one.
	Name string
	// Patience is how long Connect and Round wait for other ranks if their context has no deadline:
	// TUTTI_CONNECT_TIMEOUT in FromEnv. 0 means 10 minutes.
	Patience time.Duration
	// Network is the network on which rank 0 serves the store and the others reach it. Address is then an address of
	// this network, and needs a secret. nil is the system's TCP, over which a store that the launcher keeps is always
	// reached.
	Network store.Network
}

// Variables of rank 0's address that users set for any launcher.
const (
	addressVariable = "MASTER_ADDR"
	portVariable    = "MASTER_PORT"
)

// launcher has the variables of a family of launchers, "" for one that it does not set.
type launcher struct {
	name         string   // of the launcher, as logs have it
	rank         string   // in the job
	size         string   // processes of the job
	localRank    string   // number of the process on its host
	localSize    string   // processes on this host
	key          string   // random, and known to the processes of the job alone
	job          []string // together a name of the job, unless the first is missing
	descriptor   string   // the number of a socket that all processes of this host inherit
	hosts        string   // of the job, in the order of the ranks
	hostCount    string   // hosts of the job
	launcherPort string   // if "True", the launcher listens on the port itself
	hosted       bool     // the launcher keeps the store; no variable
}

// launchers are in the order of preference. Another launcher may have started torchrun; the
// ranks are torchrun's then.
//
// Slurm's variables are those of the step, which srun sets in the tasks that it starts
// (https://slurm.schedmd.com/srun.html). A batch script has only the job's variables: rank 0
// and a number of tasks, none of which was started. SLURM_LAUNCH_NODE_IPADDR is the host
// that srun ran on, which may be a login node and not rank 0's.
//
// Open MPI's mpirun draws a random key, by which transports keep jobs apart. Hydra, MPICH's
// launcher, has no name for the job, but its processes on one host inherit one socket, to
// the launcher's proxy. MVAPICH's own launcher sets no PMI_RANK. For programs of IBM's MPI, jsrun sets Open MPI's
// variables as well.
var launchers = []launcher{
	{
		name: "tutti", rank: "TUTTI_RANK", size: "TUTTI_WORLD_SIZE",
		localRank: "TUTTI_LOCAL_RANK", localSize: "TUTTI_LOCAL_WORLD_SIZE", hosted: true,
	},
	{
		name: "torchrun", rank: "RANK", size: "WORLD_SIZE",
		localRank: "LOCAL_RANK", localSize: "LOCAL_WORLD_SIZE", job: []string{"TORCHELASTIC_RUN_ID"},
		launcherPort: "TORCHELASTIC_USE_AGENT_STORE",
	},
	{
		name: "openmpi", rank: "OMPI_COMM_WORLD_RANK", size: "OMPI_COMM_WORLD_SIZE",
		localRank: "OMPI_COMM_WORLD_LOCAL_RANK", localSize: "OMPI_COMM_WORLD_LOCAL_SIZE",
		job: []string{"PMIX_NAMESPACE"}, key: "OMPI_MCA_orte_precondition_transports",
	},
	{
		name: "slurm", rank: "SLURM_PROCID", size: "SLURM_STEP_NUM_TASKS",
		localRank: "SLURM_LOCALID", job: []string{"SLURM_JOB_ID", "SLURM_STEP_ID"},
		hosts: "SLURM_STEP_NODELIST", hostCount: "SLURM_STEP_NUM_NODES",
	},
	{
		name: "flux", rank: "FLUX_TASK_RANK", size: "FLUX_JOB_SIZE",
		localRank: "FLUX_TASK_LOCAL_ID", job: []string{"FLUX_JOB_ID"}, hostCount: "FLUX_JOB_NNODES",
	},
	{
		name: "pmi", rank: "PMI_RANK", size: "PMI_SIZE",
		localRank: "MPI_LOCALRANKID", localSize: "MPI_LOCALNRANKS", job: []string{"PMI_JOBID"},
		descriptor: "HYDI_CONTROL_FD",
	},
	{
		name: "mvapich", rank: "MV2_COMM_WORLD_RANK", size: "MV2_COMM_WORLD_SIZE",
		localRank: "MV2_COMM_WORLD_LOCAL_RANK", localSize: "MV2_COMM_WORLD_LOCAL_SIZE",
	},
	{
		name: "jsrun", rank: "JSM_NAMESPACE_RANK", size: "JSM_NAMESPACE_SIZE",
		localRank: "JSM_NAMESPACE_LOCAL_RANK", localSize: "JSM_NAMESPACE_LOCAL_SIZE",
	},
}

// FromEnv reads the variables of tutti launch, torchrun, Open MPI, Slurm, Flux, PMI launchers (MPICH, Intel MPI),
// MVAPICH and IBM's jsrun, in this order. Without any, the process is a job of one; so is a Slurm batch script that
// does not use srun. If other variables say that the process is one of several ranks, as those of PMIx and of Cray's
// launchers do without the size, the error is [ErrEnvironment]. getenv is os.Getenv or a stand-in.
//
// A process that tutti launch has started, directly or through wrappers, ends if all of the launcher's processes are
// killed at once (on Linux).
//
// The secret is TUTTI_SECRET, which must be the same in all processes, or the content of the file TUTTI_SECRET_FILE,
// or the random key of Open MPI's mpirun, together with the launcher's name for the job. If there is only the name
// (Slurm's job and step, torchrun's --rdzv-id), it is the secret, and Guessable.
//
// The ranks reach rank 0 at MASTER_ADDR:MASTER_PORT with any launcher. If torchrun itself
// uses that port, it is the next one. If no port is set, it follows from the secret. If no
// address is set, and all processes are on this host, it is the loopback address.
// With Slurm it is otherwise the first host of the step, on which rank 0 runs unless the
// user distributes the tasks arbitrarily.
//
// Rank 0 listens on all interfaces, because its host may resolve its own name to another
// address than other hosts do. Hosts outside the job can connect, too, and only the secret
// keeps them out. Without one, [Job.Connect] is an error unless the address is a loopback
// address, as a number or as localhost; rank 0 then listens on that alone.
func FromEnv(getenv func(string) string) (Job, error) {
	for _, l := range launchers {
		if getenv(l.rank) != "" && getenv(l.size) != "" {
			if l.hosted {
				keeper.Follow(getenv(env.Keeper))
			}
			return l.read(getenv)
		}
	}
	if err := checkAlone(getenv); err != nil {
		return Job{}, err
	}
	return Job{Launcher: "none", WorldSize: 1}, nil
}

// sign is a variable that may say that a process is one of several.
type sign struct {
	name  string // of the variable; "" if the launcher does not set it
	alone int    // the greatest value for a single process
}

// otherSigns are those of launchers that are not understood. The variables of PALS and PMIx do not have the size.
var otherSigns = []sign{
	{"PMIX_RANK", 0},
	{"PALS_RANKID", 0},
	{"PALS_LOCAL_RANKID", 0},
	{"PALS_LOCAL_SIZE", 1},
	{"ALPS_APP_PE", 0},
	{"PMI_LOCAL_RANK", 0},
	{"PMI_LOCAL_SIZE", 1},
}

// signs are the variables of a launcher that is understood, of which a container may have only a part. A batch script
// of Slurm has only those of a single process.
func (l launcher) signs() []sign {
	return []sign{{l.rank, 0}, {l.size, 1}, {l.localRank, 0}, {l.localSize, 1}}
}

// checkAlone returns an error if variables of any launcher say that this process is one of several: each would be a job
// of one.
func checkAlone(getenv func(string) string) error {
	all := slices.Clone(otherSigns)
	for _, l := range launchers {
		all = append(all, l.signs()...)
	}
	var names, values []string
	for _, s := range all {
		if s.name == "" {
			continue
		}
		value := getenv(s.name)
		if n, err := strconv.Atoi(value); err == nil && n > s.alone {
			names = append(names, s.name)
			values = append(values, s.name+"="+value)
		}
	}
	if names == nil {
		return nil
	}
	verb := "says"
	if len(names) > 1 {
		verb = "say"
	}
	return fmt.Errorf("rendezvous: %w: %s %s that this process is one of several, and its launcher has not set "+
		"all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: set them, start the process by tutti launch, "+
		"or unset %s", ErrEnvironment, strings.Join(values, ", "), verb, strings.Join(names, ", "))
}

// errorf is an error of the launcher's variables.
func (l launcher) errorf(format string, args ...any) error {
	return fmt.Errorf("rendezvous: %w of %s: %w", ErrEnvironment, env.LauncherTitle(l.name), fmt.Errorf(format, args...))
}

// read makes a Job of a launcher's variables.
func (l launcher) read(getenv func(string) string) (Job, error) {
	j := Job{Launcher: l.name, Hosted: l.hosted}
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
			return j, l.errorf("%s=%q is no count", v.name, text)
		}
		*v.to = n
	}
	if text := getenv(env.ConnectTimeout); text != "" {
		patience, err := waiting.ReadLimit(text)
		if err != nil {
			return j, fmt.Errorf("rendezvous: %w: %s=%q: %w", ErrEnvironment, env.ConnectTimeout, text, err)
		}
		j.Patience = patience
	}
	if j.Rank >= j.WorldSize {
		return j, l.errorf("%s=%d but %s=%d", l.rank, j.Rank, l.size, j.WorldSize)
	}
	host, err := l.host(getenv, j.WorldSize)
	if err != nil {
		return j, err
	}
	name := l.jobName(getenv, host)
	secret, err := l.secret(getenv)
	if err != nil {
		return j, err
	}
	if secret != "" || name != "" {
		j.Secret = []byte(strings.Join([]string{secret, l.name, name}, "\x00"))
		j.Guessable = secret == ""
	}
	port, err := l.listenPort(getenv, j.Secret)
	if err != nil && j.WorldSize > 1 {
		return j, err
	}
	j.Address = net.JoinHostPort(host, strconv.Itoa(port))
	if l.hosted {
		j.Name = getenv(env.Job)
	}
	if err := printable.CheckName(j.Name); err != nil {
		return j, l.errorf("%s: %w", env.Job, err)
	}
	if stores := getenv(env.Store); l.hosted && stores != "" {
		j.Stores = strings.Split(stores, ",")
	}
	for _, address := range j.Stores {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return j, l.errorf("%s: %w", env.Store, err)
		}
	}
	return j, nil
}

// secret is what only the processes of the job know, "" if there is nothing. One that a person may have thought of is
// stretched.
func (l launcher) secret(getenv func(string) string) (string, error) {
	if text := getenv(env.Secret); text != "" {
		secret := strings.TrimSpace(text) // as that of a file
		if len(secret) < shortestSecret {
			return "", l.errorf("%s has %d bytes, and a secret at least %d: export %s=$(%s)",
				env.Secret, len(secret), shortestSecret, env.Secret, secretCommand)
		}
		return stretch(secret)
	}
	if path := getenv(env.SecretFile); path != "" {
		secret, err := ReadSecret(path, false)
		if err != nil {
			return "", l.errorf("%s: %w", env.SecretFile, err)
		}
		return stretch(secret)
	}
	if l.key == "" {
		return "", nil
	}
	return getenv(l.key), nil
}

// jobName is the launcher's name for the job, "" if it has none.
func (l launcher) jobName(getenv func(string) string, host string) string {
	var parts []string
	for _, variable := range l.job {
		parts = append(parts, getenv(variable))
	}
	// "none" is the id that torchrun gives to every job by default.
	if len(parts) > 0 && parts[0] != "" && parts[0] != "none" {
		return strings.Join(parts, ".")
	}
	if l.descriptor != "" && isLoopback(host) {
		socket, _ := os.Readlink("/proc/self/fd/" + getenv(l.descriptor))
		if strings.HasPrefix(socket, "socket:[") {
			return socket
		}
	}
	return ""
}

// host is the host of rank 0.
func (l launcher) host(getenv func(string) string, size int) (string, error) {
	if host := getenv(addressVariable); host != "" {
		if bare, ok := strings.CutPrefix(host, "["); ok { // as IPv6 addresses are written before a port
			host = strings.TrimSuffix(bare, "]")
		}
		return host, nil
	}
	allLocal := l.localSize != "" && getenv(l.localSize) == strconv.Itoa(size)
	oneHost := l.hostCount != "" && getenv(l.hostCount) == "1"
	if size == 1 || allLocal || oneHost {
		return "127.0.0.1", nil
	}
	if l.hosts != "" {
		if host := firstHost(getenv(l.hosts)); host != "" {
			return host, nil
		}
	}
	return "", l.errorf("%s does not name the host of rank 0: set it, to 127.0.0.1 if that is this host",
		addressVariable)
}

// firstHost returns the first host of a list in Slurm's notation, such as node7
// of "node[7-9,12],login".
func firstHost(list string) string {
	var host strings.Builder
	for {
		end := strings.IndexAny(list, ",[")
		if end < 0 {
			return host.String() + list
		}
		host.WriteString(list[:end])
		if list[end] == ',' {
			return host.String()
		}
		numbers, tail, _ := strings.Cut(list[end+1:], "]")
		if end := strings.IndexAny(numbers, ",-"); end >= 0 {
			numbers = numbers[:end]
		}
		host.WriteString(numbers)
		list = tail
	}
}

// listenPort is the port of rank 0.
func (l launcher) listenPort(getenv func(string) string, secret []byte) (int, error) {
	text := getenv(portVariable)
	if text == "" {
		if len(secret) == 0 {
			return 0, l.errorf("it names no job; set %s to something random, the same for all processes, "+
				"or %s to a free port of rank 0's host", env.Secret, portVariable)
		}
		// Above the ports that systems hand out to outgoing connections
		// (32768 to 60999 on Linux) there are some thousand left.
		const (
			first = 61000
			count = 4000
		)
		sum := sha256.Sum256(append([]byte("port\x00"), secret...))
		return first + int(binary.BigEndian.Uint32(sum[:])%count), nil
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return 0, l.errorf("%s=%q is no port", portVariable, text)
	}
	if l.launcherPort != "" && getenv(l.launcherPort) == "True" {
		return portAfter(int(port), 1), nil
	}
	return int(port), nil
}

// portAfter is the n-th port after another; the first comes after the last.
func portAfter(port, n int) int { return (port-1+n)%65535 + 1 }

// isLoopback reports whether host names a loopback address.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// OneHost reports whether the ranks reach rank 0 at a loopback address, so that all of
// them are on one host.
func (j Job) OneHost() bool {
	host, _, err := net.SplitHostPort(j.Address)
	return err == nil && isLoopback(host)
}
