// Package env names the environment variables that the library, the command and the adapters read or set, in one
// place. A variable that only one package reads and nothing else sets, such as TUTTI_CUDA_LIB, is in that package.
package env

// The ranks that tutti.Run runs, unless the program's Config says otherwise.
const (
	Backend = "TUTTI_BACKEND" // local, tcp, mpi or nccl
	Ranks   = "TUTTI_RANKS"   // number of goroutines that are ranks
)

// Variables of package instrument.
const (
	Check     = "TUTTI_CHECK"      // 1, or a time limit for waiting ranks, such as 10s
	Record    = "TUTTI_RECORD"     // number of calls that a rank keeps, such as 1000
	RecordDir = "TUTTI_RECORD_DIR" // directory of the records; by default the working directory
)

// The secret of a job, for package rendezvous and the command: the secret itself, or a file with it that only its
// owner may read.
const (
	Secret     = "TUTTI_SECRET"
	SecretFile = "TUTTI_SECRET_FILE"
)

// Variables that tutti launch sets for its ranks.
const (
	Store = "TUTTI_STORE" // with --join: addresses of the job's store, comma-separated
	Job   = "TUTTI_JOB"   // with --join: name of the job in a store of several jobs
	Run   = "TUTTI_RUN"   // unique name of this run of the ranks
	Min   = "TUTTI_MIN"   // with --min: bounds of an elastic job
	Max   = "TUTTI_MAX"

	Keeper = "TUTTI_KEEPER" // on Linux: the process whose descendants are the rank's processes
)

// ConnectTimeout is how long a process waits for others of its job if the program sets no deadline, such as 30m.
const ConnectTimeout = "TUTTI_CONNECT_TIMEOUT"

// Fields of tcp.Config, for its ReadEnv.
const (
	TCPListen      = "TUTTI_TCP_LISTEN"      // Listen; ranks of a machine take this port and the next ones
	TCPAdvertise   = "TUTTI_TCP_ADVERTISE"   // Advertise, comma-separated
	TCPConnections = "TUTTI_TCP_CONNECTIONS" // Connections
	TCPSilence     = "TUTTI_TCP_SILENCE"     // Silence, such as 30s
)

// Variables of package mpi; its documentation has the values.
const (
	MPILibrary     = "TUTTI_MPI_LIB"         // the library, instead of the first one found
	MPICollectives = "TUTTI_MPI_COLLECTIVES" // empty, or "native"
	MPIShared      = "TUTTI_MPI_SHARED"      // empty, or "off"
)

// Variables of package p2p.
const P2POrder = "TUTTI_P2P_ORDER" // empty, or "fixed"
