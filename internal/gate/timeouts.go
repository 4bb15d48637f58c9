package gate

import "time"

// Patience bounds the time until a connection is authenticated, and the time of an answer: some round trips, plus 1 +
// 2 + 4 s of retransmissions. A silent stranger occupies a place of a [Gate] no longer than that.
const Patience = 10 * time.Second

// CutOff is the time after which a connection ends if its other side is cut off: a cable pulled for up to some 20 s
// costs nothing.
const CutOff = 25 * time.Second

const (
	// acceptPause is the first pause between two attempts to accept a connection; pauses double. A program's listener
	// may dial in order to accept, and fail.
	acceptPause = 10 * time.Millisecond
	// longestAcceptPause bounds the pause, so that a listener that works again is noticed within a second.
	longestAcceptPause = time.Second
)
