// Package commtest is the conformance suite of [comm.Communicator]: the promises of the contract, as tests that any
// backend can run, even one outside this module.
//
//	func TestConformance(t *testing.T) {
//		commtest.Run(t, commtest.Backend{
//			Name:  "mine",
//			Sizes: []int{1, 2, 3, 4},
//			Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
//				// Make a world of size ranks, call body once for each rank
//				// that this process hosts, and join the errors.
//			},
//		})
//	}
//
// # Processes and threads
//
// A backend that hosts its ranks as goroutines of the test process makes
// worlds of any size. A backend with a process per rank launches the test
// binary once per rank, sets Sizes to the one size it was launched with, and
// calls body once in each process: the suite is deterministic, so that all
// processes run the same cases in the same order. They must be started with
// the same test flags.
//
// A failed comparison is recorded and the ranks go on together, so that one
// rank's finding does not leave the others waiting. Every case has a deadline
// ([Timeout]); what still runs some time after it is reported as hanging.
//
// # Memory
//
// The suite creates all data with the [runtime.Runtime] that comes with a rank
// and never looks at device memory itself, so it serves host and GPU backends.
package commtest

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Rank is one participant of a world, as passed to the body of [Backend.Run].
type Rank struct {
	// Comm is the rank's communicator.
	Comm comm.Communicator
	// Runtime owns memory that Comm can reach. Ranks may share one.
	Runtime runtime.Runtime
}

// Backend tells the suite how to make worlds and what they cannot do. The zero
// value of the optional fields stands for the whole contract.
type Backend struct {
	// Name is what the backend writes into [comm.OpError.Backend]. It may be
	// empty, then it is not checked.
	Name string

	// Sizes are the world sizes to test. With a process per rank it is the one
	// size that was launched.
	Sizes []int

	// Run calls body once for every rank of a world of the given size that
	// this process hosts, each on its own goroutine if there are several,
	// and returns the joined errors of the bodies and of making the world. Run
	// may hand out the same communicators again and again: no case closes or
	// aborts them (cases that do so make their own with Split), but a backend
	// that fails the suite can leave them aborted. The context that a body gets
	// is ctx or derived from it.
	Run func(ctx context.Context, size int, body func(ctx context.Context, r Rank) error) error

	// Unsupported, if set, reports which reductions the backend refuses with
	// [comm.ErrUnsupported] although they are defined. The suite tests that
	// it does refuse them, before anything is sent.
	Unsupported func(dt dtype.DType, op comm.ReduceOp) bool

	// Calls is how many calls two cases make in a row on one communicator. 0 means 4,160, or with [Extended] or
	// TUTTI_EXTENDED set some more than 65,536, the number at which counters of 16 bits wrap around; 1,040 under the
	// race detector. Set fewer only if a slow call would make the suite take minutes.
	Calls int

	// NoTags: messages match in order alone, tags are ignored (NCCL).
	NoTags bool
	// NoMismatch: ranks that call different collectives, counts, types or
	// operations are not detected (NCCL without checked.Communicator).
	NoMismatch bool
	// LateMismatch: a rank that finishes its part of a collective before it can learn of a mismatch gets the error
	// from the next Barrier (MPI).
	LateMismatch bool
	// NoPeerFailure: a rank that leaves is noticed by its peers' deadlines
	// alone, not by [comm.ErrPeerFailed], and what it aborted may complete on a
	// peer that comes late.
	NoPeerFailure bool
	// NoLoneSelfReceive: a receive from oneself is refused unless the send is in the same group, and may abort the
	// communicator (NCCL).
	NoLoneSelfReceive bool
	// NoFixedOrder: reductions do not follow the order contract of [comm.Communicator], and
	// [comm.FixedOrder] of the backend's communicators says so, which the suite tests (NCCL).
	NoFixedOrder bool
	// Communicators is the maximum number of sub-communicators that a rank has open at a time, at least 8, if a
	// library or a device has limited room. 0 means no maximum.
	Communicators int
	// Synchronous: a collective waits for the other ranks when it is called
	// (checked.Communicator), not only in Sync.
	Synchronous bool
}

// Option changes how [Run] works.
type Option func(*config)

// thorough asks for whole series where a part of them is much the same.
var thorough = os.Getenv("TUTTI_EXTENDED") != ""

type config struct {
	extended bool
	timeout  time.Duration
}

// Extended runs every case with more counts, more roots and more rounds: for
// continuous integration, not for each test run.
func Extended() Option { return func(c *config) { c.extended = true } }

// Timeout sets the deadline of one case. It is 60 seconds unless set. Cases of many calls have five times as long.
// After a quarter as long again, a case that has not come back is reported as hanging.
func Timeout(d time.Duration) Option { return func(c *config) { c.timeout = d } }

// Run runs the whole suite as subtests of t, for each world size.
func Run(t *testing.T, b Backend, opts ...Option) {
	t.Helper()
	s := newSuite(b, opts...)
	for _, size := range b.Sizes {
		t.Run(fmt.Sprintf("ranks=%d", size), func(t *testing.T) {
			for _, c := range cases {
				t.Run(c.name, func(t *testing.T) {
					if reason := c.skip(s.Backend, size); reason != "" {
						t.Skip(reason)
					}
					skipped, err := s.run(t.Context(), c, size)
					if err != nil {
						t.Error(err)
					}
					if skipped != "" {
						t.Skip(skipped)
					}
				})
			}
		})
	}
}
