// Package bench measures collectives the way nccl-tests does
// (https://github.com/NVIDIA/nccl-tests), on any backend: time, algorithm and
// bus bandwidth, and the number of wrong elements, for a range of sizes.
package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
)

// Result is one line of `tutti bench --json`.
type Result struct {
	Collective string `json:"collective"`
	Backend    string `json:"backend"`
	Ranks      int    `json:"ranks"`
	// Bytes is the size as nccl-tests counts it: of the larger of a rank's two
	// buffers.
	Bytes int `json:"bytes"`
	// Count of elements: of a rank's part for allgather, reducescatter and
	// alltoall, of the whole buffer for the others.
	Count int    `json:"count"`
	DType string `json:"dtype"`
	// Op of a reduction, "none" for other collectives.
	Op string `json:"op"`
	// Time of one call until its result is there, in microseconds, on the
	// slowest rank.
	Time  float64 `json:"time_us"`
	AlgBW float64 `json:"algbw_gbps"` // Bytes over Time, in 10^9 bytes per second
	BusBW float64 `json:"busbw_gbps"`
	Wrong *int64  `json:"wrong"` // elements, over all ranks; null if not checked
	Place Place   `json:"-"`
	Root  int     `json:"-"`
}

// Run measures. It is collective: every rank calls it with the same
// configuration. On rank 0, report is called for each size with a result for
// each of the collective's places that was measured; elsewhere it is not
// called.
func Run(ctx context.Context, r backend.Rank, cfg Config, report func([]Result)) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	k, err := find(cfg.Collective)
	if err != nil {
		return err
	}
	ref, err := newReference(k, cfg.DType, cfg.Op, r.Comm.WorldSize())
	if err != nil {
		return err
	}
	previous := 0
	for _, bytes := range cfg.Sizes {
		count := max(1, bytes/(cfg.DType.Size()*k.sizeParts(r.Comm.WorldSize())))
		if count == previous {
			continue // several small sizes round to the same count
		}
		previous = count
		results, err := measureSize(ctx, r, cfg, ref, count)
		if err != nil {
			return fmt.Errorf("%s of %d elements: %w", k.name, count, err)
		}
		if r.Comm.Rank() == 0 {
			report(results)
		}
	}
	return nil
}

// measureSize measures one size in each place.
func measureSize(ctx context.Context, r backend.Rank, cfg Config, ref *reference, count int) ([]Result, error) {
	var results []Result
	for _, place := range cfg.Places {
		if !slices.Contains(ref.kind.places, place) {
			continue
		}
		result, err := measure(ctx, r, cfg, ref, count, place)
		if err != nil {
			return nil, err
		}
		results = append(results, result)
	}
	return results, nil
}

// measure measures one size in one place.
func measure(ctx context.Context, r backend.Rank, cfg Config, ref *reference, count int, place Place) (_ Result, err error) {
	w, free, err := allocate(r, cfg, ref.kind, count, place)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, free()) }()
	if err := prepare(r, ref, w); err != nil {
		return Result{}, err
	}
	call := func() error {
		if err := ref.kind.submit(r.Comm, w); err != nil {
			return err
		}
		return r.Comm.Sync(ctx)
	}
	run := timeCalls(r, call)
	iterations, err := cfg.settle(ctx, r, run)
	if err != nil {
		return Result{}, err
	}
	perCall, err := cfg.medianTime(ctx, r, run, iterations)
	if err != nil {
		return Result{}, err
	}

	p := r.Comm.WorldSize()
	bytes := count * ref.kind.sizeParts(p) * cfg.DType.Size()
	result := Result{
		Collective: ref.kind.name,
		Backend:    cfg.Backend,
		Ranks:      p,
		Bytes:      bytes,
		Count:      count,
		DType:      cfg.DType.String(),
		Op:         "none",
		Place:      place,
		Root:       ref.kind.root,
	}
	if ref.kind.reduces {
		result.Op = cfg.Op.String()
	}
	result.setTime(perCall, ref.kind.busFactor(float64(p)))
	if cfg.Check {
		wrong, err := check(ctx, r, ref, w, call)
		if err != nil {
			return Result{}, err
		}
		result.Wrong = &wrong
	}
	return result, nil
}

// setTime fills in a time and the bandwidths that follow from it.
func (r *Result) setTime(seconds, busFactor float64) {
	r.Time = significant(seconds * 1e6)
	if seconds > 0 {
		gbps := float64(r.Bytes) / seconds / 1e9
		r.AlgBW, r.BusBW = significant(gbps), significant(gbps*busFactor)
	}
}

// allocate makes the buffers of an operation and returns how to free them.
func allocate(r backend.Rank, cfg Config, k *kind, count int, place Place) (work, func() error, error) {
	p := r.Comm.WorldSize()
	part := count * cfg.DType.Size()
	w := work{count: count, dt: cfg.DType, op: cfg.Op}
	sendBytes, recvBytes := part*k.sendParts(p), part*k.recvParts(p)

	var err error
	if place == InPlace {
		var buf uintptr
		if buf, err = r.Runtime.Allocate(max(sendBytes, recvBytes)); err != nil {
			return w, nil, err
		}
		w.send, w.recv = buf, buf
		switch own := uintptr(r.Comm.Rank() * part); {
		case sendBytes < recvBytes:
			w.send += own
		case sendBytes > recvBytes:
			w.recv += own
		}
		return w, func() error { return r.Runtime.Deallocate(buf) }, nil
	}
	if w.send, err = r.Runtime.Allocate(sendBytes); err != nil {
		return w, nil, err
	}
	if w.recv, err = r.Runtime.Allocate(recvBytes); err != nil {
		return w, nil, errors.Join(err, r.Runtime.Deallocate(w.send))
	}
	return w, func() error {
		return errors.Join(r.Runtime.Deallocate(w.send), r.Runtime.Deallocate(w.recv))
	}, nil
}

// prepare poisons the result and then writes the input, of which in place the
// result is a part or the whole.
func prepare(r backend.Rank, ref *reference, w work) error {
	p, rank := r.Comm.WorldSize(), r.Comm.Rank()
	if err := poison(r.Runtime, w.recv, w.count*ref.kind.recvParts(p), w.dt.Size()); err != nil {
		return err
	}
	if ref.kind.root >= 0 && ref.kind.root != rank {
		return nil
	}
	return ref.fill(r.Runtime, rank, w.send, w.count)
}

// check runs the operation once on fresh data and counts wrong elements over
// all ranks.
func check(ctx context.Context, r backend.Rank, ref *reference, w work, call func() error) (int64, error) {
	if err := r.Comm.Barrier(ctx); err != nil {
		return 0, err
	}
	if err := prepare(r, ref, w); err != nil {
		return 0, err
	}
	if err := call(); err != nil {
		return 0, err
	}
	own, err := ref.wrong(r.Runtime, r.Comm.Rank(), w.recv, w.count)
	if err != nil {
		return 0, err
	}
	total, err := backend.Reduce(ctx, r, []int64{own}, comm.Sum)
	if err != nil {
		return 0, err
	}
	return total[0], nil
}
