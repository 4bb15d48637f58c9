package p2p

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// inOrder is what orders an endpoint's operations in place of a communicator.
type inOrder struct{ *endpoint }

func (o inOrder) Stream() *cuda.Stream { return o.rt.Stream() }

// Captured operations can be replayed, on several streams and between others, and give what they
// should every time.
func TestGraphsMixWithEagerCalls(t *testing.T) {
	const ranks, most = 2, 100 << 10
	ends := world(t, openGPUs(t, 2), ranks, small(ranks), 20*time.Second)
	const seed = 7
	rng := rand.New(rand.NewPCG(seed, 0))
	var steps []step
	for len(steps) < 60 {
		if s := randomStep(rng, ranks, most); !s.inPlace { // which would change what a replay reads
			steps = append(steps, s)
		}
	}
	wanted := reference(t, ranks, steps)
	require.NoError(t, each(ends, func(e *endpoint) error {
		stream := e.rt.Stream()
		bufs, plans, recvs := make([]buffers, len(steps)), make([]plan, len(steps)), make([]uintptr, len(steps))
		for i, s := range steps {
			var err error
			if bufs[i], err = newBuffers(e.rt, ranks*most+4096); err != nil {
				return err
			}
			send, recv, err := bufs[i].prepare(s, e.rank, ranks)
			if err != nil {
				return err
			}
			recvs[i], plans[i] = recv, e.planOf(s, send, recv)
		}
		var graphs []*cuda.Graph
		for part := range 3 {
			g, err := stream.Capture(func() error {
				var errs []error
				e.rt.Serialize(inOrder{e})
				for i := part; i < len(steps); i += 4 { // the fourth part stays eager
					errs = append(errs, e.submit(stream, plans[i]))
				}
				return errors.Join(errs...)
			})
			if err != nil {
				return err
			}
			defer g.Close() //nolint:errcheck
			graphs = append(graphs, g)
		}
		other, err := e.rt.NewStream(0)
		if err != nil {
			return err
		}
		order := rand.New(rand.NewPCG(seed, 1)) // the same on all ranks
		for range 40 {
			var ran []int
			for range 3 {
				if part := order.IntN(4); part < 3 {
					if err := graphs[part].Launch([]*cuda.Stream{stream, other}[order.IntN(2)]); err != nil {
						return err
					}
					for i := part; i < len(steps); i += 4 {
						ran = append(ran, i)
					}
				} else {
					i := 3 + 4*order.IntN(len(steps)/4)
					if err := e.submit(stream, plans[i]); err != nil {
						return err
					}
					ran = append(ran, i)
				}
			}
			if err := e.wait(t.Context(), stream); err != nil {
				return err
			}
			for _, i := range ran {
				if err := bufs[i].verify(steps[i], e.rank, ranks, recvs[i], wanted[i][e.rank]); err != nil {
					return err
				}
			}
			for _, i := range ran {
				_, nr := steps[i].lengths(ranks)
				if err := e.rt.Fill(recvs[i], nr*steps[i].dt.Size(), dtype.U8, 0x5a); err != nil {
					return err
				}
			}
		}
		for _, b := range bufs {
			if err := b.free(); err != nil {
				return err
			}
		}
		return nil
	}))
}

// A rank whose peer does not come stops waiting when its context ends, or after
// the limit, in whatever kernel it is, and says for whom it waited.
func TestAPeerThatDoesNotCome(t *testing.T) {
	for _, kind := range []string{"at once", "in rings", "moved", "moved in rings", "barrier", "graph"} {
		for _, way := range []string{"deadline", "cancel", "limit"} {
			t.Run(kind+"/"+way, func(t *testing.T) {
				limit := time.Hour
				if way == "limit" {
					limit = 300 * time.Millisecond
				}
				ends := world(t, openGPUs(t, 2), 2, small(2), limit)
				e := ends[0]
				stream := e.rt.Stream()
				const bytes = 1 << 20
				buf, err := e.rt.Allocate(2 * bytes)
				require.NoError(t, err)
				defer e.rt.Deallocate(buf) //nolint:errcheck
				require.NoError(t, e.rt.Fill(buf, bytes/4, dtype.F32, 1))
				p := map[string]plan{
					"at once":        e.planned(comm.AllReduceCall(buf, buf, 1000, dtype.F32, comm.Sum)),
					"in rings":       e.planned(comm.AllReduceCall(buf, buf, bytes/4, dtype.F32, comm.Sum)),
					"moved":          e.planned(comm.AllGatherCall(buf+bytes, buf, 100, dtype.U8)),
					"moved in rings": e.planned(comm.BroadcastCall(buf, bytes, dtype.U8, 1)),
					"barrier":        e.barrier(),
					"graph":          e.planned(comm.AllReduceCall(buf, buf, 1000, dtype.F32, comm.Sum)),
				}[kind]
				// A first operation in which the peer takes part.
				require.NoError(t, each(ends, func(e *endpoint) error {
					return errors.Join(e.submit(e.rt.Stream(), e.barrier()), e.wait(t.Context(), e.rt.Stream()))
				}))
				if kind == "graph" {
					g, err := stream.Capture(func() error {
						var errs []error
						for range perGraph {
							errs = append(errs, e.submit(stream, p))
						}
						return errors.Join(errs...)
					})
					require.NoError(t, err)
					defer g.Close() //nolint:errcheck
					require.NoError(t, g.Launch(stream))
					require.NoError(t, g.Launch(stream))
				} else {
					require.NoError(t, e.submit(stream, p))
				}
				ctx, cancel := context.WithCancel(t.Context())
				want := comm.ErrTimeout
				switch way {
				case "deadline":
					ctx, cancel = context.WithTimeout(ctx, 300*time.Millisecond)
				case "cancel":
					want = comm.ErrCanceled
					time.AfterFunc(300*time.Millisecond, cancel)
				}
				defer cancel()
				err = e.wait(ctx, stream)
				require.ErrorIs(t, err, want)
				operation := comm.Op(p.call.operation).String()
				assert.ErrorContains(t, err, "rank 0 waited for rank 1 in operation 2 ("+operation)
				done, err := stream.Done()
				require.NoError(t, err)
				assert.True(t, done, "no kernel is left on the GPU")
				// Later operations do not wait.
				require.NoError(t, e.submit(stream, p))
				require.NoError(t, stream.Synchronize(t.Context()))
				assert.Error(t, e.fault(t.Context()))
			})
		}
	}
}

// When a rank aborts, all others stop waiting, with nobody on their hosts who asks, and say which
// rank aborted.
func TestARankThatAbortsEndsTheWorld(t *testing.T) {
	for _, way := range []string{"a kernel tells", "the host tells"} {
		for _, bytes := range []int{4 << 10, 1 << 20} {
			t.Run(fmt.Sprint(way, " ", bytes), func(t *testing.T) {
				ends := world(t, openGPUs(t, 3), 3, small(3), time.Hour)
				graphs := make([]*cuda.Graph, 3)
				require.NoError(t, each(ends, func(e *endpoint) (err error) {
					buf, err := e.rt.Allocate(bytes)
					if err != nil {
						return err
					}
					t.Cleanup(func() { assert.NoError(t, e.rt.Deallocate(buf)) })
					stream := e.rt.Stream()
					graphs[e.rank], err = stream.Capture(func() (err error) {
						for range 4 {
							p := e.planned(comm.AllReduceCall(buf, buf, bytes/4, dtype.F32, comm.Sum))
							err = errors.Join(err, e.submit(stream, p))
						}
						return err
					})
					return errors.Join(err, e.rt.Fill(buf, bytes, dtype.U8, 0),
						graphs[e.rank].Launch(stream), e.wait(t.Context(), stream))
				}))
				// Rank 2 does not come.
				waiting := ends[1:2]
				want := "until rank 2 aborted"
				if way == "a kernel tells" {
					waiting, want = ends[:2], "until rank 0 aborted, which waited for rank"
				}
				for _, e := range waiting {
					require.NoError(t, graphs[e.rank].Launch(e.rt.Stream()))
					require.NoError(t, graphs[e.rank].Launch(e.rt.Stream()))
				}
				began := time.Now()
				if way == "a kernel tells" {
					ends[0].stopWaiting()
				} else {
					require.True(t, ends[2].leave(t.Context(), ends[2].rt.Stream()))
				}
				require.NoError(t, each(waiting, func(e *endpoint) error {
					return e.rt.Stream().Synchronize(context.Background())
				}))
				t.Logf("all had left after %v", time.Since(began))
				err := ends[1].fault(t.Context())
				assert.ErrorIs(t, err, comm.ErrPeerFailed)
				assert.ErrorContains(t, err, want)
				if way == "a kernel tells" {
					assert.ErrorIs(t, ends[0].fault(t.Context()), comm.ErrCanceled)
				}
				for _, g := range graphs {
					assert.NoError(t, g.Close())
				}
			})
		}
	}
}

// Of ranks whose deadlines are near each other the first tells the others. A rank whose own deadline has passed as
// well gets its own error, which names all ranks known to be missing.
func TestErrorsOfNearDeadlines(t *testing.T) {
	expired, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	canceled, cancelNow := context.WithCancel(t.Context())
	cancelNow()
	const wait = "rank 2 waited for rank 3 in operation 5 (allreduce)"
	const until = wait + " until rank 1 aborted"
	for _, c := range []struct {
		name   string
		reason uint32
		ctx    context.Context
		want   error
		text   string
	}{
		{"nobody told, the deadline passed", reasonAsked, expired, comm.ErrTimeout, wait},
		{"nobody told, canceled", reasonAsked, canceled, comm.ErrCanceled, wait},
		{"nobody told, the limit passed", reasonTimedOut, t.Context(), comm.ErrTimeout, wait + " for more than 1s"},
		{"told", 2<<8 | 4, t.Context(), comm.ErrPeerFailed, until + ", which waited for rank 3"},
		{"told by a host", 2 << 8, t.Context(), comm.ErrPeerFailed, until},
		{"told, the deadline passed", 2<<8 | 4, expired, comm.ErrTimeout, until + ", which waited for rank 3"},
		{"told, canceled", 2 << 8, canceled, comm.ErrCanceled, until},
	} {
		e := &endpoint{watch: &watch{
			told:      1,
			rank:      2,
			peer:      3,
			operation: uint32(comm.OpAllReduce),
			epoch:     5,
			reason:    c.reason,
			limit:     int64(time.Second),
		}}
		err := e.fault(c.ctx)
		require.ErrorIs(t, err, c.want, c.name)
		assert.ErrorContains(t, err, c.text, c.name)
		for _, other := range []error{comm.ErrTimeout, comm.ErrCanceled, comm.ErrPeerFailed} {
			assert.Equal(t, other == c.want, errors.Is(err, other), "%s: %v", c.name, other)
		}
	}
	assert.NoError(t, (&endpoint{watch: new(watch)}).fault(expired), "no kernel aborted")
}

// Ranks with different options do not form a world, and no rank waits for long.
func TestRanksThatDisagree(t *testing.T) {
	gpus := openGPUs(t, 2)
	errs := make([]error, 2)
	err := runLocal(t, 2, func(ctx context.Context, c comm.Communicator) error {
		s := small(2)
		s.oneStep += c.Rank()
		_, _, errs[c.Rank()] = connect(ctx, c, gpus[c.Rank()], s, time.Second, byTable)
		return nil
	})
	require.NoError(t, err)
	for rank, err := range errs {
		assert.ErrorIs(t, err, comm.ErrMismatch, fmt.Sprint(rank))
	}
}
