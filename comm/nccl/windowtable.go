package nccl

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/link"
)

// windowRow says that a collective is faster on windows from one size to another: bytes of the larger buffer of a rank.
type windowRow struct {
	op      comm.Op // one of windowOps
	ranks   int     // at most
	minimum int     // bytes
	maximum int     // bytes, inclusive
}

// maxWindowRanks is the largest world for which there are rows.
const maxWindowRanks = 8

// windowRows are for GPUs that all reach each other over NVLink, or ranks that share one. The rows of a
// world are those of the smallest number of ranks that fits, for each collective. The figures are microseconds of
// float32 in CUDA graphs, on windows beside plain buffers, of NCCL 2.28.3, from lab/results/gpu and its
// history.
//
// Over PCIe and unknown links, and with more ranks, nothing was measured, and windows are not used.
var windowRows = []windowRow{
	// Two H200s, 2026-11-21: 3.55 beside 5.73 at 8 bytes and 5.84 beside 6.80 at 32 KiB; 9.8 beside 7.4 at 128 KiB
	// and 11.9 beside 9.9 at 512 KiB; 17.8 beside 27.0 at 2 MiB. 2026-11-22: 69.9 beside 73.5 at 16 MiB. Up to 32 MiB
	// by the measurement that each communicator made; equal at 64 MiB.
	{comm.OpAllReduce, 2, 1, 32 << 10},
	{comm.OpAllReduce, 2, 2 << 20, 32 << 20},

	// Four H200s, 2026-11-21 and 22: 3.57 beside 7.65 at 8 bytes and 8.53 beside 10.7 at 64 KiB; 10.8 beside 10.6 at
	// 128 KiB and 12.3 beside 11.1 at 256 KiB; 20.0 beside 25.4 at 2 MiB and 51.9 beside 57.5 at 8 MiB; equal at
	// 16 MiB. Three ranks were not measured and have these rows.
	{comm.OpAllReduce, 4, 1, 64 << 10},
	{comm.OpAllReduce, 4, 2 << 20, 8 << 20},

	// Five to eight ranks were not measured: the smaller bound of two and four, below which windows took
	// little more than half the time.
	{comm.OpAllReduce, maxWindowRanks, 1, 32 << 10},

	// Two H200s, 2026-11-21: 4.3 beside 6.0 at 64 KiB, 12 beside 25 at 4 MiB; faster at every size up to 32 MiB, the
	// largest that communicators measured. More ranks were not measured: small sizes, as of allreduces.
	{comm.OpAllGather, 2, 1, 32 << 20},
	{comm.OpAllGather, maxWindowRanks, 1, 32 << 10},

	// Reduce-scatters were measured by communicators, of which no record is left: small sizes, as of allreduces.
	{comm.OpReduceScatter, maxWindowRanks, 1, 32 << 10},
}

// windowRowsFor returns the rows of a world.
func windowRowsFor(kind link.Kind, ranks int) []windowRow {
	rows := []windowRow{}
	if kind < link.NVLink {
		return rows
	}
	for _, op := range windowOps {
		bound := 0 // the ranks of the rows that fit
		for _, row := range windowRows {
			if row.op == op && ranks <= row.ranks && (bound == 0 || row.ranks == bound) {
				bound = row.ranks
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// isFaster reports whether windows are faster at a size.
func (w *windows) isFaster(op comm.Op, bytes int) bool {
	for _, row := range w.rows {
		if row.op == op && row.minimum <= bytes && bytes <= row.maximum {
			return true
		}
	}
	return false
}

// tabulate finds the rows that hold for this communicator, the same on all ranks: those of the slowest link that any
// rank sees. They are not nil, but may be none.
func (c *Comm) tabulate(ctx context.Context) ([]windowRow, error) {
	ranks := c.WorldSize()
	if ranks > maxWindowRanks {
		return []windowRow{}, nil
	}
	// A GPU is known by its bus and its host, as a number that is not negative.
	gpus := make([]int64, ranks)
	gpus[c.Rank()] = hostNumber(c.rt.Info().PCIBus)
	if err := c.maximum(ctx, gpus); err != nil {
		return nil, err
	}
	seen := link.Slowest(c.rt.Info(), gpus, hostNumber)
	votes := []int64{-int64(seen)}
	if err := c.maximum(ctx, votes); err != nil {
		return nil, err
	}
	return windowRowsFor(link.Kind(-votes[0]), ranks), nil
}
