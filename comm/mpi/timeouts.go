package mpi

import "time"

// All waits and pauses of this package that are not a caller's.
const (
	// finalizePatience is how long Finalize waits for other ranks before the log says so, and for
	// MPI_Finalize when all ranks are there: as long as Slurm and Kubernetes wait for a process.
	finalizePatience = 30 * time.Second

	// silence is how long a rank calls nothing of MPI before MPI_Finalize where it cannot ask
	// whether the others do. 20 ms were enough for 100 jobs of 100 on a busy machine, 5 ms for 29
	// of 30. It is too short for a packet that is sent again.
	silence = 100 * time.Millisecond

	// busyTick is the pause of the progress goroutine between two looks while operations are in
	// flight, and idleTick while none are. The latter costs a loop of short collectives about one
	// percent.
	busyTick = 100 * time.Microsecond
	idleTick = time.Millisecond
	// busyTicks is the number of looks in a row after which the pause is idleTick all the same: operations in flight for
	// that time wait for ranks that compute, and a look every busyTick takes 3 % of a processor.
	busyTicks = 1000
	// idleTicks is the number of looks that find nothing before the goroutine parks.
	idleTicks = 50
	// goodbyeTick is the pause between two looks for goodbyes while nothing is in flight.
	goodbyeTick = 20 * time.Millisecond

	// controlTick is the pause between looks for control messages during a call of MPI. The abort of another rank is
	// noticed that much later.
	controlTick = 10 * time.Millisecond
)
