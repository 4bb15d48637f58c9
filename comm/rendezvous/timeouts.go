package rendezvous

import "time"

// Times of this package, each with its reason.
const (
	// missingTimeout bounds how long a rank whose context has ended asks which ranks are missing. The store answers
	// within a round trip or is lost.
	missingTimeout = 500 * time.Millisecond
	// readEvery is the pause between the readTries attempts to read a file that another process may be making: a second
	// in all, as removing a name takes milliseconds.
	readEvery = 10 * time.Millisecond
	readTries = 100
)
