package store

import "time"

// Times of a process that looks for the store.
const (
	// glance bounds the time to reach a listener and to get its side of the handshake, as the store may be at another
	// address: a packet is repeated once.
	glance = 3 * time.Second
	// firstGlance is that time in the first round of addresses of several hosts. It doubles from round to round.
	firstGlance = 500 * time.Millisecond
	// spareGlance is that time in the first round of further ports of one host, where the store is only if others
	// have its first one: a firewall may drop what goes to them. It doubles from round to round.
	spareGlance = 100 * time.Millisecond
	// retryFirst and retryLast are the pauses between two rounds: the first, and the longest. They double from round to
	// round.
	retryFirst = 25 * time.Millisecond
	retryLast  = 400 * time.Millisecond
)

// Times of a session.
const (
	// shortestSilence is the least that a store may ask for: a process says something four times as often.
	shortestSilence = time.Millisecond
	// openTime bounds how long a process waits for a session of the store behind a proxy, before it tries the next proxy.
	openTime = 3 * time.Second
	// flushTime bounds how long Close waits until what was said before is sent: a process that ends is not held up by a
	// peer that is lost, and one that is there takes a round trip.
	flushTime = 500 * time.Millisecond
)
