package record

import "time"

// Times of this package, each with its reason.
const (
	// handling is how long a program that handles a signal itself takes to end the context of its communication.
	// mpirun of Open MPI kills a process one second after SIGTERM.
	handling = 500 * time.Millisecond
	// peerPatience bounds how long a rank that aborts waits for the dumps of its peers. They write them when they hear
	// of it; many launchers end their processes when this one's exits.
	peerPatience = 2 * time.Second
	// peerEvery is how often it looks for them: files of other processes, which nothing announces.
	peerEvery = 10 * time.Millisecond
)
