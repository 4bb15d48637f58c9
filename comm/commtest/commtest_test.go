package commtest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A suite that cannot fail is worth nothing: the tests below add one defect each to a good communicator, and expect the
// case that is there for it to report it.

// faulty is a communicator that can be broken method by method.
type faulty struct {
	comm.Methods
	comm.Wrapped
	rt runtime.Runtime

	change  func(c *comm.Call)      // changes a call, also one of a group
	do      func(c comm.Call) error // makes a call
	group   func(calls []comm.Call) error
	sync    func(ctx context.Context) error
	barrier func(ctx context.Context) error
	split   func(ctx context.Context, color, key int) (comm.Communicator, error)
	close   func() error
}

func newFaulty(c comm.Communicator, rt runtime.Runtime, fault func(f *faulty)) *faulty {
	f := &faulty{
		Wrapped: comm.Wrap(c), rt: rt,
		change:  func(*comm.Call) {},
		do:      func(call comm.Call) error { return call.Make(c) },
		group:   func(calls []comm.Call) error { return c.Group(calls...) },
		sync:    c.Sync,
		barrier: c.Barrier,
		split:   c.Split,
		close:   c.Close,
	}
	f.Methods = comm.Methods{
		Do: func(c comm.Call) error {
			f.change(&c)
			return f.do(c)
		},
		Together: func(calls []comm.Call) error {
			calls = slices.Clone(calls)
			for i := range calls {
				f.change(&calls[i])
			}
			return f.group(calls)
		},
	}
	fault(f)
	return f
}

func (f *faulty) Sync(ctx context.Context) error    { return f.sync(ctx) }
func (f *faulty) Barrier(ctx context.Context) error { return f.barrier(ctx) }
func (f *faulty) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	return f.split(ctx, color, key)
}
func (f *faulty) Close() error { return f.close() }

// instead replaces one operation.
func (f *faulty) instead(op comm.Op, do func(c comm.Call) error) {
	f.do = func(c comm.Call) error {
		if c.Op == op {
			return do(c)
		}
		return c.Make(f.Communicator)
	}
}

// afterAllReduce does something to the buffers of each allreduce, when it is
// done.
func (f *faulty) afterAllReduce(do func(c comm.Call)) {
	var pending []func()
	f.instead(comm.OpAllReduce, func(c comm.Call) error {
		if err := c.Make(f.Communicator); err != nil || c.Count == 0 {
			return err
		}
		pending = append(pending, func() { do(c) })
		return nil
	})
	f.sync = func(ctx context.Context) error {
		err := f.Communicator.Sync(ctx)
		for _, p := range pending {
			p()
		}
		pending = nil
		return err
	}
}

// flip changes the lowest bit of the byte at ptr.
func (f *faulty) flip(ptr uintptr) {
	var b [1]byte
	_ = f.rt.CopyOut(b[:], ptr)
	b[0] ^= 1
	_ = f.rt.CopyIn(ptr, b[:])
}

// onSplit breaks what Split makes, for faults that must not hit the world.
func (f *faulty) onSplit(fault func(f *faulty)) {
	f.split = func(ctx context.Context, color, key int) (comm.Communicator, error) {
		c, err := f.Communicator.Split(ctx, color, key)
		if err != nil || c == nil {
			return nil, err
		}
		return newFaulty(c, f.rt, fault), nil
	}
}

// faulted is a backend of local ranks with a fault.
func faulted(rt runtime.Runtime, fault func(f *faulty)) Backend {
	return Backend{
		Name: "local",
		Run: func(ctx context.Context, size int, body func(context.Context, Rank) error) error {
			return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, Rank{Comm: newFaulty(c, rt, fault), Runtime: rt})
			})
		},
	}
}

func caseNamed(t *testing.T, name string) testCase {
	i := slices.IndexFunc(cases, func(c testCase) bool { return c.name == name })
	require.GreaterOrEqual(t, i, 0, "no case is named %q", name)
	return cases[i]
}

// unordered says that it adds in another order.
type unordered struct{ comm.Communicator }

func (unordered) FixedOrder() bool { return false }

func (u unordered) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := u.Communicator.Split(ctx, color, key)
	return unordered{c}, err
}

// A backend declares to the suite what its communicators say of their order, and the suite runs what it can.
func TestOrderIsDeclared(t *testing.T) {
	rt := cpu.New()
	defer func() { assert.NoError(t, rt.Close()) }()
	b := faulted(rt, func(f *faulty) {})
	declared := newSuite(b)
	_, err := declared.run(t.Context(), caseNamed(t, "order: declared"), 2)
	require.NoError(t, err)
	assert.Empty(t, caseNamed(t, "order: in parts and in groups").skip(b, 2))

	b.NoFixedOrder = true
	_, err = newSuite(b).run(t.Context(), caseNamed(t, "order: declared"), 2)
	assert.ErrorContains(t, err, "FixedOrder is true, and Backend.NoFixedOrder true")
	assert.Equal(t, "declares that it adds in another order", caseNamed(t, "order: in parts and in groups").skip(b, 2))

	b.Run = func(ctx context.Context, size int, body func(context.Context, Rank) error) error {
		return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
			return body(ctx, Rank{Comm: unordered{c}, Runtime: rt})
		})
	}
	for _, name := range []string{"order: declared", "allreduce"} {
		_, err = newSuite(b).run(t.Context(), caseNamed(t, name), 2)
		require.NoError(t, err)
	}
	b.NoFixedOrder = false
	_, err = newSuite(b).run(t.Context(), caseNamed(t, "order: declared"), 2)
	assert.ErrorContains(t, err, "FixedOrder is false, and Backend.NoFixedOrder false")
}

func TestSuiteReportsFaults(t *testing.T) {
	for _, test := range []struct {
		name   string
		inCase string
		text   string // part of the report
		fault  func(f *faulty)
	}{
		{"maximum is minimum", "allreduce", "max", func(f *faulty) {
			f.change = func(c *comm.Call) {
				if c.Reduce == comm.Max {
					c.Reduce = comm.Min
				}
			}
		}},
		{"average is not divided", "allreduce", "avg", func(f *faulty) {
			f.change = func(c *comm.Call) {
				if c.Reduce == comm.Avg && c.DType.IsFloat() {
					c.Reduce = comm.Sum
				}
			}
		}},
		{"average of integers is done", "allreduce", "want ErrUnsupported", func(f *faulty) {
			f.instead(comm.OpAllReduce, func(c comm.Call) error {
				if c.Reduce == comm.Avg && !c.DType.IsFloat() {
					return nil
				}
				return c.Make(f.Communicator)
			})
		}},
		{"signed is compared as unsigned", "allreduce", "i32, min", func(f *faulty) {
			f.change = func(c *comm.Call) {
				if c.Op == comm.OpAllReduce && c.DType == dtype.I32 {
					c.DType = dtype.U32
				}
			}
		}},
		{"bf16 is taken for f16", "allreduce", "bf16, sum", func(f *faulty) {
			f.change = func(c *comm.Call) {
				if c.Op == comm.OpAllReduce && c.DType == dtype.BF16 {
					c.DType = dtype.F16
				}
			}
		}},
		{"the last element is forgotten", "allreduce", "element", func(f *faulty) {
			f.change = func(c *comm.Call) {
				if c.Op == comm.OpAllReduce {
					c.Count = max(c.Count-1, min(c.Count, 1))
				}
			}
		}},
		{"writes one byte behind the buffer", "allreduce", "wrote behind its buffer", func(f *faulty) {
			f.afterAllReduce(func(c comm.Call) { f.flip(c.Recv + uintptr(c.Bytes())) })
		}},
		{"writes one byte before the buffer", "allreduce", "wrote before its buffer", func(f *faulty) {
			f.afterAllReduce(func(c comm.Call) { f.flip(c.Recv - 1) })
		}},
		{"changes its input", "allreduce", "input has changed", func(f *faulty) {
			f.afterAllReduce(func(c comm.Call) {
				if c.Send != c.Recv {
					f.flip(c.Send)
				}
			})
		}},
		{"results differ in the last bit", "allreduce", "differs in bits from rank", func(f *faulty) {
			f.afterAllReduce(func(c comm.Call) {
				if c.DType == dtype.F32 && f.Rank() == 1 {
					f.flip(c.Recv)
				}
			})
		}},
		{"root is ignored", "broadcast", "root 1", func(f *faulty) {
			f.change = func(c *comm.Call) {
				if c.Op == comm.OpBroadcast {
					c.Peer = 0
				}
			}
		}},
		{"parts are in the wrong places", "allgather", "element", func(f *faulty) {
			f.instead(comm.OpAllGather, func(c comm.Call) error {
				counts, displs := make([]int, f.WorldSize()), make([]int, f.WorldSize())
				for r := range counts {
					counts[r], displs[r] = c.Count, (r+1)%f.WorldSize()*c.Count
				}
				if c.Send == c.Recv+uintptr(f.Rank()*c.Bytes()) {
					return c.Make(f.Communicator)
				}
				return f.Communicator.AllGatherV(c.Send, c.Recv, counts, displs, c.DType)
			})
		}},
		{"displacements are ignored", "allgatherv", "element", func(f *faulty) {
			f.change = func(c *comm.Call) {
				if c.Op != comm.OpAllGatherV || withinRecv(c) { // where they would refuse it
					return
				}
				packed := make([]int, len(c.RecvCounts))
				for r := 1; r < len(packed); r++ {
					packed[r] = packed[r-1] + c.RecvCounts[r-1]
				}
				c.RecvDispls = packed
			}
		}},
		{"tags are lost", "send and receive: tags out of order", "element", func(f *faulty) {
			f.change = func(c *comm.Call) { c.Tag = 0 }
		}},
		{"messages arrive in reverse", "send and receive: one tag keeps its order", "element", func(f *faulty) {
			sent, received := uint32(0), uint32(21)
			f.change = func(c *comm.Call) {
				switch c.Op {
				case comm.OpSend:
					sent++
					c.Tag = sent
				case comm.OpRecv:
					received--
					c.Tag = received
				}
			}
		}},
		{"a group does not start together", "send and receive: ring", "timed out", func(f *faulty) {
			f.group = func(calls []comm.Call) error {
				for _, c := range calls {
					ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
					defer cancel()
					if err := errors.Join(c.Make(f.Communicator), f.Communicator.Sync(ctx)); err != nil {
						return err
					}
				}
				return nil
			}
		}},
		{"a failed group is started", "group that fails submits nothing", "group", func(f *faulty) {
			f.group = func(calls []comm.Call) error {
				var errs []error
				for _, c := range calls {
					errs = append(errs, c.Make(f.Communicator))
				}
				return errors.Join(errs...)
			}
		}},
		{"a barrier that is none", "barrier holds until the last rank comes", "left the barrier", func(f *faulty) {
			f.barrier = f.Communicator.Sync
		}},
		{"a barrier that does not sync", "barrier implies sync", "element", func(f *faulty) {
			var pending func() error
			f.instead(comm.OpAllGather, func(c comm.Call) error {
				pending = func() error { return c.Make(f.Communicator) }
				return nil
			})
			f.sync = func(ctx context.Context) error { return errors.Join(pending(), f.Communicator.Sync(ctx)) }
		}},
		{"keys are ignored", "split: keys reverse the order", "want", func(f *faulty) {
			f.split = func(ctx context.Context, color, _ int) (comm.Communicator, error) {
				return f.Communicator.Split(ctx, color, 0)
			}
		}},
		{"colors are ignored", "split: by parity", "ranks, want", func(f *faulty) {
			f.split = func(ctx context.Context, _, key int) (comm.Communicator, error) {
				return f.Communicator.Split(ctx, 0, key)
			}
		}},
		{"negative colors get in", "split: negative colors stay out", "want nil", func(f *faulty) {
			f.split = func(ctx context.Context, color, key int) (comm.Communicator, error) {
				return f.Communicator.Split(ctx, max(color, 0), key)
			}
		}},
		{"a bad count passes", "misuse: every bad argument has its error", "negative count", func(f *faulty) {
			f.instead(comm.OpAllReduce, func(c comm.Call) error {
				if c.Count < 0 {
					return nil
				}
				return c.Make(f.Communicator)
			})
		}},
		{"a bare sentinel", "misuse: every bad argument has its error", "no *comm.OpError", func(f *faulty) {
			f.instead(comm.OpBroadcast, func(c comm.Call) error {
				if c.Peer < 0 {
					return comm.ErrArgument
				}
				return c.Make(f.Communicator)
			})
		}},
		{"the error names another operation", "misuse: every bad argument has its error", `OpError says "reduce"`, func(f *faulty) {
			f.instead(comm.OpBroadcast, func(c comm.Call) error {
				if c.Peer < 0 {
					return &comm.OpError{Backend: "local", Op: "reduce", Rank: f.Rank(), Err: comm.ErrArgument}
				}
				return c.Make(f.Communicator)
			})
		}},
		{"a bad call is sent all the same", "misuse: on one rank alone", "rank", func(f *faulty) {
			f.instead(comm.OpBroadcast, func(c comm.Call) error {
				err := c.Make(f.Communicator)
				if c.Peer < 0 {
					c.Peer = 0
					_ = c.Make(f.Communicator)
				}
				return err
			})
		}},
		{"closing twice fails", "close: twice", "Close number 2", func(f *faulty) {
			f.onSplit(func(f *faulty) {
				closed := false
				f.close = func() error {
					if closed {
						return comm.ErrClosed
					}
					closed = true
					return f.Communicator.Close()
				}
			})
		}},
		{"a closed communicator works", "close: later calls fail", "afterwards: got <nil>", func(f *faulty) {
			f.onSplit(func(f *faulty) { f.close = func() error { return nil } })
		}},
		{"a cancellation is called a timeout", "fault: sync ends when the context does", "want one of [\"canceled\"]", func(f *faulty) {
			f.onSplit(func(f *faulty) {
				f.sync = func(ctx context.Context) error {
					err := f.Communicator.Sync(ctx)
					if errors.Is(err, comm.ErrCanceled) {
						err = &comm.OpError{Op: "sync", Rank: f.Rank(), Err: comm.ErrTimeout}
					}
					return err
				}
			})
		}},
		{"a dead peer is not noticed", "fault: a rank leaves", "peer failed", func(f *faulty) {
			f.onSplit(func(f *faulty) {
				f.instead(comm.OpAllReduce, func(comm.Call) error { return nil })
				f.sync = func(context.Context) error { return nil }
			})
		}},
		{"what a rank aborts looks done", "fault: a rank aborts before others", "rank 1 of 3: another rank has aborted: got <nil>", func(f *faulty) {
			f.onSplit(func(f *faulty) {
				f.sync = func(ctx context.Context) error {
					err := f.Communicator.Sync(ctx)
					if errors.Is(err, comm.ErrPeerFailed) {
						return nil
					}
					return err
				}
			})
		}},
		{"a disagreement is not noticed", "fault: ranks disagree", "ranks disagree about count", func(f *faulty) {
			f.onSplit(func(f *faulty) {
				f.sync = func(ctx context.Context) error {
					err := f.Communicator.Sync(ctx)
					if errors.Is(err, comm.ErrMismatch) {
						return nil
					}
					return err
				}
			})
		}},
		{"one rank fails", "allgather", "rank 2 has a problem", func(f *faulty) {
			if f.Rank() == 2 {
				f.instead(comm.OpAllGather, func(comm.Call) error { return errors.New("rank 2 has a problem") })
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			// In a bubble, whose clock goes on when all ranks wait for what a fault has lost.
			synctest.Test(t, func(t *testing.T) {
				rt := cpu.New()
				t.Cleanup(func() { _ = rt.Close() }) // a case that fails may leave memory
				s := newSuite(faulted(rt, test.fault))
				c := caseNamed(t, test.inCase)
				require.Empty(t, c.skip(s.Backend, 3))
				_, err := s.run(t.Context(), c, 3)
				assert.ErrorContains(t, err, test.text)
			})
		})
	}
}

// withinRecv reports whether a call sends from its receive buffer, or from between the regions of it.
func withinRecv(c *comm.Call) bool {
	extent := 0
	for r, n := range c.RecvCounts {
		extent = max(extent, c.RecvDispls[r]+n)
	}
	return c.Send >= c.Recv && c.Send < c.Recv+uintptr(extent*c.DType.Size())
}

// A communicator that never comes back is reported, not waited for.
func TestSuiteReportsHangs(t *testing.T) {
	rt := cpu.New()
	t.Cleanup(func() { _ = rt.Close() })
	over, returned := make(chan struct{}), make(chan struct{})
	backend := faulted(rt, func(f *faulty) {
		f.sync = func(context.Context) error {
			<-over
			return errors.New("the test is over")
		}
	})
	run := backend.Run
	backend.Run = func(ctx context.Context, size int, body func(context.Context, Rank) error) error {
		defer close(returned)
		// The deadline must not end what the ranks do before they hang.
		return run(context.WithoutCancel(ctx), size, body)
	}
	s := newSuite(backend, Timeout(time.Millisecond))
	_, err := s.run(t.Context(), caseNamed(t, "allgather"), 2)
	assert.ErrorContains(t, err, "still running")
	close(over)
	<-returned
}

func TestCasesHaveDistinctNames(t *testing.T) {
	var names []string
	for _, c := range cases {
		names = append(names, c.name)
	}
	slices.Sort(names)
	assert.Len(t, slices.Compact(names), len(cases), "%s", strings.Join(names, "\n"))
}
