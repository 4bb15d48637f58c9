package trace

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/cmd/tutti/internal/diagnose"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dump"
)

// Clock is what a rank's times were moved by, so that no call ends before what it waits for has begun.
//
// A collective in which each rank needs all others ends nowhere before all have called it, and a message
// arrives after it was sent. So each pair of such times bounds the difference of two clocks, from below or
// from above, and many of them bound it closely: to the time that the fastest message takes there and back
// (the idea of F. Cristian, "Probabilistic clock synchronization", 1989). Clocks that obey the bounds are
// left as they are; others are moved to the middle between them.
type Clock struct {
	Rank   int     `json:"rank"`      // of the world
	Offset float64 `json:"offset_us"` // added to its times, in microseconds
	Within float64 `json:"within_us"` // half the distance of the bounds; -1: there were none
}

// offset is Offset in nanoseconds.
func (c Clock) offset() int64 {
	return int64(math.Round(c.Offset * 1e3))
}

// String is as in "rank 1: moved by 120 µs, within 15 µs".
func (c Clock) String() string {
	if c.Within < 0 {
		return fmt.Sprintf("rank %d: not moved: nothing compares its clock with the others'", c.Rank)
	}
	return fmt.Sprintf("rank %d: moved by %.0f µs, within %.0f µs", c.Rank, c.Offset, c.Within)
}

// unbounded is more than any difference of clocks.
const unbounded = math.MaxInt64 / 4

// clocks returns what moves the records' times to those of the first one, in their order.
func clocks(records []diagnose.Record) []Clock {
	ahead := bounds{}
	for group := range groupsOfAll(records) {
		boundByCollectives(ahead, records, group)
		boundByMessages(ahead, records, group)
	}
	high := ahead.from(len(records), false)
	low := ahead.from(len(records), true)
	out := make([]Clock, len(records))
	for i, r := range records {
		out[i] = Clock{Rank: r.Tutti.Rank, Within: -1}
		if high[i] >= unbounded || low[i] >= unbounded {
			continue
		}
		// The offset lies between -low and high.
		out[i].Within = math.Abs(micros(high[i]+low[i])) / 2
		if low[i] < 0 || high[i] < 0 {
			out[i].Offset = micros((high[i] - low[i]) / 2)
		}
	}
	return out
}

// bounds has, for pairs of records, the most in nanoseconds that can be added to the clock of the first if nothing
// is added to the clock of the second.
type bounds map[[2]int]int64

// before notes that something at i, by its clock, came before something at j, by that one's.
func (b bounds) before(i int, cause int64, j int, effect int64) {
	pair := [2]int{i, j}
	if old, ok := b[pair]; !ok || effect-cause < old {
		b[pair] = effect - cause
	}
}

// relays is how many others a bound may go through.
const relays = 8

// from returns the bounds of all records beside the first, through others where they compare with those only:
// shortest paths (R. Bellman, "On a routing problem", 1958). Clocks that contradict themselves, since they were
// set meanwhile, would make paths shorter without end, so their length is bounded. Turned around, it returns those
// of the first beside all others.
func (b bounds) from(n int, around bool) []int64 {
	paths := make([]int64, n)
	for i := range paths {
		paths[i] = unbounded
	}
	paths[0] = 0
	for range relays {
		changed := false
		for pair, bound := range b {
			i := pair[0]
			j := pair[1]
			if around {
				i, j = j, i
			}
			if paths[j] < unbounded && paths[j]+bound < paths[i] {
				paths[i] = paths[j] + bound
				changed = true
			}
		}
		if !changed {
			break
		}
	}
	return paths
}

// groupsOfAll returns the names of all communicators.
func groupsOfAll(records []diagnose.Record) map[string]bool {
	names := map[string]bool{}
	for _, r := range records {
		for name := range r.Tutti.Comms {
			names[name] = true
		}
	}
	return names
}

// meeting are the times of a collective.
type meeting struct {
	rank  int   // place in the records
	begun int64 // nanoseconds, by the rank's clock
	ended int64 // the same
}

// boundByCollectives compares the clocks of a communicator's ranks.
func boundByCollectives(b bounds, records []diagnose.Record, group string) {
	met := map[uint64][]meeting{}
	for i, r := range records {
		for _, e := range r.Entries {
			if e.ProcessGroup[0] == group && e.Completed > 0 && e.Tutti.Error == "" && meets(&e) {
				met[e.CollectiveSeq] = append(met[e.CollectiveSeq], meeting{i, e.Created, e.Completed})
			}
		}
	}
	for _, all := range met {
		first := all[0] // all pairs would bound no closer in the end, and be too many of a thousand ranks
		for _, peer := range all[1:] {
			b.before(first.rank, first.begun, peer.rank, peer.ended)
			b.before(peer.rank, peer.begun, first.rank, first.ended)
		}
	}
}

// meetings are the operations that end on no rank before all ranks have called them.
var meetings = map[string]bool{
	comm.OpBarrier.String():       true,
	comm.OpSplit.String():         true,
	comm.OpAllReduce.String():     true,
	comm.OpAllGather.String():     true,
	comm.OpReduceScatter.String(): true,
	comm.OpAllToAll.String():      true,
}

// meets reports whether a call is such a one. Without elements nothing has to be waited for.
func meets(e *dump.Entry) bool {
	waits := e.Tutti.Op == comm.OpBarrier.String() || e.Tutti.Op == comm.OpSplit.String()
	return meetings[e.Tutti.Op] && (waits || e.Tutti.Count > 0)
}

// receiveName is how records call a receive.
var receiveName = comm.OpRecv.String()

// boundByMessages compares the clocks of those who exchanged messages.
func boundByMessages(b bounds, records []diagnose.Record, group string) {
	sent := map[message]meeting{}
	received := map[message]meeting{}
	for i, r := range records {
		for _, s := range calls(r, group, 0) {
			if s.message == nil || s.args["state"] != nil || s.args["error"] != nil {
				continue
			}
			ends := sent
			if s.category == categoryReceive {
				ends = received
			}
			ends[*s.message] = meeting{i, s.begin, s.end}
		}
	}
	for m, from := range sent {
		if to, ok := received[m]; ok && to.rank != from.rank {
			b.before(from.rank, from.begun, to.rank, to.ended)
		}
	}
}
