// Package bench measures collectives as nccl-tests does (https://github.com/NVIDIA/nccl-tests), on any backend. It
// reports time, algorithm and bus bandwidth, and the number of wrong elements for a range of sizes.
package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/tutti-go/tutti/cmd/tutti/internal/attempt"
	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/measure"
)

// Result is one line of `tutti bench --json`.
type Result struct {
	Collective string `json:"collective"` // its name
	Backend    string `json:"backend"`    // its name
	Device     string `json:"device"`     // rank 0's
	Ranks      int    `json:"ranks"`      // of the world
	// Bytes is the size of the larger of a rank's two buffers, as nccl-tests counts it.
	Bytes int `json:"bytes"`
	// Count is a number of elements: of a rank's part for allgather, reducescatter and alltoall, of the whole buffer
	// for other collectives.
	Count int    `json:"count"`
	DType string `json:"dtype"`
	// Op of a reduction, "none" for other collectives.
	Op string `json:"op"`
	// Graph: the calls were captured in a graph and replayed.
	Graph bool `json:"graph"`
	// Symmetric: the communicator allocated the buffers ([comm.SymmetricAllocator]).
	Symmetric bool `json:"symmetric"`
	// PeerMemory: the calls used peer memory ([comm/p2p]).
	PeerMemory bool `json:"p2p"`
	// HandOver is the largest of [Config.Sizes] that used peer memory; -1: none did, nil: none was meant to.
	HandOver *int `json:"p2p_up_to_bytes"`
	// Time of one call in microseconds on the slowest rank. It is the host's time until the result is complete or, on
	// ranks with a [backend.Stream], the device's time while calls are queued one after the other.
	Time  float64 `json:"time_us"`
	AlgBW float64 `json:"algbw_gb_per_s"` // Bytes over Time, in 10^9 bytes per second
	// BusBW is the bandwidth of a link; nil for one rank, which has no link.
	BusBW *float64 `json:"busbw_gb_per_s"`
	Wrong *int64   `json:"wrong"` // elements, over all ranks; null if not verified
	Place Place    `json:"place"`
	Root  int      `json:"root"` // -1 for none
	// Locations are those of the ranks, see [backend.Locations].
	Locations []string `json:"-"`
}

// Measurement is the state that a process's ranks share when they measure a collective.
type Measurement struct {
	cfg    Config    // valid
	once   sync.Once // guards making shared
	shared *tables   // nil before a rank first needs them
}

// New prepares a measurement. An error names a setting that cannot be used.
func New(cfg Config) (*Measurement, error) {
	return &Measurement{cfg: cfg}, cfg.Validate()
}

// tables returns the tables for a number of ranks, which all ranks call it with.
func (m *Measurement) tables(ranks int) *tables {
	m.once.Do(func() {
		m.shared = newTables(m.cfg.Collective, m.cfg.DType, m.cfg.Op, ranks)
	})
	return m.shared
}

// setup is the state common to all sizes of a measurement on one rank.
type setup struct {
	backend.Rank
	cfg       Config   // of the measurement
	tables    *tables  // of this process's ranks
	memory    memory   // of the buffers
	handOver  *int     // largest piece in bytes that goes over peer memory
	locations []string // of all ranks
}

// peerMemory is implemented by communicators over peer memory.
type peerMemory interface {
	HandOver(op comm.Op, dt dtype.DType, reduce comm.ReduceOp) int
}

// handOver returns the largest piece in bytes that goes over peer memory; nil if the rank's communicator does not use
// peer memory.
func (m *Measurement) handOver(r backend.Rank) *int {
	c, ok := comm.As[peerMemory](r.Comm)
	if !ok {
		return nil
	}
	limit := c.HandOver(m.cfg.Collective.Op, m.cfg.DType, m.cfg.Op)
	return &limit
}

// newSetup is collective.
func (m *Measurement) newSetup(ctx context.Context, r backend.Rank) (_ *setup, err error) {
	cfg := m.cfg
	if cfg.Graph && r.Stream == nil {
		return nil, backend.Needs(cfg.Backend, "--graph", "CUDA graphs")
	}
	s := &setup{
		Rank:   r,
		cfg:    cfg,
		tables: m.tables(r.Comm.WorldSize()),
	}
	if s.memory, err = newMemory(r, cfg); err != nil {
		return nil, err
	}
	s.handOver = m.handOver(r)
	// An operation on nothing is cheap. It fails if the backend does not support it at all.
	if err := m.cfg.Collective.submission(r.Comm, comm.Call{
		Op:     m.cfg.Collective.Op,
		DType:  cfg.DType,
		Reduce: cfg.Op,
	})(); err != nil {
		return nil, backend.Unsupported(cfg.Backend, err)
	}
	sendParts, recvParts := m.cfg.Collective.parts(s.tables.ranks)
	if err := r.Fits(
		cfg.Backend,
		"the buffers",
		float64(slices.Max(cfg.Sizes)/m.cfg.Collective.sizeParts(s.tables.ranks))*float64(sendParts+recvParts),
		"--max or --ranks",
	); err != nil {
		return nil, err
	}
	if err := r.Comm.Sync(ctx); err != nil {
		return nil, err
	}
	s.locations, err = backend.Locations(ctx, r)
	return s, err
}

// Run measures on one rank. It is collective: every rank calls it, and ranks of one process call it on the same
// measurement. Rank 0 calls report for each size with a result for each measured place; other ranks do not call
// report.
//
// A feature that the ranks' backend lacks produces a [backend.OptionError].
func (m *Measurement) Run(ctx context.Context, r backend.Rank, report func([]Result)) error {
	s, err := m.newSetup(ctx, r)
	if err != nil {
		return err
	}
	cfg := m.cfg
	k := m.cfg.Collective
	previous := 0
	for _, bytes := range cfg.Sizes {
		count := max(1, bytes/(cfg.DType.Size()*k.sizeParts(r.Comm.WorldSize())))
		if count == previous {
			continue // several small sizes round to one count
		}
		previous = count
		results, err := s.measureSize(ctx, count)
		if err != nil {
			return fmt.Errorf("%v of %d elements: %w", k, count, err)
		}
		if r.Comm.Rank() == 0 {
			report(results)
		}
	}
	return nil
}

// measureSize measures one size in each place.
func (s *setup) measureSize(ctx context.Context, count int) ([]Result, error) {
	var results []Result
	for _, place := range s.cfg.Places {
		result, err := s.measure(ctx, count, place)
		if err != nil {
			return nil, err
		}
		results = append(results, result)
	}
	return results, nil
}

// measure measures one size in one place.
func (s *setup) measure(ctx context.Context, count int, place Place) (_ Result, err error) {
	w, free, err := s.allocate(ctx, count, place)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = free(err) }()
	if err := s.prepare(ctx, w); err != nil {
		return Result{}, err
	}
	op, err := newOperation(ctx, s.Rank, s.tables.collective.submission(s.Comm, w), s.cfg.Graph)
	if err != nil {
		return Result{}, err
	}
	defer func() {
		err = errors.Join(err, op.close())
	}()
	var a attempt.Calls
	iterations := attempt.Get(&a, func() (int, error) {
		return s.cfg.calibrate(ctx, s.Rank, op.run)
	})
	seconds := attempt.Get(&a, func() ([][]float64, error) {
		return measure.InTurns(
			0,
			s.cfg.Rounds,
			slowest(ctx, s.Rank),
			perIteration(ctx, op.run, iterations),
		)
	})
	if a.Err != nil {
		return Result{}, a.Err
	}
	result := s.result(count, place)
	result.setTime(measure.Median(seconds[0]), s.tables.collective.busFactor(float64(result.Ranks)))
	if s.cfg.Verify {
		wrong := attempt.Get(&a, func() (int64, error) {
			return s.verify(ctx, w, op)
		})
		result.Wrong = &wrong
	}
	return result, a.Err
}

// result describes a measurement without its times.
func (s *setup) result(count int, place Place) Result {
	k := s.tables.collective
	p := s.Comm.WorldSize()
	result := Result{
		Collective: k.String(),
		Backend:    s.cfg.Backend,
		Device:     s.Runtime.Name(),
		Ranks:      p,
		Bytes:      count * k.sizeParts(p) * s.cfg.DType.Size(),
		Count:      count,
		DType:      s.cfg.DType.String(),
		Op:         "none",
		Graph:      s.cfg.Graph,
		Symmetric:  s.memory.symmetric,
		Place:      place,
		Root:       k.root(),
		Locations:  s.locations,
	}
	if k.Reduces() {
		result.Op = s.cfg.Op.String()
	}
	if s.handOver != nil {
		parts := k.sizeParts(p)
		result.PeerMemory = p > 1 && count*s.cfg.DType.Size() <= *s.handOver
		upTo := -1
		for _, bytes := range s.cfg.Sizes {
			if p > 1 && bytes/parts <= *s.handOver {
				upTo = bytes
			}
		}
		result.HandOver = &upTo
	}
	return result
}

// setTime sets a time and the bandwidths that follow from it.
func (r *Result) setTime(seconds, busFactor float64) {
	r.Time = significant(seconds * 1e6)
	if seconds > 0 {
		rate := float64(r.Bytes) / seconds / 1e9
		r.AlgBW = significant(rate)
		if r.Ranks > 1 {
			bus := significant(rate * busFactor)
			r.BusBW = &bus
		}
	}
}

// prepare fills the result with a value that results hardly ever have, so that an element that is not written counts
// as wrong. Then it writes the input, which in place is part or all of the result's buffer.
func (s *setup) prepare(ctx context.Context, w comm.Call) error {
	p := s.Comm.WorldSize()
	rank := s.Comm.Rank()
	_, parts := s.tables.collective.parts(p)
	err := s.tables.chunks(ctx, w.Recv, parts*w.Count, func(addr uintptr, _ int, piece []byte) error {
		return s.Runtime.Fill(addr, len(piece), dtype.U8, 0xa5)
	})
	if err != nil {
		return err
	}
	if root := s.tables.collective.root(); root < 0 || root == rank {
		if err := s.tables.fill(ctx, s.Runtime, rank, w.Send, w.Count); err != nil {
			return err
		}
	}
	return s.Runtime.Synchronize(ctx)
}

// verify runs the operation once on fresh data and counts wrong elements over all ranks.
func (s *setup) verify(ctx context.Context, w comm.Call, op *operation) (int64, error) {
	var a attempt.Calls
	a.Do(func() error { return s.Comm.Barrier(ctx) })
	a.Do(func() error { return s.prepare(ctx, w) })
	a.Do(func() error { return op.call(ctx) })
	wrong := attempt.Get(&a, func() (int64, error) {
		return s.tables.wrong(ctx, s.Runtime, s.Comm.Rank(), w.Recv, w.Count)
	})
	total := attempt.Get(&a, func() ([]int64, error) {
		return backend.Reduce(ctx, s.Rank, []int64{wrong}, comm.Sum)
	})
	if a.Err != nil {
		return 0, a.Err
	}
	return total[0], nil
}

// significant rounds to five significant digits, more than any measurement has.
func significant(v float64) float64 {
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 5, 64), 64)
	return v
}
