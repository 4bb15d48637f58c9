package backend

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	goruntime "runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func TestRanksWithoutAGPUAreRefused(t *testing.T) {
	alone := rendezvous.Job{Launcher: "none", WorldSize: 1}
	third := rendezvous.Job{Launcher: "openmpi", Rank: 6, WorldSize: 8, LocalRank: 2}
	for want, c := range map[string]struct {
		job         rendezvous.Job
		ranks, gpus int
	}{
		"nccl: --ranks 5, but a rank needs a GPU of its own and this process sees 4 GPUs": {alone, 5, 4},
		"nccl: --ranks 2, but a rank needs a GPU of its own and this process sees 1 GPU":  {alone, 2, 1},
		"nccl: --ranks 2 but mpirun started 8; leave --ranks out, or use mpirun -n 2":     {third, 2, 4},
	} {
		var refused *OptionError
		require.ErrorAs(t, checkGPUs(c.job, c.ranks, c.gpus), &refused)
		assert.EqualError(t, refused, want)
	}
	for _, ranks := range []int{0, 4} {
		assert.NoError(t, checkGPUs(alone, ranks, 4))
	}
	for _, ranks := range []int{0, 8} {
		assert.NoError(t, checkGPUs(third, ranks, 3))
	}
}

func TestLaunchersAreCalledByTheirNames(t *testing.T) {
	for launcher, want := range map[string]string{
		"torchrun": "--ranks 2 but torchrun started 4; leave --ranks out, or use torchrun --nproc-per-node 2",
		"slurm":    "--ranks 2 but srun started 4; leave --ranks out, or use srun -n 2",
		"pmi":      "--ranks 2 but mpirun started 4; leave --ranks out, or use mpirun -n 2",
		"jsrun":    "--ranks 2 but jsrun started 4; leave --ranks out, or use jsrun -n 2",
	} {
		assert.ErrorContains(t, checkRanks("nccl", launcher, 2, 4), want)
		assert.NoError(t, checkRanks("nccl", launcher, 0, 4))
		assert.NoError(t, checkRanks("nccl", launcher, 4, 4))
	}
}

// Users know MPICH and Open MPI but not the prefixes of their launchers' variables.
func TestProbeNamesTheLauncher(t *testing.T) {
	for _, name := range []string{"TUTTI_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "FLUX_TASK_RANK"} {
		t.Setenv(name, "")
	}
	t.Setenv("PMI_RANK", "0")
	t.Setenv("PMI_SIZE", "2")
	t.Setenv("MPI_LOCALNRANKS", "2")
	t.Setenv("MASTER_PORT", "29400")
	text, err := probeTCP(t.Context())
	require.NoError(t, err)
	assert.Contains(t, text, "rank 0 of 2, started by MPICH's mpirun (PMI)")
}

func TestProcessesWithoutACommonWorldAreNoted(t *testing.T) {
	pair := rendezvous.Job{Launcher: "openmpi", WorldSize: 2}
	assert.Equal(t, "mpirun started 2 processes, and with --backend noop each of them is a world of its own; --backend mpi, tcp and nccl make one of all",
		separateWorlds(noopBackend, pair))
	assert.Contains(t, separateWorlds(localBackend, rendezvous.Job{Launcher: "slurm", WorldSize: 3}), "srun started 3")
	assert.Empty(t, separateWorlds(localBackend, rendezvous.Job{Launcher: "openmpi", WorldSize: 2, Rank: 1}), "said by the first")
	assert.Empty(t, separateWorlds(localBackend, rendezvous.Job{Launcher: "none", WorldSize: 1}))
	assert.Empty(t, separateWorlds(mpiBackend, pair))
	assert.Empty(t, separateWorlds(ncclBackend, pair))

	assert.Contains(t, alone("mpirun -n", rendezvous.Job{Launcher: "none", WorldSize: 1}), "mpirun -n 4 tutti")
	assert.Empty(t, alone("mpirun -n", rendezvous.Job{Launcher: "openmpi", WorldSize: 1}), "which was asked for one")

	t.Setenv("OMPI_COMM_WORLD_SIZE", "2")
	t.Setenv("OMPI_COMM_WORLD_RANK", "0")
	assert.NotEmpty(t, SeparateWorlds(localBackend))
}

// A process of an unknown launcher does not run as a separate world without a note.
func TestProcessesOfUnknownLaunchersAreNoted(t *testing.T) {
	assert.Empty(t, SeparateWorlds(localBackend))
	t.Setenv("ALPS_APP_PE", "1")
	const want = "with --backend local this process is a world of its own: rendezvous: launcher's environment: ALPS_APP_PE=1 says"
	assert.Contains(t, SeparateWorlds(localBackend), want)
	assert.Empty(t, SeparateWorlds(tcpBackend), "which refuses it")
}

// Without a name, the processes of a job make one world, except for those of mpirun.
func TestDefault(t *testing.T) {
	for _, c := range []struct{ rank, size, count, want string }{
		{"TUTTI_RANK", "TUTTI_WORLD_SIZE", "1", "local"},
		{"TUTTI_RANK", "TUTTI_WORLD_SIZE", "2", "tcp"},
		{"RANK", "WORLD_SIZE", "2", "tcp"},
		{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "2", "tcp"},
		{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "2", "local"},
		{"PMI_RANK", "PMI_SIZE", "2", "local"},
		{"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "2", "local"},
		{"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "2", "tcp"},
	} {
		t.Run(c.rank+c.count, func(t *testing.T) {
			t.Setenv(c.rank, "0")
			t.Setenv(c.size, c.count)
			assert.Equal(t, c.want, Default())
		})
	}
	assert.Equal(t, "local", Default())
}

func TestUnsupportedIsTheUsersMistake(t *testing.T) {
	cause := &comm.OpError{Backend: "nccl", Op: "allreduce", Rank: 3, Err: fmt.Errorf("%w: NCCL does not reduce i16", comm.ErrUnsupported)}
	var refused *OptionError
	require.ErrorAs(t, Unsupported("nccl", cause), &refused)
	assert.EqualError(t, refused, "nccl: allreduce: unsupported: NCCL does not reduce i16")
	require.ErrorAs(t, Unsupported("x", comm.ErrUnsupported), &refused)
	assert.EqualError(t, refused, "x: unsupported")
	assert.Equal(t, comm.ErrBroken, Unsupported("x", comm.ErrBroken))
}

func TestDriverVersion(t *testing.T) {
	for want, files := range map[string]map[string]string{
		"580.95.05": {driverFiles[0]: "580.95.05\n"},
		"575.57.08": {driverFiles[1]: "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (root@x)\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)"},
		"":          {driverFiles[0]: "gcc 12.2.0"},
	} {
		assert.Equal(t, want, driverVersion(func(name string) ([]byte, error) {
			if text, ok := files[name]; ok {
				return []byte(text), nil
			}
			return nil, fs.ErrNotExist
		}))
	}
}

func TestWherePeerMemoryWorks(t *testing.T) {
	reach := func(n int, blind ...int) GPUs {
		g := GPUs{}
		for i := range n {
			d := cuda.DeviceInfo{Index: i, Peers: make([]bool, n)}
			for k := range n {
				d.Peers[k] = k != i && !slices.Contains(blind, i)
			}
			g.Devices = append(g.Devices, d)
		}
		return g
	}
	if goruntime.GOOS != "linux" {
		assert.ErrorContains(t, reach(2).PeerMemory(), "on Linux only")
		return
	}
	assert.NoError(t, reach(2).PeerMemory())
	assert.NoError(t, reach(8).PeerMemory())
	assert.EqualError(t, reach(0).PeerMemory(), "there are no GPUs")
	assert.EqualError(t, reach(1).PeerMemory(), "there is one GPU only")
	assert.EqualError(t, reach(9).PeerMemory(), "there are 9 GPUs: use up to 8 of them")
	assert.EqualError(t, reach(4, 2).PeerMemory(), "GPU 2 does not reach the memory of GPU 0")
}

func TestWhatIsMissingIsSaid(t *testing.T) {
	g := LookForGPUs()
	line, err := json.Marshal(g)
	require.NoError(t, err)
	var object map[string]any
	require.NoError(t, json.Unmarshal(line, &object))
	for _, key := range []string{"driver", "cuda", "nccl", "nccl_library", "gpu_unavailable", "nccl_unavailable", "p2p_unavailable"} {
		assert.IsType(t, "", object[key], key)
	}
	require.IsType(t, []any{}, object["gpus"], "never null")
	assert.Equal(t, len(g.Devices) == 0, g.NoGPU != "")
	assert.Equal(t, g.NCCL == "", g.NoNCCL != "")
	if g.NoGPU != "" {
		assert.ErrorIs(t, g.Usable(), comm.ErrUnavailable)
		assert.ErrorContains(t, g.Usable(), g.NoGPU)
	}
	cause := errors.New("no driver")
	assert.ErrorIs(t, GPUs{err: cause}.Usable(), cause)
	assert.NoError(t, GPUs{}.Usable())
}
