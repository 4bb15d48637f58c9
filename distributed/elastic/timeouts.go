package elastic

import (
	"time"

	"github.com/tutti-go/tutti/comm/store"
)

// defaultPatience is how long a member that lives may keep all others waiting: between two steps it may evaluate, or
// write a checkpoint.
const defaultPatience = 10 * time.Minute

// DefaultSilence is how long a member may be silent before the others go on without it.
const DefaultSilence = 2 * time.Second

// limitFactor makes a member wait for several times Silence before it fails: the leases of lost members end
// meanwhile, and what is repeated has been tried a few times.
const limitFactor = 5

// All other times follow from Silence, in which the network and the processes do what they have to, and from its
// multiple limit.

// glance is how often a member at a boundary looks at the clock: each time that follows is later by that at most.
func (c *Config) glance() time.Duration { return c.Silence / 8 }

// firstRetry and lastRetry are the first and the longest wait before a refused write, a lost session or an epoch that
// could not begin is tried again: in an outage each member asks the store once in Silence.
func (c *Config) firstRetry() time.Duration { return c.Silence / 10 }

func (c *Config) lastRetry() time.Duration { return c.Silence }

// absence is how long a member of the epoch may be missing in the store before its communicator is aborted: as long
// as a session that is lost needs to be made again.
func (c *Config) absence() time.Duration { return c.Silence / 4 }

// conflict is how long another process may have this member's name: an earlier process that has ended loses its lease
// after the time of the store, or after Silence where the store does not tell.
func (c *Config) conflict(kv store.Store) time.Duration {
	lease := c.Silence
	if session, ok := kv.(interface{ LeaseTime() time.Duration }); ok {
		lease = max(lease, session.LeaseTime())
	}
	return 2 * lease
}

// tell is how long a wait in an exchange lasts until the others are told of it: waits of healthy steps end
// before that, and cost the store nothing.
func (c *Config) tell() time.Duration { return c.Patience / 4 }

// late is how long an attempt at an epoch has to last before a member tells whom it has not reached: what is missing
// earlier may have been about to come.
func (c *Config) late() time.Duration { return c.limit / 2 }

// backoff is how long a member waits after attempts that failed for it: twice as long after each, as each takes the
// time of all.
func backoff(attempts int, limit time.Duration) time.Duration {
	return limit << min(attempts, maxDoublings)
}
