package nccl

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/link"
)

// windowRow is a range of sizes at which a collective is faster on windows, in bytes of the larger buffer of a rank.
type windowRow struct {
	op      comm.Op // one of windowOps
	ranks   int     // maximum
	minimum int     // bytes
	maximum int     // bytes, inclusive
}

// maxWindowRanks is the largest world for which there are rows.
const maxWindowRanks = 8

// windowRows are for GPUs that are all connected by NVLink, or ranks that share one. For each collective, a world uses
// the rows of the smallest number of ranks that fits. The figures are microseconds of float32 in CUDA graphs, windows
// against plain buffers, with NCCL 2.28.3, from lab/results/gpu and its history.
//
// For PCIe, unknown links and more ranks nothing was measured, and windows are not used.
var windowRows = []windowRow{
	// Two H200s, 2026-11-21: 3.55 against 5.73 at 8 bytes and 5.84 against 6.80 at 32 KiB; 9.8 against 7.4 at 128 KiB
	// and 11.9 against 9.9 at 512 KiB; 17.8 against 27.0 at 2 MiB. 2026-11-22: 69.9 against 73.5 at 16 MiB. The bound
	// of 32 MiB comes from the measurement that each communicator once made; equal at 64 MiB.
	{comm.OpAllReduce, 2, 1, 32 << 10},
	{comm.OpAllReduce, 2, 2 << 20, 32 << 20},

	// Four H200s, 2026-11-21 and 22: 3.57 against 7.65 at 8 bytes and 8.53 against 10.7 at 64 KiB; 10.8 against 10.6
	// at 128 KiB and 12.3 against 11.1 at 256 KiB; 20.0 against 25.4 at 2 MiB and 51.9 against 57.5 at 8 MiB; equal at
	// 16 MiB. Three ranks were not measured and share these rows.
	{comm.OpAllReduce, 4, 1, 64 << 10},
	{comm.OpAllReduce, 4, 2 << 20, 8 << 20},

	// Five to eight ranks were not measured. They have the smaller bound of two and four ranks; below it windows took
	// little more than half the time.
	{comm.OpAllReduce, maxWindowRanks, 1, 32 << 10},

	// Two H200s, 2026-11-21: 4.3 beside 6.0 at 64 KiB, 12 beside 25 at 4 MiB; faster at every size up to 32 MiB.
	// 2026-11-30, one run: 31 beside 41 at 16 MiB, 108 beside 119 at 64 MiB, the largest that was measured. More ranks
	// were not measured: they use windows at small sizes only, as for allreduces.
	{comm.OpAllGather, 2, 1, 64 << 20},
	{comm.OpAllGather, maxWindowRanks, 1, 32 << 10},

	// Two H200s, 2026-11-30, one run: 3.7 beside 5.0 at 256 bytes, 4.5 beside 6.0 at 64 KiB and 6.4 beside 6.7 at
	// 256 KiB; 10.3 beside 9.5 at 1 MiB; 17 beside 23 at 4 MiB and 44 beside 48 at 16 MiB; 174 beside 156 at 64 MiB.
	{comm.OpReduceScatter, 2, 1, 256 << 10},
	{comm.OpReduceScatter, 2, 4 << 20, 16 << 20},

	// Communicators measured more ranks, but no record is left: windows serve small sizes only, as for allreduces.
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

// tabulate finds the rows for this communicator, the same on all ranks: the rows of the slowest link that any rank
// sees. The result is never nil, but may be empty.
func (c *Comm) tabulate(ctx context.Context) ([]windowRow, error) {
	ranks := c.WorldSize()
	if ranks > maxWindowRanks {
		return []windowRow{}, nil
	}
	// A GPU is identified by its bus and its host, as a non-negative number.
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
