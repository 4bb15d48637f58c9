// Package schedule runs the collectives and messages of a communicator over a [Wire], which
// does no more than send and receive bytes between ranks. [Engine] is the rest of a
// [backend.Backend]: the schedules, the order between operations that use the same memory,
// tags, the comparison of what ranks have called, and the texts of waits that end in vain.
//
// A backend over a transport is connections, a Wire, and an Engine:
//
//	type endpoint struct {
//		*schedule.Engine // Submit, SubmitTogether, Abort, Progress
//		wire             *wire
//	}
//	e := &endpoint{schedule.New(schedule.Config{Check: check, Wire: w, MaxTag: 1<<62}), w}
//	communicator := backend.New(&e.Check, &e.Life, e)
//
// It adds Wait, which makes sub-communicators and leaves the other waits to [Engine.Wait],
// and Release, which calls [Engine.Leave] and closes what it has opened.
//
// # How it is written
//
// engine.go has the operations in flight, submit.go makes them from calls, and the steps of
// the schedules are in barrier.go, broadcast.go, exchange.go, reduce.go, message.go and, over
// memory that all ranks share, shared.go and segment.go. calllog.go, control.go and stall.go
// find out why a rank waits in vain.
package schedule

import (
	"time"

	"github.com/tutti-go/tutti/comm"
)

// Wire sends and receives bytes between the ranks of one communicator.
//
// The [Engine] calls its methods one at a time, except Await, and holds its lock meanwhile: they must not wait for
// other ranks, and must not call the Engine. The memory rule bounds the work of a Wire on its own goroutines: the
// bytes of a message belong to the Wire from Post until Poll has reported the message, or Abandon has returned 0.
type Wire interface {
	// Post starts a message. The wire may leave that to the next Flush or Poll, and copies
	// what it keeps of m. A receive takes the oldest message from m.Peer with its tag that no
	// earlier receive takes. A message of a rank to itself is one like any other.
	//
	// A send may be in flight until its receive is posted, and does not keep messages of other
	// tags from arriving.
	Post(id int, m *Message)
	// Flush starts what was posted. An error aborts the communicator.
	Flush() error
	// Poll appends the messages that have completed since the last Poll. It starts posted messages, and does not wait.
	// An error aborts the communicator.
	Poll(done []Done, h Hint) ([]Done, error)
	// Abandon is called after an abort, instead of Poll, until it returns 0: it cancels messages that have not begun,
	// and returns the number of messages whose memory the wire still accesses. Nothing is posted after that.
	Abandon() (touched int)

	// Tell sends a control message of at most [ControlBytes], which it copies, and reports whether it has accepted it.
	// The wire may drop a report while an earlier one to that rank is in flight; any other message is the last one to
	// that rank. Nobody waits for control messages, and they do not wait for messages that Post started. They arrive
	// in order.
	Tell(rank int, report bool, message []byte) bool
	// Hear returns the oldest control message of a rank that it has not returned yet, nil if there is none.
	Hear(rank int) ([]byte, error)
	// Told reports whether all control messages that Tell has accepted are sent.
	Told() (bool, error)
	// Gone returns the reason why a rank cannot be reached any more, nil if it can. Everything that the rank sent or
	// received before is reported first, by Poll and Hear. The engine aborts the communicator unless it has received
	// the rank's goodbye.
	Gone(rank int) error
}

// Waiter is implemented by wires that can block until something happens.
type Waiter interface {
	// Await returns when Poll, Hear or Gone may have something new, or after d. It may return early. Several
	// goroutines may call it at once, and hold no lock.
	//
	// A wire with this method also calls [Engine.Drive] when something new has arrived, so that operations advance
	// while nobody waits.
	Await(d time.Duration)
}

// Looker is implemented by a Waiter whose messages mostly arrive in memory that ranks share. Its Tell refuses messages
// to ranks that are gone, and no others.
type Looker interface {
	// Looks reports whether a wait should poll again instead of calling Await. A wait is stalled when it has polled
	// for some time. Several goroutines may call it at once, and hold no lock.
	Looks(stalled bool) bool
	// Moved reports whether a part of a message has moved since the last call.
	Moved() bool
}

// Bounded is implemented by wires with bounded memory for messages that arrive before their receives.
type Bounded interface {
	// Early returns the number of bytes from a rank that arrived before their receives, if there is no room for
	// another message, which then waits; and 0 otherwise. Messages of other communicators count as well.
	Early(rank int) (bytes int)
	// Unread returns how many bytes of messages have gone to a rank without a receive there, if another message, or
	// more of one, waits for that; and 0 otherwise. Messages of other communicators count as well.
	Unread(rank int) (bytes int)
}

// Message is a message as a wire sees it.
type Message struct {
	Peer    int     // the rank that it goes to or comes from
	Tag     uint64  // for users any 32 bits, for the engine at most MaxTag of the Config
	User    bool    // tags of users and of the engine never match
	Receive bool    // into Address; false: a send from there
	Address uintptr // on the host, in memory that the garbage collector does not move
	Bytes   int     // the length, at most 1 GiB; for a receive the room, since the message may be shorter

	// Headed: it begins with a head ([ReadHead]), and may be shorter than the room, HeadedBytes. A message without one
	// that has a tag of users is data of the last message with one that was posted before. Until a wire has reported a
	// receive, its memory may have the head of a message with another tag.
	Headed bool

	owner *Op // nil if the table's entry is free
}

// Done is a message that has completed.
type Done struct {
	ID    int   // of the message, its place in the engine's table
	Bytes int   // received; more than the room if the message was longer, whose end is lost
	Err   error // why the message failed, which aborts the communicator
}

// Hint describes the purpose of a Poll.
type Hint struct {
	Together bool // the messages in flight only matter when all of them have completed
	Tries    int  // maximum number of polls of the transport while nothing has completed
}

// Offload runs operations that the engine leaves to its backend.
type Offload interface {
	// Accepts returns the reason why a call cannot be submitted, or nil.
	Accepts(c comm.Call) error
	// Plan sets the Step of the operation of a call, and returns true. If it returns false, the engine's schedules run
	// the call. The lists of c are valid until Plan returns. A Barrier or Split is a Call with that Op and nothing
	// else.
	Plan(o *Op, c comm.Call) bool
}
