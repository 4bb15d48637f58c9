package launch

import "time"

// This file has all times of the launcher, in the order of a job. --grace and --wait replace the defaults for ranks and
// machines.

const (
	// storeRetry is the interval at which a machine looks for the job's store until --wait is over. A first launcher
	// takes seconds to begin, and a look costs a connection.
	storeRetry = time.Second
	// firstWord is how long a launcher waits before its first message. A job whose machines start together needs none.
	// Each later message takes twice as long as the one before.
	firstWord = 2 * time.Second
	// resolveTime bounds the address lookup of --hosts, which finds the hosts that are this machine. ssh knows names
	// that the system does not.
	resolveTime = 2 * time.Second
	// reportTime is how long a host of --hosts may take to join before a message. It exceeds ssh's connection timeout,
	// because ssh's error says more. Each later message takes twice as long.
	reportTime = 4500 * time.Millisecond
	// looks is how often the launcher of --hosts checks, within the ranks' silence (--tcp-silence), whether something
	// has come from a host. After this many checks in a row without anything, the host is lost.
	looks = 10
	// beats is the number of signs of life within that silence. Ranks, hosts' launchers and the launcher of --hosts all
	// send them.
	beats = 4
	// detachSilences is how many times that silence the launcher of --hosts may be silent before a host's launcher ends
	// its job. If a terminal stops the launcher for less than a minute, the job goes on, unless --tcp-silence is set.
	detachSilences = 6
)

// Bounds of the time from one start of a rank to the next, which doubles. A rank that always fails at once does not
// fill the logs. A rank that has failed by chance is back soon.
const (
	firstPause   = time.Second
	longestPause = 30 * time.Second
)

// Times after a rank has failed.
const (
	// settleTime is how long a launcher waits for the ends of other ranks. The rank that fails first may be a victim,
	// and the launcher may hear of the culprit's end later.
	settleTime = 300 * time.Millisecond
	// answerTime bounds how long launchers wait for each other's evidence, because a lost machine sends none.
	answerTime = 3 * time.Second
)

// The end of ranks.
const (
	// DefaultGrace is the time between the signal that tells ranks to end and the kill: enough for a checkpoint.
	DefaultGrace = 30 * time.Second
	// longestGrace bounds the grace that other launchers announce.
	longestGrace = 24 * time.Hour
	// linger is how long a rank's processes may outlive its first process before they are told to end. An example is a
	// tee that reads its last lines.
	linger = time.Second
	// killTime is how long a keeper waits before it kills again: processes may have started others meanwhile.
	killTime = 10 * time.Millisecond
	// orphanTime bounds how long a guard waits for the ends of processes that it has killed. A process that waits for a
	// disk does not end.
	orphanTime = 3 * time.Second
	// lateTime is how long ranks may outlive the first one that succeeds before a message.
	lateTime = 4 * time.Second
)

// The end of the job.
const (
	// stopMargin is how long launchers take to stop their ranks, beyond the ranks' grace.
	stopMargin = 10 * time.Second
	// dumpTime bounds how long a launcher sends flight records: the ranks have ended, and other launchers wait for it.
	dumpTime = 10 * time.Second
	// reconnectTime bounds how long a launcher whose ranks have ended looks for a lost store: the other machines go on
	// without it.
	reconnectTime = 5 * time.Second
	// patience is how long the end of a job waits for a reader of the output that reads nothing.
	patience = 3 * time.Second
	// lastWord is the part of patience that is kept for the message that nobody reads the output. The message comes
	// after the wait for the reader.
	lastWord = time.Second
)
