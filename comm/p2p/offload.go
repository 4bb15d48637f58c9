package p2p

import (
	"errors"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/link"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

// offloadRow gives the message sizes up to which calls run over peer memory, in bytes of the larger buffer of a rank.
// Larger calls go to the base.
type offloadRow struct {
	link    link.Kind // the slowest one between two of the ranks
	ranks   int       // at most
	sums    int       // allreduces: sums and averages of f64, f32, f16 and bf16
	bytes   int       // reductions of types of one byte, such as fp8
	general int       // other reductions, reduce-scatters, and collectives that only move data
}

// unlimited is the limit of a row that leaves nothing to the base.
const unlimited = math.MaxInt

// offloadRows are ordered by ranks for each link. The figures are microseconds in CUDA graphs, p2p against NCCL
// 2.28.3, from lab/results/gpu and its history. Limits that nobody measured are small, where latency dominates:
// wherever both were measured, one step over peer memory took a third to a half of NCCL's time.
var offloadRows = []offloadRow{
	// Ranks that share a GPU. Not measured side by side: NCCL uses sockets there and took 42,864 for 128 MiB
	// (2026-11-22). The kernel for rounded values took 413 for 100 MiB on one H200 (2026-11-29).
	{link.SameGPU, maxRanks, unlimited, unlimited, unlimited},

	// Two H200s, 2026-11-22: 1.68 against 5.92 at 256 bytes, 14.4 against 32.1 at 4 MiB, 3040 against 3300 at 1 GiB.
	// The measurement that New made at that time left no operation to NCCL (commit a5e8bc5). One-byte types came
	// later: their limit is the largest size in one step.
	{link.NVLink, 2, unlimited, 1 << 20, unlimited},

	// Four H200s, 2026-11-22: 5.01 against 11.0 at 256 KiB, 21.8 against 38.9 at 4 MiB, 40.8 against 52 at 8 MiB; from
	// 16 MiB on New left everything to NCCL. Not measured: three ranks, which send less, and other operations, which
	// are limited to one step.
	{link.NVLink, 4, 8 << 20, 256 << 10, 256 << 10},

	// Not measured. At 1 MiB the bandwidth of NVLink and the latency of two steps predict 11 to 12; NCCL took 16.6 on
	// four GPUs. Other operations are limited to one step.
	{link.NVLink, maxRanks, 1 << 20, 96 << 10, 96 << 10},

	// Not measured. Through host memory, where words cross PCIe twice, two H200s took 4.9 against 9.9 at 1 KiB, and
	// 18.5 against 10.6 at 8 KiB (2026-11-28).
	{link.PCIe, maxRanks, 1 << 10, 1 << 10, 1 << 10},

	// An unknown link counts as PCIe.
	{link.Unknown, maxRanks, 1 << 10, 1 << 10, 1 << 10},
}

// rowFor returns the row of a world. A single rank has none: its base copies.
func rowFor(kind link.Kind, ranks int) offloadRow {
	if ranks == 1 {
		return offloadRow{}
	}
	for _, row := range offloadRows {
		if row.link == kind && ranks <= row.ranks {
			return row
		}
	}
	return offloadRow{}
}

// class is a kind of operation with its own limit.
type class uint8

const (
	wholeSums    class = iota // allreduces
	wholeBytes                // allreduces
	wholeGeneral              // allreduces and broadcasts
	partBytes                 // reduce-scatters, whose pieces are parts of the larger buffer
	partGeneral               // reduce-scatters, allgathers, all-to-alls
	classes
)

// classOf returns the class of a call, and whether it has one.
func classOf(x *comm.Call) (class, bool) {
	oneByte := x.DType.Valid() && x.DType.Size() == 1
	switch x.Op {
	case comm.OpAllReduce:
		if oneByte {
			return wholeBytes, true
		}
		if x.DType.Valid() && words(x.DType) && sums(x.Reduce) {
			return wholeSums, true
		}
		return wholeGeneral, true
	case comm.OpBroadcast:
		return wholeGeneral, true
	case comm.OpReduceScatter:
		if oneByte {
			return partBytes, true
		}
		return partGeneral, true
	case comm.OpAllGather, comm.OpAllToAll:
		return partGeneral, true
	}
	return 0, false
}

// allReductions returns the set of all defined reductions.
func allReductions() (s reductionSet) {
	for _, dt := range dtype.All() {
		for _, op := range reductions.All() {
			if op.Defined(dt) {
				s.add(dt, op)
			}
		}
	}
	return s
}

// offloadTable says which calls a communicator runs itself instead of passing them to its base: calls up to a limit,
// and reductions that the base lacks. It is the same on all ranks, because it follows from the number of ranks, the
// slowest link that any rank sees, and the reductions that the base of any rank lacks.
type offloadTable struct {
	limit [classes]int // bytes of a piece
	lacks reductionSet // of the base of any rank
}

// reductionSet has a bit for each reduction of a type.
type reductionSet [types]uint8

func (s *reductionSet) add(dt dtype.DType, op comm.ReduceOp) {
	s[dt] |= 1 << op
}

func (s *reductionSet) has(dt dtype.DType, op comm.ReduceOp) bool {
	return s[dt]>>op&1 != 0
}

// union adds all reductions of a set.
func (s *reductionSet) union(set reductionSet) {
	for dt, defined := range set {
		s[dt] |= defined
	}
}

// tableOf makes the table from the hellos of all ranks: the reductions that their bases lack, and their links.
func tableOf(bases, links []hello) offloadTable {
	var lacks reductionSet
	for _, h := range bases {
		lacks.union(h.lacks)
	}
	kind := link.SameGPU
	for _, h := range links {
		kind = min(kind, h.link)
	}
	return newOffloadTable(kind, len(bases), lacks)
}

// newOffloadTable makes the table of a world.
func newOffloadTable(kind link.Kind, ranks int, lacks reductionSet) offloadTable {
	row := rowFor(kind, ranks)
	return offloadTable{
		limit: [classes]int{
			wholeSums:    row.sums,
			wholeBytes:   row.bytes,
			wholeGeneral: row.general,
			partBytes:    piece(row.bytes, ranks),
			partGeneral:  piece(row.general, ranks),
		},
		lacks: lacks,
	}
}

// piece returns the bytes of a rank's piece of a buffer.
func piece(bytes, ranks int) int {
	if bytes == unlimited {
		return unlimited
	}
	return bytes / ranks
}

// fixed reports whether the base gets no reductions.
func (t *offloadTable) fixed() bool {
	return t.lacks == allReductions()
}

// lacked reports whether the base lacks the call.
func (t *offloadTable) lacked(x *comm.Call) bool {
	return x.Op.Reduces() && x.Reduce.Defined(x.DType) && t.lacks.has(x.DType, x.Reduce)
}

// has reports whether the communicator runs a call itself.
func (t *offloadTable) has(x *comm.Call) bool {
	if class, ok := classOf(x); ok && x.Bytes() <= t.limit[class] {
		return true
	}
	return t.lacked(x)
}

// HandOver returns the size in bytes above which calls of an operation go to the base: 0 if all do, [math.MaxInt] if
// none do. The size is the size of a piece (see [comm.Call]), and is the same on all ranks. dt and reduce matter for
// reductions only.
func (c *Comm) HandOver(op comm.Op, dt dtype.DType, reduce comm.ReduceOp) int {
	x := comm.Call{
		Op:     op,
		DType:  dt,
		Reduce: reduce,
	}
	if c.offload.lacked(&x) {
		return math.MaxInt
	}
	if class, ok := classOf(&x); ok {
		return c.offload.limit[class]
	}
	return 0
}

// lackedBy finds the reductions that the base lacks, by calls without elements. All ranks make all of these calls,
// also after an error, because a base may compare them.
func lackedBy(base comm.Communicator) (lacks reductionSet, first error) {
	for _, dt := range dtype.All() {
		for _, op := range reductions.All() {
			if !op.Defined(dt) {
				continue
			}
			err := base.AllReduce(0, 0, 0, dt, op)
			switch {
			case errors.Is(err, comm.ErrUnsupported):
				lacks.add(dt, op)
			case first == nil:
				first = err
			}
		}
	}
	return lacks, first
}
