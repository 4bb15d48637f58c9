package launch

import "time"

// All times of the launcher, in the order of a job. --grace and --wait replace those of the ranks and the machines.

const (
	// storeRetry is how often a machine looks for the job's store until --wait is over: a first launcher takes seconds
	// to begin, and a look costs a connection.
	storeRetry = time.Second
	// firstWord is how long a launcher waits without a word: a job whose machines start together needs none. Each later
	// word takes twice as long as the one before.
	firstWord = 2 * time.Second
	// resolveTime bounds the search for the addresses of --hosts, which tells what is this machine: ssh knows names that
	// the system does not.
	resolveTime = 2 * time.Second
	// reportTime is how long a host of --hosts may take to join without a word: somewhat longer than ssh may take to
	// connect, which says more. Each later word takes twice as long.
	reportTime = 4500 * time.Millisecond
	// looks is how often the launcher of --hosts looks, within the silence of ranks (--tcp-silence), whether something has
	// come from a host: it is lost after as many looks in vain.
	looks = 10
	// beats is how many signs of life a host's launcher sends in that silence, as ranks do, and the launcher of --hosts.
	beats = 4
	// detachSilences is how many times that silence the launcher of --hosts may be silent until a host's launcher ends:
	// one that is stopped by a terminal goes on with the job if it runs again in a minute, unless --tcp-silence is set.
	detachSilences = 6
)

// Bounds of the time from one start of a rank to the next, which doubles: a rank that fails at once is not to fill
// the logs, and one that has failed by chance is back soon.
const (
	firstPause   = time.Second
	longestPause = 30 * time.Second
)

// Times after a rank has failed.
const (
	// settleTime is how long a launcher waits for the ends of other ranks: the rank that fails first may be the victim
	// of one whose end comes to the launcher later.
	settleTime = 300 * time.Millisecond
	// answerTime bounds how long launchers wait for each other's evidence: a machine that is lost says nothing.
	answerTime = 3 * time.Second
)

// The end of ranks.
const (
	// DefaultGrace is how long ranks that are told to end have until they are killed: time for a checkpoint.
	DefaultGrace = 30 * time.Second
	// longestGrace bounds what other launchers say of theirs.
	longestGrace = 24 * time.Hour
	// linger is how long what a rank has started may go on after the rank's first process, such as a tee that reads its
	// last lines, until it is told to end.
	linger = time.Second
	// killTime is how long a keeper waits until it kills again: processes may have started others meanwhile.
	killTime = 10 * time.Millisecond
	// orphanTime bounds how long a guard waits for the ends of processes that it has killed, whose keeper was killed: one
	// that waits for a disk does not end.
	orphanTime = 3 * time.Second
	// lateTime is how long ranks may go on after one has ended with success, until that is said.
	lateTime = 4 * time.Second
)

// The end of the job.
const (
	// stopMargin is how long launchers take to stop their ranks, beyond the grace of these.
	stopMargin = 10 * time.Second
	// dumpTime bounds how long a launcher sends flight records: the ranks have ended, and the others wait for it.
	dumpTime = 10 * time.Second
	// reconnectTime bounds how long a launcher whose ranks have ended looks for a store that was lost: the other
	// machines go on without it.
	reconnectTime = 5 * time.Second
	// patience is how long the end waits for a reader of the output that reads nothing.
	patience = 3 * time.Second
	// lastWord is how much of it is left for the word that the output is not read, which comes after the wait for that.
	lastWord = time.Second
)
