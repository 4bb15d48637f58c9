package rendezvous

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func environment(pairs ...string) func(string) string {
	m := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return func(name string) string { return m[name] }
}

func TestFromEnv(t *testing.T) {
	const key = "985b86ee08a9229a-6816565fdf403591"
	const long = "a secret of more than 32 bytes, of this test"
	for _, c := range []struct {
		name string
		env  []string
		want Job
	}{
		{"alone", nil, Job{Launcher: "none", WorldSize: 1}},
		{"torchrun", []string{"RANK", "3", "WORLD_SIZE", "8", "LOCAL_RANK", "1", "MASTER_ADDR", "node7", "MASTER_PORT", "29500", "TUTTI_SECRET", long},
			Job{"torchrun", 3, 8, 1, "node7:29500", []byte(long + "\x00torchrun\x00"), false, false, nil, "", 0, nil}},
		{"torchrun serving its port itself", []string{"RANK", "0", "WORLD_SIZE", "2", "LOCAL_RANK", "0", "MASTER_ADDR", "node7", "MASTER_PORT", "29500",
			"TORCHELASTIC_USE_AGENT_STORE", "True", "TORCHELASTIC_RUN_ID", "r1"},
			Job{"torchrun", 0, 2, 0, "node7:29501", []byte("\x00torchrun\x00r1"), true, false, nil, "", 0, nil}},
		{"torchrun without an id of the job", []string{"RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "node7", "MASTER_PORT", "65535",
			"TORCHELASTIC_USE_AGENT_STORE", "True", "TORCHELASTIC_RUN_ID", "none"},
			Job{"torchrun", 0, 2, 0, "node7:1", nil, false, false, nil, "", 0, nil}},
		{"tutti launch in a job of Slurm", []string{"TUTTI_RANK", "1", "TUTTI_WORLD_SIZE", "4", "TUTTI_LOCAL_RANK", "1", "MASTER_ADDR", "10.0.0.1", "MASTER_PORT", "29400",
			"TUTTI_SECRET", long, "SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "2"},
			Job{"tutti", 1, 4, 1, "10.0.0.1:29400", []byte(long + "\x00tutti\x00"), false, true, nil, "", 0, nil}},
		{"a store that others serve", []string{"TUTTI_RANK", "1", "TUTTI_WORLD_SIZE", "4", "TUTTI_LOCAL_RANK", "1", "MASTER_ADDR", "10.0.0.1", "MASTER_PORT", "29400",
			"TUTTI_SECRET", long, "TUTTI_STORE", "a:1,[::1]:2", "TUTTI_JOB", "nightly", "TUTTI_CONNECT_TIMEOUT", "90s"},
			Job{"tutti", 1, 4, 1, "10.0.0.1:29400", []byte(long + "\x00tutti\x00"), false, true, []string{"a:1", "[::1]:2"}, "nightly", 90 * time.Second, nil}},
		{"a store that torchrun knows nothing of", []string{"RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "4000", "TUTTI_STORE", "a:1"},
			Job{"torchrun", 0, 2, 0, "h:4000", nil, false, false, nil, "", 0, nil}},
		{"an address as in a URL", []string{"RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "[::1]", "MASTER_PORT", "4000"},
			Job{"torchrun", 0, 2, 0, "[::1]:4000", nil, false, false, nil, "", 0, nil}},
		{"an IPv6 address", []string{"RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "2001:db8::1", "MASTER_PORT", "4000"},
			Job{"torchrun", 0, 2, 0, "[2001:db8::1]:4000", nil, false, false, nil, "", 0, nil}},
		{"openmpi on one host", []string{"OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2", "OMPI_COMM_WORLD_LOCAL_RANK", "1",
			"OMPI_COMM_WORLD_LOCAL_SIZE", "2", "MASTER_PORT", "4000", "PMIX_NAMESPACE", "n", "OMPI_MCA_orte_precondition_transports", key},
			Job{"openmpi", 1, 2, 1, "127.0.0.1:4000", []byte(key + "\x00openmpi\x00n"), false, false, nil, "", 0, nil}},
		{"the user's secret comes first", []string{"OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "4000",
			"PMIX_NAMESPACE", "n", "OMPI_MCA_orte_precondition_transports", key, "TUTTI_SECRET", long},
			Job{"openmpi", 1, 2, 0, "h:4000", []byte(long + "\x00openmpi\x00n"), false, false, nil, "", 0, nil}},
		// srun run on the login node 10.1.2.3, in a job of more tasks than the step.
		{"slurm", []string{"SLURM_PROCID", "5", "SLURM_STEP_NUM_TASKS", "6", "SLURM_NTASKS", "16", "SLURM_LOCALID", "1",
			"SLURM_LAUNCH_NODE_IPADDR", "10.1.2.3", "SLURM_STEP_NUM_NODES", "3", "SLURM_STEP_NODELIST", "gpu[07-08,12]",
			"MASTER_PORT", "4000", "SLURM_JOB_ID", "77", "SLURM_STEP_ID", "0"},
			Job{"slurm", 5, 6, 1, "gpu07:4000", []byte("\x00slurm\x0077.0"), true, false, nil, "", 0, nil}},
		{"slurm with an address", []string{"SLURM_PROCID", "5", "SLURM_STEP_NUM_TASKS", "6", "SLURM_LOCALID", "0",
			"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1", "SLURM_STEP_NUM_NODES", "3", "SLURM_STEP_NODELIST", "gpu[07-09]",
			"MASTER_ADDR", "node7", "MASTER_PORT", "4000", "SLURM_JOB_ID", "77", "SLURM_STEP_ID", "1"},
			Job{"slurm", 5, 6, 0, "node7:4000", []byte("\x00slurm\x0077.1"), true, false, nil, "", 0, nil}},
		{"slurm on one host", []string{"SLURM_PROCID", "1", "SLURM_STEP_NUM_TASKS", "2", "SLURM_LOCALID", "1",
			"SLURM_STEP_NUM_NODES", "1", "SLURM_STEP_NODELIST", "gpu07", "MASTER_PORT", "4000", "SLURM_JOB_ID", "77", "SLURM_STEP_ID", "0"},
			Job{"slurm", 1, 2, 1, "127.0.0.1:4000", []byte("\x00slurm\x0077.0"), true, false, nil, "", 0, nil}},
		{"a step of one task", []string{"SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "1", "SLURM_NTASKS", "16", "SLURM_LOCALID", "0",
			"SLURM_STEP_NUM_NODES", "1", "MASTER_PORT", "4000", "SLURM_JOB_ID", "77", "SLURM_STEP_ID", "0"},
			Job{"slurm", 0, 1, 0, "127.0.0.1:4000", []byte("\x00slurm\x0077.0"), true, false, nil, "", 0, nil}},
		{"slurm's batch script", []string{"SLURM_PROCID", "0", "SLURM_NTASKS", "16", "SLURM_LOCALID", "0", "SLURM_JOB_ID", "77"},
			Job{Launcher: "none", WorldSize: 1}},
		{"flux", []string{"FLUX_TASK_RANK", "1", "FLUX_JOB_SIZE", "2", "FLUX_TASK_LOCAL_ID", "1", "FLUX_JOB_NNODES", "1", "FLUX_JOB_ID", "f1", "MASTER_PORT", "4000"},
			Job{"flux", 1, 2, 1, "127.0.0.1:4000", []byte("\x00flux\x00f1"), true, false, nil, "", 0, nil}},
		{"pmix, one process", []string{"PMIX_RANK", "0", "PMIX_NAMESPACE", "n"}, Job{Launcher: "none", WorldSize: 1}},
		{"pmi", []string{"PMI_RANK", "0", "PMI_SIZE", "2", "MPI_LOCALRANKID", "0", "MPI_LOCALNRANKS", "2", "MASTER_PORT", "4000"},
			Job{"pmi", 0, 2, 0, "127.0.0.1:4000", nil, false, false, nil, "", 0, nil}},
		{"mvapich", []string{"MV2_COMM_WORLD_RANK", "1", "MV2_COMM_WORLD_SIZE", "2", "MV2_COMM_WORLD_LOCAL_RANK", "1", "MV2_COMM_WORLD_LOCAL_SIZE", "2",
			"MASTER_PORT", "4000"}, Job{"mvapich", 1, 2, 1, "127.0.0.1:4000", nil, false, false, nil, "", 0, nil}},
		{"mvapich under hydra", []string{"MV2_COMM_WORLD_RANK", "1", "MV2_COMM_WORLD_SIZE", "2", "PMI_RANK", "1", "PMI_SIZE", "2", "MPI_LOCALRANKID", "1",
			"MPI_LOCALNRANKS", "2", "MASTER_PORT", "4000"}, Job{"pmi", 1, 2, 1, "127.0.0.1:4000", nil, false, false, nil, "", 0, nil}},
		{"jsrun", []string{"JSM_NAMESPACE_RANK", "3", "JSM_NAMESPACE_SIZE", "4", "JSM_NAMESPACE_LOCAL_RANK", "1", "JSM_NAMESPACE_LOCAL_SIZE", "2",
			"MASTER_ADDR", "h", "MASTER_PORT", "4000", "TUTTI_SECRET", long},
			Job{"jsrun", 3, 4, 1, "h:4000", []byte(long + "\x00jsrun\x00"), false, false, nil, "", 0, nil}},
		{"jsrun with Open MPI's relative", []string{"JSM_NAMESPACE_RANK", "1", "JSM_NAMESPACE_SIZE", "2", "OMPI_COMM_WORLD_RANK", "1",
			"OMPI_COMM_WORLD_SIZE", "2", "OMPI_COMM_WORLD_LOCAL_SIZE", "2", "MASTER_PORT", "4000"},
			Job{"openmpi", 1, 2, 0, "127.0.0.1:4000", nil, false, false, nil, "", 0, nil}},
		{"one process that nothing is known of", []string{"PMI_RANK", "0", "PMI_SIZE", "1"}, Job{"pmi", 0, 1, 0, "127.0.0.1:0", nil, false, false, nil, "", 0, nil}},
		{"torchrun inside slurm", []string{"RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1", "SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "1"},
			Job{"torchrun", 1, 2, 0, "h:1", nil, false, false, nil, "", 0, nil}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := FromEnv(environment(c.env...))
			require.NoError(t, err)
			assert.Equal(t, c.want, got)
		})
	}
}

func TestFromEnvRefusesNonsense(t *testing.T) {
	for _, c := range []struct {
		name, says string
		env        []string
	}{
		{"rank that is no number", `RANK="x"`, []string{"RANK", "x", "WORLD_SIZE", "2"}},
		{"negative rank", `RANK="-1"`, []string{"RANK", "-1", "WORLD_SIZE", "2"}},
		{"rank beyond the size", "WORLD_SIZE=2", []string{"RANK", "2", "WORLD_SIZE", "2"}},
		{"port that is none", `MASTER_PORT="70000"`, []string{"RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "70000"}},
		{"a job's name that nobody prints", `TUTTI_JOB`, []string{"TUTTI_RANK", "1", "TUTTI_WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1", "TUTTI_JOB", "a\tb"}},
		{"a store without a port", `TUTTI_STORE`, []string{"TUTTI_RANK", "1", "TUTTI_WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1", "TUTTI_STORE", "a:1,b"}},
		{"port zero", `MASTER_PORT="0"`, []string{"RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "0"}},
		{"slurm's hosts without names", "MASTER_ADDR", []string{"SLURM_PROCID", "1", "SLURM_STEP_NUM_TASKS", "4", "SLURM_STEP_NUM_NODES", "2"}},
		{"several hosts without an address", "MASTER_ADDR", []string{"OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
		{"a rank of pmix", "PMIX_RANK=1 says that this process is one of several", []string{"PMIX_RANK", "1", "PMIX_NAMESPACE", "n"}},
		{"a rank of pals", "PALS_RANKID=3 says", []string{"PALS_RANKID", "3"}},
		{"a rank without a size", "RANK=1 says", []string{"RANK", "1"}},
		{"a size without a rank", "WORLD_SIZE=2 says", []string{"WORLD_SIZE", "2"}},
		{"a task of slurm without a size", "SLURM_PROCID=1 says", []string{"SLURM_PROCID", "1", "SLURM_NTASKS", "4"}},
		{"a step of slurm without a rank", "SLURM_STEP_NUM_TASKS=2 says", []string{"SLURM_STEP_NUM_TASKS", "2"}},
		{"a rank of Open MPI without a size", "OMPI_COMM_WORLD_RANK=1 says", []string{"OMPI_COMM_WORLD_RANK", "1"}},
		{"a size of Open MPI without a rank", "OMPI_COMM_WORLD_SIZE=2 says", []string{"OMPI_COMM_WORLD_SIZE", "2"}},
		{"a rank of tutti launch without a size", "TUTTI_RANK=1 says", []string{"TUTTI_RANK", "1"}},
		{"a size of tutti launch without a rank", "TUTTI_WORLD_SIZE=2 says", []string{"TUTTI_WORLD_SIZE", "2"}},
		{"a task of flux without a size", "FLUX_TASK_RANK=1 says", []string{"FLUX_TASK_RANK", "1"}},
		{"a rank of mvapich without a size", "MV2_COMM_WORLD_RANK=1 says", []string{"MV2_COMM_WORLD_RANK", "1"}},
		{"a size of mvapich without a rank", "MV2_COMM_WORLD_SIZE=2 says", []string{"MV2_COMM_WORLD_SIZE", "2"}},
		{"mvapich on hosts without an address", "MASTER_ADDR", []string{"MV2_COMM_WORLD_RANK", "1", "MV2_COMM_WORLD_SIZE", "4", "MV2_COMM_WORLD_LOCAL_SIZE", "2"}},
		{"a rank of jsrun without a size", "JSM_NAMESPACE_RANK=1 says", []string{"JSM_NAMESPACE_RANK", "1"}},
		{"a size of jsrun without a rank", "JSM_NAMESPACE_SIZE=2 says", []string{"JSM_NAMESPACE_SIZE", "2"}},
		{"jsrun on hosts without an address", "MASTER_ADDR", []string{"JSM_NAMESPACE_RANK", "1", "JSM_NAMESPACE_SIZE", "4", "JSM_NAMESPACE_LOCAL_SIZE", "2"}},
		{"a rank of aprun", "ALPS_APP_PE=1 says that this process is one of several", []string{"ALPS_APP_PE", "1"}},
		{"one host, perhaps", "127.0.0.1 if that is this host", []string{"RANK", "0", "WORLD_SIZE", "2"}},
		{"flux on hosts without an address", "MASTER_ADDR", []string{"FLUX_TASK_RANK", "1", "FLUX_JOB_SIZE", "2", "FLUX_JOB_NNODES", "2"}},
		{"neither a name nor a port", "TUTTI_SECRET", []string{"PMI_RANK", "0", "PMI_SIZE", "2", "MPI_LOCALRANKID", "0", "MPI_LOCALNRANKS", "2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := FromEnv(environment(c.env...))
			assert.ErrorIs(t, err, ErrEnvironment)
			assert.ErrorContains(t, err, c.says)
		})
	}
}

// Whatever part of a launcher's variables says that there are several processes, each is refused, with all of these
// variables: none silently becomes a world of one. Variables that only one process has are no reason to refuse it.
func TestPartsOfALaunchersVariables(t *testing.T) {
	for launcher, v := range map[string]struct{ rank, size, localRank, localSize string }{
		"tutti launch": {"TUTTI_RANK", "TUTTI_WORLD_SIZE", "TUTTI_LOCAL_RANK", "TUTTI_LOCAL_WORLD_SIZE"},
		"torchrun":     {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
		"Open MPI": {
			"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
		},
		"Slurm":       {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""},
		"Flux":        {"FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""},
		"Hydra":       {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
		"Cray's PMI":  {"PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"},
		"MVAPICH":     {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},
		"jsrun":       {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"},
		"PALS":        {"PALS_RANKID", "", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"},
		"ALPS":        {"ALPS_APP_PE", "", "", ""},
		"PMIx":        {"PMIX_RANK", "", "", ""},
		"two of them": {"PALS_RANKID", "", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_SIZE"},
	} {
		names := []string{v.rank, v.size, v.localRank, v.localSize}
		for _, values := range [][]string{{"0", "1", "0", "1"}, {"0", "4", "0", "4"}, {"3", "4", "1", "2"}} {
			for parts := range 1 << len(names) {
				var env, signs []string
				for i, name := range names {
					if parts&(1<<i) == 0 || name == "" {
						continue
					}
					env = append(env, name, values[i])
					isSize := i%2 == 1
					if n, _ := strconv.Atoi(values[i]); isSize && n > 1 || !isSize && n > 0 {
						signs = append(signs, name)
					}
				}
				if slices.Contains(env, v.size) && v.size != "" && slices.Contains(env, v.rank) {
					continue // all that a job needs, but the address
				}
				t.Run(fmt.Sprint(launcher, env), func(t *testing.T) {
					job, err := FromEnv(environment(env...))
					if signs == nil {
						require.NoError(t, err)
						assert.Equal(t, Job{Launcher: "none", WorldSize: 1}, job)
						return
					}
					require.ErrorIs(t, err, ErrEnvironment)
					for _, name := range signs {
						assert.Contains(t, err.Error(), name+"="+env[slices.Index(env, name)+1])
					}
					_, remedy, _ := strings.Cut(err.Error(), "or unset ")
					assert.ElementsMatch(t, signs, strings.Split(remedy, ", "))
				})
			}
		}
	}
}

// Hydra names no job, but its processes on one host inherit a socket.
func TestAJobIsKnownByAnInheritedSocket(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("descriptors have names on Linux")
	}
	read := func(descriptor uintptr, rank, addr string) (Job, error) {
		return FromEnv(environment("PMI_RANK", rank, "PMI_SIZE", "2", "MPI_LOCALNRANKS", "2",
			"HYDI_CONTROL_FD", fmt.Sprint(descriptor), "MASTER_ADDR", addr))
	}
	sockets := make([]uintptr, 2)
	for i := range sockets {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close() //nolint:errcheck
		raw, err := l.(*net.TCPListener).SyscallConn()
		require.NoError(t, err)
		require.NoError(t, raw.Control(func(fd uintptr) { sockets[i] = fd }))
	}
	first, err := read(sockets[0], "0", "")
	require.NoError(t, err)
	second, err := read(sockets[0], "1", "")
	require.NoError(t, err)
	other, err := read(sockets[1], "0", "")
	require.NoError(t, err)
	assert.Equal(t, first.Secret, second.Secret)
	assert.Equal(t, first.Address, second.Address)
	assert.NotEqual(t, first.Secret, other.Secret)
	_, err = read(sockets[0], "0", "node7") // says nothing about other hosts
	assert.ErrorIs(t, err, ErrEnvironment)
	file, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer file.Close() //nolint:errcheck
	_, err = read(file.Fd(), "0", "")
	assert.ErrorIs(t, err, ErrEnvironment)
}

func TestFirstHost(t *testing.T) {
	for list, want := range map[string]string{
		"":                      "",
		"node7":                 "node7",
		"node7,node9":           "node7",
		"node[7-9,12]":          "node7",
		"node[007,012-014]":     "node007",
		"node[7]-ib":            "node7-ib",
		"login,node[7-9]":       "login",
		"rack[2-3]node[10-11],": "rack2node10",
		"broken[4":              "broken4",
	} {
		assert.Equal(t, want, firstHost(list), "%q", list)
	}
}

// The port that follows from the secret is the same for all ranks of a job, and
// another for other jobs (with these pairs at least).
func TestPortFollowsTheJob(t *testing.T) {
	address := func(job, rank, secret string) string {
		j, err := FromEnv(environment("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", "2", "SLURM_JOB_ID", job, "MASTER_ADDR", "h", "TUTTI_SECRET", secret))
		require.NoError(t, err)
		return j.Address
	}
	assert.Equal(t, address("1", "0", ""), address("1", "1", ""))
	assert.NotEqual(t, address("1", "0", ""), address("2", "0", ""))
	assert.NotEqual(t, address("1", "0", ""), address("1", "0", "a secret of more than 32 bytes, of this test"))
}
