// Package segment shares memory between processes of one machine.
//
// # Memory
//
// A segment is a memfd: it has no name in any file system, so that nothing is left when its processes end, however
// they end. It is sealed against shrinking and growing, so that no process can truncate it and thereby cause a SIGBUS
// in the others. Both sides check the seals and the size.
//
// The kernel does not reserve pages for it: they are allocated when they are first written. If the kernel then has
// none, as with vm.overcommit_memory=2 when all memory is promised, the writing process gets a SIGBUS. A control group
// out of memory has one of its processes killed, as for any other memory.
//
// # Handover
//
// The process that makes a segment hands it over through a [Server], a Unix socket in the abstract namespace. Others
// learn its [Offer] over a connection that is authenticated already, and [Join]. The name of the socket is a hash of
// the offer's key, and both sides prove by a message authentication code that they have the key. Before that, each
// side asks the kernel for the user at the other end, and refuses another user. Strangers thus get nothing, nor does a
// process of another user namespace, for which the kernel reports another user.
//
// An offer also has the number of the maker's [Machine], so that processes on other hosts or in other namespaces do
// not try to join. That only saves time; the handover itself proves that two processes are on one machine.
//
// # Use
//
// A [Ring] carries bytes from one process to another. A [Bell] wakes a sleeping process. Another process may change
// any data in a segment at any time, so data is read once, and copied before it is checked. Slots for short
// collectives are in package comm/internal/schedule.
//
// # Failures
//
// Stores become visible in order, and the last one, which announces the others, is a single word. A process that is
// killed between two stores has not announced the unfinished data, and everything that it did announce stays readable
// while another process has the segment. A segment does not tell that a process has ended: its connections do.
package segment

import "errors"

// Offer is the information that a process needs to join a segment. The zero Offer is none.
type Offer struct {
	Machine uint64    // machine of the maker, as [Machine] returns it
	Key     [2]uint64 // random; zero: no segment is offered
}

var (
	errSize  = errors.New("a segment of another size, or without seals")
	errNone  = errors.New("no memory is offered")
	errAlien = errors.New("the memory is on another host, or of another user or namespace")
)
