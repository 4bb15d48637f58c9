package p2p

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// TestRandomCalls makes many random calls, eager and in graphs, and checks every byte
// of what each leaves: its result and what is beside it. As many as a soak, if there is
// to be one, with two ranks, and a fourth of that with four.
func TestRandomCalls(t *testing.T) {
	calls, _ := strconv.Atoi(os.Getenv(faulttest.SoakVariable))
	if calls == 0 {
		calls = 4000
	}
	for _, ranks := range []int{2, 4} {
		calls := calls * 4 / (ranks * ranks)
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			gpus := openGPUs(t, ranks)
			n, err := cuda.Count()
			require.NoError(t, err)
			s := defaults(ranks)
			if ranks > n {
				s.blocks, s.ringBlocks = 16, 16 // all ranks' blocks have to find a place
			}
			ends := world(t, gpus, ranks, s, 20*time.Second)
			seed := uint64(time.Now().UnixNano())
			batches := newRandomBatches(t, seed, ranks, min(24, calls/200))
			// All memory first: the driver may let an allocation wait for kernels.
			runs := make([]*randomRun, ranks)
			require.NoError(t, each(ends, func(e *endpoint) (err error) {
				runs[e.rank], err = newRandomRun(e, batches)
				return err
			}))
			require.NoError(t, each(ends, func(e *endpoint) error {
				return runs[e.rank].first(t.Context(), batches)
			}), "seed %d", seed)
			began := time.Now()
			require.NoError(t, each(ends, func(e *endpoint) error {
				return runs[e.rank].again(t.Context(), seed, calls)
			}), "seed %d", seed)
			t.Logf("seed %d: %d calls in %v", seed, calls, time.Since(began))
			require.NoError(t, each(ends, func(e *endpoint) error { return runs[e.rank].free() }))
		})
	}
}

// randomBatch is some steps that follow each other, and what they give on each rank.
type randomBatch struct {
	steps  []step
	wanted [][][]byte
}

func newRandomBatches(t *testing.T, seed uint64, ranks, n int) []randomBatch {
	const most, size = 16 << 20, 100
	rng := rand.New(rand.NewPCG(seed, 0))
	batches := make([]randomBatch, n)
	for i := range batches {
		b := &batches[i]
		for len(b.steps) < size {
			limit := 512 << 10
			if len(b.steps) == size/2 { // one of many that goes through rings
				limit = most
			}
			b.steps = append(b.steps, randomStep(rng, ranks, limit/ranks))
		}
		b.wanted = reference(t, ranks, b.steps)
	}
	return batches
}

// randomRun is one rank's part.
type randomRun struct {
	e       *endpoint
	stream  *cuda.Stream
	batches []preparedBatch
	got     []byte
}

// preparedBatch is a batch on one rank: its buffers lie one behind the other.
type preparedBatch struct {
	plans   []plan
	bufs    []buffers
	recvs   []uintptr
	graph   *cuda.Graph
	memory  uintptr // what the steps read and write
	initial uintptr // what lies there before
	bytes   int
	left    []byte // what lay there after the first run, which was found right
}

// newRandomRun allocates and fills what the batches need.
func newRandomRun(e *endpoint, batches []randomBatch) (*randomRun, error) {
	run := &randomRun{e: e, stream: e.rt.Stream(), batches: make([]preparedBatch, len(batches))}
	most := 0
	for i, b := range batches {
		if err := run.prepare(&run.batches[i], b.steps); err != nil {
			return nil, err
		}
		most = max(most, run.batches[i].bytes)
	}
	var err error
	run.got, err = e.rt.AllocatePinned(most)
	return run, err
}

func (run *randomRun) prepare(s *preparedBatch, steps []step) (err error) {
	rt, ranks := run.e.rt, run.e.ranks
	sizes := make([]int, len(steps))
	for i, x := range steps {
		send, recv := x.lengths(ranks)
		sizes[i] = (max(send, recv)*x.dt.Size() + 2*guard + 1023) / 512 * 512
		s.bytes += 2 * sizes[i]
	}
	if s.memory, err = rt.Allocate(s.bytes); err != nil {
		return err
	}
	if s.initial, err = rt.Allocate(s.bytes); err != nil {
		return err
	}
	at := s.memory
	for i, x := range steps {
		b := buffers{rt: rt, send: at, recv: at + uintptr(sizes[i]), bytes: sizes[i]}
		at += uintptr(2 * sizes[i])
		send, recv, err := b.prepare(x, run.e.rank, ranks)
		if err != nil {
			return err
		}
		s.bufs = append(s.bufs, b)
		s.recvs = append(s.recvs, recv)
		s.plans = append(s.plans, run.e.planOf(x, send, x.told(run.e.rank, recv)))
	}
	s.left = make([]byte, s.bytes)
	if err := errors.Join(rt.Copy(s.initial, s.memory, s.bytes), rt.Synchronize(context.Background())); err != nil {
		return err
	}
	s.graph, err = run.stream.Capture(func() error { return run.submit(s.plans) })
	return err
}

func (run *randomRun) submit(plans []plan) error {
	for _, p := range plans {
		if err := run.e.submit(run.stream, p); err != nil {
			return err
		}
	}
	return nil
}

// first runs all batches once, and compares with package local.
func (run *randomRun) first(ctx context.Context, batches []randomBatch) error {
	e := run.e
	for i := range run.batches {
		s := &run.batches[i]
		if err := errors.Join(run.submit(s.plans), e.wait(ctx, run.stream)); err != nil {
			return fmt.Errorf("batch %d: %w", i, err)
		}
		for k, x := range batches[i].steps {
			if err := s.bufs[k].verify(x, e.rank, e.ranks, s.recvs[k], batches[i].wanted[k][e.rank]); err != nil {
				return fmt.Errorf("batch %d: %w", i, err)
			}
		}
		if err := e.rt.CopyOut(s.left, s.memory); err != nil {
			return err
		}
	}
	return nil
}

// again runs a few batches in random order, some of them as graphs, compares what
// they leave with what the first run left, and begins anew.
func (run *randomRun) again(ctx context.Context, seed uint64, calls int) error {
	order := rand.New(rand.NewPCG(seed, 1)) // the same on all ranks
	for done := 0; done < calls; {
		round := order.Perm(len(run.batches))[:1+order.IntN(min(4, len(run.batches)))]
		for _, i := range round {
			s := &run.batches[i]
			err := run.e.rt.Copy(s.memory, s.initial, s.bytes)
			if order.IntN(2) == 0 {
				err = errors.Join(err, s.graph.Launch(run.stream))
			} else {
				err = errors.Join(err, run.submit(s.plans))
			}
			if err != nil {
				return err
			}
			done += len(s.plans)
		}
		if err := run.e.wait(ctx, run.stream); err != nil {
			return fmt.Errorf("after %d calls: %w", done, err)
		}
		for _, i := range round {
			s := &run.batches[i]
			got := run.got[:s.bytes]
			if err := run.e.rt.CopyOut(got, s.memory); err != nil {
				return err
			}
			if !bytes.Equal(got, s.left) {
				return fmt.Errorf("after %d calls, batch %d: rank %d got other bytes than in the first run",
					done, i, run.e.rank)
			}
		}
	}
	return nil
}

func (run *randomRun) free() error {
	errs := []error{run.e.rt.FreePinned(run.got)}
	for _, s := range run.batches {
		errs = append(errs, s.graph.Close(), run.e.rt.Deallocate(s.memory), run.e.rt.Deallocate(s.initial))
	}
	return errors.Join(errs...)
}
