package engine

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// partitionTag marks the messages of partitionReducer.
const partitionTag uint32 = 2

// throttle is the number of peers with which a rank exchanges entries at a time, as in the published code.
const throttle = 4

// partitionReducer reduces by partitions, the first half of an allreduce: the index space is
// cut into one partition per rank, each rank sends every other rank the selected entries in
// its partition, and adds up what it receives in its own. It is what SparCML calls split
// (Renggli et al., SC 2019) with the rotated, throttled
// exchange of Ok-Topk (Li and Hoefler, section 3.1.1): in round t, rank r sends
// to rank r+t and receives from rank r-t, so that no rank gets messages from
// all others at once.
type partitionReducer struct {
	*engine
	incoming base.Buffer      // messages from other ranks, laid out by in
	outbound base.Buffer      // messages to other ranks, laid out by out
	in       mail             // by round
	out      mail             // by round
	unpacked base.Buffer      // lists, if they are separate from the messages
	sources  []kernel.Entries // by round, so by distance from this rank
	sums     listBuffer       // of this rank's partition
}

func newPartitionReducer(e *engine) *partitionReducer {
	bounds := make([]int32, e.size+1)
	length := e.n / e.size
	for r := range bounds {
		bounds[r] = int32(r * length)
	}
	bounds[e.size] = int32(e.n)
	e.set(numBounds, bounds...)
	return &partitionReducer{
		engine:  e,
		sources: make([]kernel.Entries, e.size),
		in:      newMail(e.size),
		out:     newMail(e.size),
	}
}

// partition returns the start and the length of a rank's partition, by the numbers read last.
func (s *partitionReducer) partition(rank int) (start, n int) {
	bounds := s.host[numBounds:]
	start = int(bounds[rank])
	end := int(bounds[rank+1])
	return start, end - start
}

func (s *partitionReducer) partitionLength(rank int) int {
	_, n := s.partition(rank)
	return n
}

// locate finds the partitions of a list of selected entries.
func (s *partitionReducer) locate(l kernel.Entries) {
	s.do(func() error {
		return s.kernels.LowerBounds(l, s.address(numBounds), s.size+1, s.address(s.positions), s.address(s.lengths))
	})
}

// partitionOf returns the entries of a list, located and read, that are in a rank's partition.
func (s *partitionReducer) partitionOf(l kernel.Entries, rank int) kernel.Entries {
	positions := s.host[s.positions:]
	return part(l, int(positions[rank]), int(positions[rank+1]))
}

// reduce adds up this rank's selected entries for itself and the entries for this rank in the other ranks' outgoing
// lists. outgoing was located, and is read here; local are the selected entries for itself, or nil for those in
// outgoing. It returns the sums.
func (s *partitionReducer) reduce(ctx context.Context, outgoing kernel.Entries, local *kernel.Entries) kernel.Entries {
	s.communicate(ctx, comm.AllToAllCall(s.address(s.lengths), s.address(s.received), 1, dtype.I32))
	s.read(ctx)
	return s.reduceRead(ctx, outgoing, local)
}

// reduceRead is reduce after the lengths are read.
func (s *partitionReducer) reduceRead(ctx context.Context, outgoing kernel.Entries,
	local *kernel.Entries) kernel.Entries {
	_, length := s.partition(s.rank)
	limit := func(int) int { return length }
	lengths := s.checkWords(s.received, s.size, limit, "its number of entries for this rank's partition")
	s.sources[0] = s.partitionOf(outgoing, s.rank)
	if local != nil {
		s.sources[0] = *local
	}
	in := &s.in
	out := &s.out
	total := 0
	for t := 1; t < s.size; t++ { // both sides know the lengths
		n := int(lengths[s.from(t)])
		total += n
		in.rooms[t] = s.messageWords(n, length)
		to := s.to(t)
		l := s.partitionOf(outgoing, to)
		out.rooms[t] = s.messageWords(l.N, s.partitionLength(to))
	}
	in.ptr = s.hold(&s.incoming, in)
	out.ptr = s.hold(&s.outbound, out)
	memory := s.listMemory(&s.unpacked, total+total/4)
	for t := 1; t < s.size; t++ {
		to := s.to(t)
		l := s.partitionOf(outgoing, to)
		span := s.partitionLength(to)
		place := base.At(out.ptr, out.places[t])
		s.pack(place, l, span)
		s.unpack(l, place, span)
		n := int(lengths[s.from(t)])
		source := s.listAt(base.At(in.ptr, in.places[t]), n, memory)
		memory = base.At(memory, 2*source.N)
		s.sources[t] = source
	}
	s.travel(func() { s.exchangeRounds(ctx) }, in, out)
	for t := 1; t < s.size; t++ {
		place := base.At(in.ptr, in.places[t])
		s.unpack(s.sources[t], place, length)
	}
	room := min(s.sources[0].N+total, s.n)
	sums := s.message(&s.sums, room)
	s.union(sums, s.sources, 1, 0)
	return sums
}

// exchangeRounds sends and receives the messages, a few rounds at a time.
func (s *partitionReducer) exchangeRounds(ctx context.Context) {
	for first := 1; first < s.size; first += throttle {
		end := min(first+throttle, s.size)
		for t := first; t < end; t++ {
			if words := s.out.sizes[t]; words > 0 {
				place := base.At(s.out.ptr, s.out.from[t])
				s.add(comm.SendCall(place, words, dtype.I32, s.to(t), partitionTag))
			}
			if words := s.in.sizes[t]; words > 0 {
				place := base.At(s.in.ptr, s.in.from[t])
				s.add(comm.RecvCall(place, words, dtype.I32, s.from(t), partitionTag))
			}
		}
		s.engine.submitAndArrive(ctx)
	}
}

// hold returns memory for messages, with spare room.
func (s *partitionReducer) hold(b *base.Buffer, m *mail) uintptr {
	words := base.Displacements(m.rooms, m.places)
	s.allocate(b, (words+words/4)*base.WordSize)
	return b.Ptr
}

// from and to are the peers of a round.
func (s *partitionReducer) from(round int) int {
	return (s.rank - round + s.size) % s.size
}
func (s *partitionReducer) to(round int) int {
	return (s.rank + round) % s.size
}

// collectPartitions is g.collect for lists that are each within a rank's partition.
func (s *partitionReducer) collectPartitions(ctx context.Context, g *allgather, local kernel.Entries) kernel.Entries {
	for r := range g.spans {
		g.spans[r] = s.partitionLength(r)
	}
	return g.collect(ctx, local)
}

// partitionExchange is a reduction by partitions followed by an allgather of the reduced partitions.
type partitionExchange struct {
	*partitionReducer
	allgather *allgather        // of the sums
	orDense   bool              // send whole partitions if lists of entries would be longer
	all       [1]kernel.Entries // lists of the result
}

func partitions(e *engine) exchange {
	return &partitionExchange{
		partitionReducer: newPartitionReducer(e),
		allgather:        newAllgather(e),
	}
}

// partitionsOrDense is SparCML's dynamic allreduce: sparse while that sends less. An entry is two words, so a result
// with more than n/2 entries is sent as n values.
func partitionsOrDense(e *engine) exchange {
	return &partitionExchange{
		partitionReducer: newPartitionReducer(e),
		allgather:        newAllgather(e),
		orDense:          true,
	}
}

// fills reports whether a total of sums takes more room than all values. If they are encoded, an index takes less than
// a zero value.
func (x *partitionExchange) fills(total int) bool {
	return x.orDense && !x.coded() && 2*total > x.n
}

func (x *partitionExchange) run(ctx context.Context, selected kernel.Entries) result {
	x.locate(selected)
	if x.order.Streams != nil {
		return x.runPadded(ctx, selected)
	}
	sums := x.reduce(ctx, selected, nil)
	total := x.allgather.exchangeLengths(ctx, sums, x.partitionLength)
	if x.fills(total) {
		return x.allgatherPartitions(ctx, sums)
	}
	// Partitions ascend with the ranks, so all lists together are one.
	x.all[0] = x.collectPartitions(ctx, x.allgather, sums)
	return result{lists: x.all[:], scale: x.average}
}

// runPadded is run for devices on which a wait of the host costs more than a longer message. All ranks learn all
// lengths of the first half, which bound those of the second: so the host waits once, and the sums of a partition are
// sent with the maximum room, after their length.
func (x *partitionExchange) runPadded(ctx context.Context, selected kernel.Entries) result {
	g := x.allgather
	x.communicate(ctx, comm.AllGatherCall(x.address(x.lengths), x.address(x.matrix), x.size, dtype.I32))
	x.read(ctx)
	room := func(i int) int {
		_, length := x.partition(i % x.size)
		return length
	}
	all := x.checkWords(x.matrix, x.size*x.size, room, "its number of entries for a partition")
	total := 0
	for to := range g.lengths {
		length := 0
		for from := range x.size {
			length += int(all[from*x.size+to])
		}
		length = min(length, x.n) // room for reduce's sums
		g.lengths[to] = length
		total += length
	}
	received := x.host[x.received:]
	for from := range x.size {
		received[from] = all[from*x.size+x.rank]
	}
	sums := x.reduceRead(ctx, selected, nil)
	if x.fills(total) {
		return x.allgatherPartitions(ctx, sums)
	}
	return result{lists: g.collectSlots(ctx, sums), scale: x.average}
}

// allgatherPartitions makes a dense result of all ranks' partitions.
func (x *partitionExchange) allgatherPartitions(ctx context.Context, sums kernel.Entries) result {
	g := x.allgather
	dense := x.denseResult()
	for r := range g.lengths {
		g.displs[r], g.lengths[r] = x.partition(r)
	}
	x.all[0] = sums
	x.merge(dense, dtype.F32, x.all[:], x.average, leftover{})
	partition := base.At(dense, g.displs[x.rank])
	x.communicate(ctx, comm.AllGatherVCall(partition, dense, g.lengths, g.displs, dtype.F32))
	return result{
		dense: dense,
		scale: 1,
	}
}
