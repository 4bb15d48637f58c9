package trace

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/cmd/tutti/internal/diagnose"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dump"
)

// Clock is the correction of a rank's times, chosen so that no call ends before the calls that it waits for have
// begun.
//
// A collective in which each rank needs all others ends on no rank before all have called it, and a message arrives
// after it was sent. Each pair of such times bounds the difference of two clocks from below or above. Many pairs
// bound it closely: to the round-trip time of the fastest message (F. Cristian, "Probabilistic clock
// synchronization", 1989). Clocks within the bounds stay unchanged; other clocks move to the middle of the bounds.
type Clock struct {
	Rank   int     `json:"rank"`      // of the world
	Offset float64 `json:"offset_us"` // added to its times, in microseconds
	Within float64 `json:"within_us"` // half the distance of the bounds; -1 without bounds
}

// offset is Offset in nanoseconds.
func (c Clock) offset() int64 {
	return int64(math.Round(c.Offset * 1e3))
}

// String describes the correction, such as "rank 1: moved by 120 µs, within 15 µs".
func (c Clock) String() string {
	if c.Within < 0 {
		return fmt.Sprintf("rank %d: not moved: nothing compares its clock with the others'", c.Rank)
	}
	return fmt.Sprintf("rank %d: moved by %.0f µs, within %.0f µs", c.Rank, c.Offset, c.Within)
}

// unbounded exceeds any difference of clocks.
const unbounded = math.MaxInt64 / 4

// clocks returns the offsets that move the records' times to the first record's clock, in the records' order.
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

// bounds holds, for pairs of records, the most nanoseconds that can be added to the first one's clock if the second
// one's stays unchanged.
type bounds map[[2]int]int64

// before records that an event at i, by i's clock, preceded an event at j, by j's clock.
func (b bounds) before(i int, cause int64, j int, effect int64) {
	pair := [2]int{i, j}
	if old, ok := b[pair]; !ok || effect-cause < old {
		b[pair] = effect - cause
	}
}

// relays is the largest number of records between the two ends of a bound.
const relays = 8

// from returns the bounds of all records relative to the first. A bound may go through other records if two records
// have none in common: these are shortest paths (R. Bellman, "On a routing problem", 1958). Clocks that contradict
// themselves because they were set meanwhile would shorten paths forever, so the number of hops is bounded. With
// around, from returns the bounds of the first record relative to all others.
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

// meeting holds the times of a collective on one rank.
type meeting struct {
	rank  int   // index of the record
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
		first := all[0] // all pairs would give no closer bounds, and be too many for a thousand ranks
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

// meets reports whether a call is in meetings. A call without elements does not wait.
func meets(e *dump.Entry) bool {
	waits := e.Tutti.Op == comm.OpBarrier.String() || e.Tutti.Op == comm.OpSplit.String()
	return meetings[e.Tutti.Op] && (waits || e.Tutti.Count > 0)
}

// receiveName is the name of a receive in records.
var receiveName = comm.OpRecv.String()

// boundByMessages compares the clocks of ranks that exchanged messages.
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
