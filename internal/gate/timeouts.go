package gate

import "time"

// Patience bounds the time until a connection has said who it is, and of an answer: some round trips, beside
// 1 + 2 + 4 s of repeated packets. A stranger that says nothing takes one of the places of [Gate] no longer.
const Patience = 10 * time.Second

// CutOff is the time after which a connection ends whose other side is cut off: a pulled cable that is put back within
// some 20 s costs nothing.
const CutOff = 25 * time.Second

const (
	// acceptPause is the first pause between two attempts to accept a connection, which doubles: a program's listener may
	// dial for it, and find nobody.
	acceptPause = 10 * time.Millisecond
	// longestAcceptPause bounds it, so that a listener that works again is noticed within a second.
	longestAcceptPause = time.Second
)
