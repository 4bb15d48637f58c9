// Package tutti runs the ranks of a distributed program: as processes if a launcher started them, otherwise
// as goroutines of one process. So the same program runs on a laptop, under go test and on many machines.
//
//	err := tutti.Run(ctx, func(ctx context.Context, r tutti.Rank) error {
//		tensor, err := runtime.FromSlice(r.Runtime, []float32{1, 2, 3})
//		if err != nil {
//			return err
//		}
//		defer tensor.Free()
//		return distributed.AllReduce(ctx, r.Comm, tensor, comm.Avg)
//	})
//
// Package distributed and the packages below it reduce tensors, gradients and models. Package comm has the
// communicators, and package runtime the memory.
package tutti

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Rank is what one rank of a program works with. Run closes both when the body has returned.
type Rank struct {
	Comm    comm.Communicator // to all ranks
	Runtime runtime.Runtime   // of memory that Comm reaches: the host's, or a GPU's
}

// Names of backends, for [Config.Backend].
const (
	Local = "local" // goroutines of this process
	TCP   = "tcp"   // processes that any launcher started, on any machines
	MPI   = "mpi"   // processes that mpirun started, over its MPI library
	NCCL  = "nccl"  // a GPU for each rank: of this process, or one for each process that a launcher started
)

// defaultRanks is how many goroutines make a world where nobody says: enough to show what two ranks hide,
// and the same on every machine.
const defaultRanks = 4

// Config says which ranks [Config.Run] runs. The zero value leaves everything to the environment.
type Config struct {
	// Backend is [Local], [TCP], [MPI] or [NCCL]. "" is TUTTI_BACKEND, or without it what the launcher's
	// variables say: MPI under mpirun of Open MPI and MPICH, TCP under tutti launch, torchrun and Slurm, and
	// Local where no launcher started this process.
	Backend string
	// Ranks is the number of ranks of a world within this process. 0 means TUTTI_RANKS, or without it 4 goroutines, or
	// all GPUs. The launcher sets the number of processes.
	Ranks int
	// Network replaces the system's TCP between processes, for example by a tailnet or the program's relay. The
	// backend is then TCP, or Local if no launcher started this process.
	Network store.Network
}

// Run calls body for each rank of the program in this process: [Config.Run] of the zero Config.
func Run(ctx context.Context, body func(ctx context.Context, r Rank) error) error {
	return Config{}.Run(ctx, body)
}

// Run calls body for each rank of the program in this process, each in its own goroutine, and returns when
// all have returned, with their errors joined. The communicator has the decorators that TUTTI_CHECK and
// TUTTI_RECORD ask for ([instrument.Run]). If body fails or panics on one rank, the waits of the others end
// with [comm.ErrPeerFailed], in this process and in others: exit with a non-zero status, so that the launcher
// knows. ctx ends waits as well.
//
// Settings that contradict each other, such as a number of ranks for processes that a launcher counts, are
// [comm.ErrArgument]. If this machine lacks something, such as an MPI library or a GPU, the error is
// [comm.ErrUnavailable] and says what was looked for.
func (c Config) Run(ctx context.Context, body func(ctx context.Context, r Rank) error) error {
	job, incomplete := rendezvous.FromEnv(os.Getenv)
	err := c.readEnv(job)
	if incomplete != nil && c.Backend != MPI { // whose ranks find each other by themselves, without an address
		return incomplete
	}
	if err != nil {
		return err
	}
	onRank := func(ctx context.Context, world comm.Communicator, rt runtime.Runtime) error {
		return instrument.Run(ctx, rt, world, func(ctx context.Context, world comm.Communicator) error {
			return body(ctx, Rank{Comm: world, Runtime: rt})
		})
	}
	onHost := func(ctx context.Context, world comm.Communicator) error {
		if job.Launcher == "none" && c.Backend != Local && c.Ranks == 0 && world.WorldSize() == 1 {
			const format = "tutti: one rank over %s, as no launcher started this process: " +
				"tutti launch -n 4 PROGRAM starts four; " +
				"without a launcher, each process needs RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
			slog.Warn(fmt.Sprintf(format, c.Backend))
		}
		rt := cpu.New()
		err := onRank(ctx, world, rt)
		return cmp.Or(err, rt.Close()) // what a body that failed has not freed is no news
	}
	switch c.Backend {
	case Local:
		return local.Run(ctx, c.Ranks, onHost)
	case TCP:
		return tcp.Config{Network: c.Network}.Run(ctx, onHost)
	case MPI:
		return mpi.Run(ctx, onHost)
	default:
		return nccl.Run(ctx, c.Ranks, func(ctx context.Context, world *nccl.Comm) error {
			return onRank(ctx, world, world.Runtime())
		})
	}
}

// readEnv sets what is not set by the environment, and checks the result.
func (c *Config) readEnv(job rendezvous.Job) error {
	if c.Backend == "" {
		c.Backend = os.Getenv(env.Backend)
	}
	if c.Backend == "" {
		c.Backend = backendOf(job)
		if c.Network != nil && c.Backend == MPI {
			c.Backend = TCP
		}
	}
	if c.Network != nil && (c.Backend == MPI || c.Backend == NCCL) {
		return fmt.Errorf("%w: %s has connections of its own and uses no Network; tcp does", comm.ErrArgument, c.Backend)
	}
	if c.Ranks == 0 {
		text := os.Getenv(env.Ranks)
		ranks, err := strconv.Atoi(text)
		if text != "" && (err != nil || ranks < 1) {
			return fmt.Errorf("%w: %s is %q, want a number of ranks, such as 4", comm.ErrArgument, env.Ranks, text)
		}
		c.Ranks = ranks
	}
	if c.Ranks < 0 {
		return fmt.Errorf("%w: %d ranks", comm.ErrArgument, c.Ranks)
	}
	if members, _ := strconv.Atoi(os.Getenv(env.Min)); members > job.WorldSize {
		const format = "%w: an elastic job of %d ranks or more (--min), and tutti.Run has %d: elastic.Join waits for others"
		return fmt.Errorf(format, comm.ErrArgument, members, job.WorldSize)
	}
	switch c.Backend {
	case Local:
		if job.WorldSize > 1 {
			return fmt.Errorf(
				"%w: %s started %d processes, and with backend local each would be its own world; "+
					"tcp and mpi make one of all",
				comm.ErrArgument,
				env.LauncherTitle(job.Launcher),
				job.WorldSize,
			)
		}
		if c.Ranks == 0 {
			c.Ranks = defaultRanks
		}
		return nil
	case TCP, MPI, NCCL:
		processes := c.Backend != NCCL || job.WorldSize > 1
		if processes && c.Ranks != 0 && c.Ranks != job.WorldSize {
			return fmt.Errorf("%w: %d ranks over %s, but there is a process for each of %d; the launcher decides",
				comm.ErrArgument, c.Ranks, c.Backend, job.WorldSize)
		}
		return nil
	}
	return fmt.Errorf("%w: unknown backend %q: want local, tcp, mpi or nccl", comm.ErrArgument, c.Backend)
}

// backendOf returns the backend for the processes of a launcher.
func backendOf(job rendezvous.Job) string {
	switch job.Launcher {
	case "none":
		return Local
	case "openmpi", "pmi", "mvapich":
		return MPI
	}
	return TCP
}
