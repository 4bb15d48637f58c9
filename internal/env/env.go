// Package env names the environment variables that the library, the command and the adapters read or set, in one place.
// Variables that only one package reads and no other package sets, such as TUTTI_CUDA_LIB, stand there.
package env

// Which ranks tutti.Run runs, where a program's Config does not say.
const (
	Backend = "TUTTI_BACKEND" // local, tcp, mpi or nccl
	Ranks   = "TUTTI_RANKS"   // how many goroutines are ranks
)

// Variables of package instrument.
const (
	Check     = "TUTTI_CHECK"      // 1, or how long a rank waits for the others, such as 10s
	Record    = "TUTTI_RECORD"     // how many calls a rank keeps, such as 1000
	RecordDir = "TUTTI_RECORD_DIR" // where its records are written, the working directory unless set
)

// The secret of a job, for package rendezvous and the command: the secret, or a file that has it and that only its
// owner may read.
const (
	Secret     = "TUTTI_SECRET"
	SecretFile = "TUTTI_SECRET_FILE"
)

// Variables that tutti launch sets for its ranks.
const (
	Store = "TUTTI_STORE" // with --join: addresses of the job's store, with commas between
	Job   = "TUTTI_JOB"   // with --join: the name of the job in a store of several jobs
	Run   = "TUTTI_RUN"   // the name of this run of the ranks, which no other run has
	Min   = "TUTTI_MIN"   // with --min: the bounds of an elastic job
	Max   = "TUTTI_MAX"
)

// ConnectTimeout is how long a process waits for others of its job where the program gives no deadline, such as 30m.
const ConnectTimeout = "TUTTI_CONNECT_TIMEOUT"

// Fields of tcp.Config, for its ReadEnv.
const (
	TCPListen      = "TUTTI_TCP_LISTEN"      // Listen; ranks of a machine take this port and the next ones
	TCPAdvertise   = "TUTTI_TCP_ADVERTISE"   // Advertise, with commas
	TCPConnections = "TUTTI_TCP_CONNECTIONS" // Connections
	TCPSilence     = "TUTTI_TCP_SILENCE"     // Silence, such as 30s
)

// Variables of package mpi; its documentation has the values.
const (
	MPILibrary     = "TUTTI_MPI_LIB"         // the library, instead of the first one that is found
	MPICollectives = "TUTTI_MPI_COLLECTIVES" // nothing, or "native"
	MPIShared      = "TUTTI_MPI_SHARED"      // nothing, or "off"
)

// Variables of package p2p.
const P2POrder = "TUTTI_P2P_ORDER" // nothing, or "fixed"
