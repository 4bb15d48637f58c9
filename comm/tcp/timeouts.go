package tcp

import "time"

// DefaultSilence is how long a rank may be silent. A process that is swapped out, or stopped for a snapshot, is back
// within seconds, and users need not wait longer to learn that a rank is lost.
const DefaultSilence = 10 * time.Second

// beats is the number of signs of life in [Config.Silence]: some may be late or lost.
const beats = 10

const (
	// greetTime bounds how long a connection may take to say who it is: some round trips, beside
	// 1 + 2 + 4 s of repeated packets.
	greetTime = 10 * time.Second
	// answerTime bounds how long the dialing side waits for verdicts: longer than the other side does, which has
	// a lane before it says welcome.
	answerTime = 2 * greetTime
	// dialTime bounds how long one address may take to answer, as others may be right: a packet is repeated once.
	dialTime = 3 * time.Second
	// reportTime bounds how long a rank takes to tell its launcher which rank it has lost or waited for, before its waits
	// end: a round trip, unless the launcher is cut off. It is less than the shortest [Config.Silence].
	reportTime = time.Second / 2
	// retryTime is the pause between two attempts to connect.
	retryTime = 100 * time.Millisecond
)

// stuck, or three times [Config.Silence], is how long nothing of what was sent on a connection may be acknowledged by
// the other side's kernel. Signs of life go over the first of a pair's connections. Another one that carries nothing
// any more is not to hold the ranks up until the kernel's last retransmission, some 15 minutes later. One that starves
// beside others on a slow link, or loses five packets in a row, gets through before that.
var stuck = time.Minute

// stuckTime is how long a connection of a node may be stuck.
func (n *node) stuckTime() time.Duration {
	silence := time.Duration(n.patience) * n.tick
	return max(stuck, 3*silence)
}

// Waits of the engine, and the ends of contexts, are bounded by the program. Close waits for the peers as long as
// backend.HostTimeout, Abort as long as backend.AbortTimeout.

// listenTime is how long listen leaves everything to waits that look by themselves, as a wakeup takes longer. While a
// program does one short collective after another it is longListenTime in the end: each look of listen wakes up some
// of Go's threads, which take processors away from ranks where there are none to spare.
const (
	listenTime     = time.Millisecond
	longListenTime = 16 * time.Millisecond
)

// shortCollective is what the collectives take that listen leaves to waits for longer, on average.
const shortCollective = 50 * time.Microsecond

// nextListenTime returns how long listen leaves everything to waits that look by themselves, after a time in which that
// many collectives have ended. unattended says that there is an operation now that nobody waits for.
func nextListenTime(last time.Duration, collectives int64, unattended bool) time.Duration {
	if unattended || collectives < int64(last/shortCollective) {
		return listenTime
	}
	return min(2*last, longListenTime)
}
