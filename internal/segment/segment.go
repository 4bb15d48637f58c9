// Package segment is memory that processes of one machine share, and what they need to use it.
//
// # Memory
//
// A segment is a memfd: it has no name in any file system, so that nothing is left when its processes end, however they
// do. It is sealed against shrinking and growing, so that a process that truncates it cannot have the others take
// SIGBUS. Both sides check the seals and the size.
//
// The kernel reserves no pages for it: they are taken when they are first written. Where it has none to give then, as
// with vm.overcommit_memory=2 and all memory promised, the process that writes takes SIGBUS. A control group out of
// memory has one of its processes killed, as for any other memory.
//
// # Handover
//
// The process that makes a segment hands it over by a [Server], a Unix socket in the abstract namespace. Others have
// learned its [Offer] over a connection that is authenticated already, and [Join]. The name of the socket is a hash of
// the offer's key, and both sides prove by a code of authentication that they have the key. Before that, each side asks
// the kernel who is at the other end: a process of another user is refused. So strangers get nothing, and neither does
// a process of another user namespace, for which the kernel names another user.
//
// An offer also has the number of the maker's [Machine]: those of other hosts or namespaces do not try. That saves
// time. The handover proves that two processes are on one machine.
//
// # Use
//
// A [Ring] carries bytes from one process to another one. A [Bell] wakes up a process that sleeps. Everything that a
// process reads from a segment may be changed by another one at any time, so it is copied before it is checked, and
// read once. Slots for short collectives are in package comm/internal/schedule.
//
// # Failures
//
// Stores become visible in their order, and what they announce last is a single word. A process that is killed between
// two stores has announced nothing of what it had begun, and everything that it announced stays readable for as long as
// another process has the segment. A segment does not tell that a process has ended: its connections do.
package segment

import "errors"

// Offer is what a process needs to join a segment. The zero Offer is of none.
type Offer struct {
	Machine uint64    // of the maker, as [Machine] returns it
	Key     [2]uint64 // random; zero: none is offered
}

var (
	errSize  = errors.New("a segment of another size, or without seals")
	errNone  = errors.New("no memory is offered")
	errAlien = errors.New("the memory is on another host, or of another user or namespace")
)
