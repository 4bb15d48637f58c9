package tcp

import "fmt"

// credit bounds the memory for messages that come before their receives, in both directions of a pair.
// A rank spends credit when it announces a message, and gets it back when the receiver needs no memory
// for it any more. Frames carry what is returned. The pair's mu guards it.
type credit struct {
	window    int // bytes of early messages at a time in each direction; 0 until the pair is connected
	available int // bytes that this rank may send early
	used      int // bytes of this rank's memory that the peer has spent, and that are not returned
	freed     int // of these, bytes that are free again and to be returned
}

// messageBytes is the credit of an announcement beside the credit of its eager part, so that messages without
// data are bounded as well.
const messageBytes = 256

// newCredit returns the credit of a pair that has sent nothing. Called by
// connector.join, whose lock is held; nobody else has the pair yet.
func newCredit(window int) credit {
	return credit{window: window, available: window}
}

// spend takes the credit for an announcement, and returns how many bytes of the message may come early.
// ok is false where there is no credit for an announcement. Called by outbox.announce; mu is held.
func (c *credit) spend(total int) (eager int, ok bool) {
	if c.available < messageBytes {
		return 0, false
	}
	// A sixteenth is left for the announcements of others, of which one may be received first.
	eager = min(total, max(0, c.available-messageBytes-c.window/16))
	c.available -= messageBytes + eager
	return eager, true
}

// restore adds the credit that a frame of the peer returns. Called by pair.accept; mu is held.
func (c *credit) restore(bytes uint64) error {
	spent := c.window - c.available
	if bytes > uint64(spent) {
		return fmt.Errorf("a credit of %d bytes, of which it has %d", bytes, spent)
	}
	c.available += int(bytes)
	return nil
}

// covers reports whether the peer has the credit for an announcement. Called by pair.announcement; mu is held.
func (c *credit) covers(eager int) bool {
	return messageBytes+eager <= c.window-c.used
}

// charge notes an announcement of the peer, which has the credit for it. Called by pair.announcement; mu is held.
func (c *credit) charge(eager int) { c.used += messageBytes + eager }

// free notes that an announcement of the peer needs no memory any more. Called by pair.announcement and release; mu is
// held.
func (c *credit) free(eager int) { c.freed += messageBytes + eager }

// early returns the bytes of early messages of the peer, announcements included, if it has no credit for another one;
// 0 otherwise. Called by wire.Early; mu is held.
func (c *credit) early() int {
	bytes := c.used - c.freed
	if bytes <= c.window-messageBytes {
		return 0
	}
	return bytes
}

// unread returns the bytes of early messages of this rank, announcements included, for which the peer has not returned
// the credit. Called by wire.Unread; mu is held.
func (c *credit) unread() int { return c.window - c.available }

// due reports whether the peer needs its credit back now: a fourth of the window, or anything if it has
// none to announce a message. Called by pair.choose, chooseMessages and urgent; mu is held.
func (c *credit) due() bool {
	return c.freed > 0 && (c.freed >= c.window/4 || c.window-c.used < messageBytes)
}

// collect returns the credit that the next frame returns to the peer. Called by pair.fill; mu is held.
func (c *credit) collect() uint64 {
	bytes := c.freed
	c.used -= bytes
	c.freed = 0
	return uint64(bytes)
}
