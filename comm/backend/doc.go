// Package backend is for authors of communicators. It makes a [comm.Communicator] from the operations of one rank,
// checks their arguments ([Check]), and keeps its life ([Life]): closing, aborting, the first cause,
// sub-communicators.
//
// Start with a [Worker], which does one operation at a time and needs no locks: [NewSerial] makes a communicator from
// it. Choose a [Backend] and [New] if calls must overlap. Both pass the suite of comm/commtest:
//
//	commtest.Run(t, commtest.Backend{Name: "mine", Sizes: []int{1, 2, 5},
//		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
//			return comm.Run(ctx, newWorld(size), func(ctx context.Context, c comm.Communicator) error {
//				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
//			})
//		}})
//
// [comm.Call.SendPart] and [comm.Call.RecvPart] define the data that an operation moves: one loop over the peers does
// all twelve. A backend in which a rank sees the calls of the others compares them ([Agree], [AgreeOnMessage]).
// [SplitGroups] does the arithmetic of Split. A Call may be sent to another process (encoding/gob); its addresses
// mean nothing there.
//
// The methods of a [Base] hand a Backend calls and waits as values, whether they come through the methods of
// [comm.Communicator] or from a decorator, which forwards them ([comm.Call.Make]). Optional features are separate
// interfaces: [Progresser], [MemoryChecker], [Rounder], [ListSharer], and those of package comm for programs.
//
// A Backend asks [Life.Err] before it accepts a call, calls [Life.Fail] when it finds that
// the ranks are out of step, and describes what a wait waits for by an [InFlight], or has a
// [Ledger] do so. Examples: examples/wire is a Worker over connections,
// comm/noop the smallest Backend, and comm/local a fast one for ranks that share memory.
package backend
