package commtest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A suite that cannot fail is worth nothing: the tests below break a good
// communicator in one way each, and expect the case that is there for it to
// report it.

// faulty is a communicator that can be broken method by method.
type faulty struct {
	comm.Communicator
	rt runtime.Runtime

	allReduce  func(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error
	broadcast  func(buf uintptr, count int, dt dtype.DType, root int) error
	allGather  func(send, recv uintptr, count int, dt dtype.DType) error
	allGatherV func(send, recv uintptr, counts, displs []int, dt dtype.DType) error
	send, recv func(buf uintptr, count int, dt dtype.DType, peer int, tag uint32) error
	group      func(submit func() error) error
	sync       func(ctx context.Context) error
	barrier    func(ctx context.Context) error
	split      func(ctx context.Context, color, key int) (comm.Communicator, error)
	close      func() error
}

func (f *faulty) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if f.allReduce != nil {
		return f.allReduce(send, recv, count, dt, op)
	}
	return f.Communicator.AllReduce(send, recv, count, dt, op)
}

func (f *faulty) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	if f.broadcast != nil {
		return f.broadcast(buf, count, dt, root)
	}
	return f.Communicator.Broadcast(buf, count, dt, root)
}

func (f *faulty) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	if f.allGather != nil {
		return f.allGather(send, recv, count, dt)
	}
	return f.Communicator.AllGather(send, recv, count, dt)
}

func (f *faulty) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	if f.allGatherV != nil {
		return f.allGatherV(send, recv, counts, displs, dt)
	}
	return f.Communicator.AllGatherV(send, recv, counts, displs, dt)
}

func (f *faulty) Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
	if f.send != nil {
		return f.send(buf, count, dt, dest, tag)
	}
	return f.Communicator.Send(buf, count, dt, dest, tag)
}

func (f *faulty) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	if f.recv != nil {
		return f.recv(buf, count, dt, src, tag)
	}
	return f.Communicator.Recv(buf, count, dt, src, tag)
}

func (f *faulty) Group(submit func() error) error {
	if f.group != nil {
		return f.group(submit)
	}
	return f.Communicator.Group(submit)
}

func (f *faulty) Sync(ctx context.Context) error {
	if f.sync != nil {
		return f.sync(ctx)
	}
	return f.Communicator.Sync(ctx)
}

func (f *faulty) Barrier(ctx context.Context) error {
	if f.barrier != nil {
		return f.barrier(ctx)
	}
	return f.Communicator.Barrier(ctx)
}

func (f *faulty) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	if f.split != nil {
		return f.split(ctx, color, key)
	}
	return f.Communicator.Split(ctx, color, key)
}

func (f *faulty) Close() error {
	if f.close != nil {
		return f.close()
	}
	return f.Communicator.Close()
}

// afterAllReduce does something to the buffers of each allreduce, when it is
// done.
func (f *faulty) afterAllReduce(do func(send, recv uintptr, count int, dt dtype.DType)) {
	var pending []func()
	f.allReduce = func(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
		if err := f.Communicator.AllReduce(send, recv, count, dt, op); err != nil || count == 0 {
			return err
		}
		pending = append(pending, func() { do(send, recv, count, dt) })
		return nil
	}
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
		child := &faulty{Communicator: c, rt: f.rt}
		fault(child)
		return child, nil
	}
}

// faulted is a backend of local ranks with a fault.
func faulted(rt runtime.Runtime, fault func(f *faulty)) Backend {
	return Backend{
		Name: "local",
		Run: func(ctx context.Context, size int, body func(context.Context, Rank) error) error {
			return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				f := &faulty{Communicator: c, rt: rt}
				fault(f)
				return body(ctx, Rank{Comm: f, Runtime: rt})
			})
		},
	}
}

func caseNamed(t *testing.T, name string) testCase {
	i := slices.IndexFunc(cases, func(c testCase) bool { return c.name == name })
	require.GreaterOrEqual(t, i, 0, "no case is named %q", name)
	return cases[i]
}

func TestSuiteReportsFaults(t *testing.T) {
	for _, test := range []struct {
		name   string
		inCase string
		text   string // part of the report
		fault  func(f *faulty)
	}{
		{"maximum is minimum", "allreduce", "max", func(f *faulty) {
			f.allReduce = func(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
				if op == comm.Max {
					op = comm.Min
				}
				return f.Communicator.AllReduce(send, recv, count, dt, op)
			}
		}},
		{"average is not divided", "allreduce", "avg", func(f *faulty) {
			f.allReduce = func(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
				if op == comm.Avg && dt.IsFloat() {
					op = comm.Sum
				}
				return f.Communicator.AllReduce(send, recv, count, dt, op)
			}
		}},
		{"average of integers is done", "allreduce", "want ErrUnsupported", func(f *faulty) {
			f.allReduce = func(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
				if op == comm.Avg && !dt.IsFloat() {
					return nil
				}
				return f.Communicator.AllReduce(send, recv, count, dt, op)
			}
		}},
		{"signed is compared as unsigned", "allreduce", "i32, min", func(f *faulty) {
			f.allReduce = func(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
				if dt == dtype.I32 {
					dt = dtype.U32
				}
				return f.Communicator.AllReduce(send, recv, count, dt, op)
			}
		}},
		{"bf16 is taken for f16", "allreduce", "bf16, sum", func(f *faulty) {
			f.allReduce = func(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
				if dt == dtype.BF16 {
					dt = dtype.F16
				}
				return f.Communicator.AllReduce(send, recv, count, dt, op)
			}
		}},
		{"the last element is forgotten", "allreduce", "element", func(f *faulty) {
			f.allReduce = func(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
				return f.Communicator.AllReduce(send, recv, max(count-1, min(count, 1)), dt, op)
			}
		}},
		{"writes one byte behind the buffer", "allreduce", "wrote behind its buffer", func(f *faulty) {
			f.afterAllReduce(func(_, recv uintptr, count int, dt dtype.DType) { f.flip(recv + uintptr(count*dt.Size())) })
		}},
		{"writes one byte before the buffer", "allreduce", "wrote before its buffer", func(f *faulty) {
			f.afterAllReduce(func(_, recv uintptr, _ int, _ dtype.DType) { f.flip(recv - 1) })
		}},
		{"changes its input", "allreduce", "input has changed", func(f *faulty) {
			f.afterAllReduce(func(send, recv uintptr, _ int, _ dtype.DType) {
				if send != recv {
					f.flip(send)
				}
			})
		}},
		{"results differ in the last bit", "allreduce", "differs in bits from rank", func(f *faulty) {
			f.afterAllReduce(func(_, recv uintptr, _ int, dt dtype.DType) {
				if dt == dtype.F32 && f.Rank() == 1 {
					f.flip(recv)
				}
			})
		}},
		{"root is ignored", "broadcast", "root 1", func(f *faulty) {
			f.broadcast = func(buf uintptr, count int, dt dtype.DType, _ int) error {
				return f.Communicator.Broadcast(buf, count, dt, 0)
			}
		}},
		{"parts are in the wrong places", "allgather", "element", func(f *faulty) {
			f.allGather = func(send, recv uintptr, count int, dt dtype.DType) error {
				counts, displs := make([]int, f.WorldSize()), make([]int, f.WorldSize())
				for r := range counts {
					counts[r], displs[r] = count, (r+1)%f.WorldSize()*count
				}
				if send == recv+uintptr(f.Rank()*count*dt.Size()) {
					return f.Communicator.AllGather(send, recv, count, dt)
				}
				return f.Communicator.AllGatherV(send, recv, counts, displs, dt)
			}
		}},
		{"displacements are ignored", "allgatherv", "element", func(f *faulty) {
			f.allGatherV = func(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
				if send == recv+uintptr(displs[f.Rank()]*dt.Size()) {
					return f.Communicator.AllGatherV(send, recv, counts, displs, dt)
				}
				packed := make([]int, len(counts))
				for r := 1; r < len(counts); r++ {
					packed[r] = packed[r-1] + counts[r-1]
				}
				return f.Communicator.AllGatherV(send, recv, counts, packed, dt)
			}
		}},
		{"tags are lost", "send and receive: tags out of order", "element", func(f *faulty) {
			f.send = func(buf uintptr, count int, dt dtype.DType, dest int, _ uint32) error {
				return f.Communicator.Send(buf, count, dt, dest, 0)
			}
			f.recv = func(buf uintptr, count int, dt dtype.DType, src int, _ uint32) error {
				return f.Communicator.Recv(buf, count, dt, src, 0)
			}
		}},
		{"messages arrive in reverse", "send and receive: one tag keeps its order", "element", func(f *faulty) {
			serial := uint32(0)
			f.send = func(buf uintptr, count int, dt dtype.DType, dest int, _ uint32) error {
				serial++
				return f.Communicator.Send(buf, count, dt, dest, serial)
			}
			last := uint32(21)
			f.recv = func(buf uintptr, count int, dt dtype.DType, src int, _ uint32) error {
				last--
				return f.Communicator.Recv(buf, count, dt, src, last)
			}
		}},
		{"a group does not start together", "send and receive: ring", "timed out", func(f *faulty) {
			f.group = func(submit func() error) error { return submit() }
			f.send = func(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
				ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
				defer cancel()
				return errors.Join(f.Communicator.Send(buf, count, dt, dest, tag), f.Communicator.Sync(ctx))
			}
		}},
		{"a failed group is started", "group that fails submits nothing", "group", func(f *faulty) {
			f.group = func(submit func() error) error {
				var failed error
				if err := f.Communicator.Group(func() error { failed = submit(); return nil }); err != nil {
					return err
				}
				return failed
			}
		}},
		{"a barrier that is none", "barrier holds until the last rank comes", "left the barrier", func(f *faulty) {
			f.barrier = f.Communicator.Sync
		}},
		{"a barrier that does not sync", "barrier implies sync", "element", func(f *faulty) {
			var pending func() error
			f.allGather = func(send, recv uintptr, count int, dt dtype.DType) error {
				pending = func() error { return f.Communicator.AllGather(send, recv, count, dt) }
				return nil
			}
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
			f.allReduce = func(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
				if count < 0 {
					return nil
				}
				return f.Communicator.AllReduce(send, recv, count, dt, op)
			}
		}},
		{"a bare sentinel", "misuse: every bad argument has its error", "no *comm.OpError", func(f *faulty) {
			f.broadcast = func(buf uintptr, count int, dt dtype.DType, root int) error {
				if root < 0 {
					return comm.ErrArgument
				}
				return f.Communicator.Broadcast(buf, count, dt, root)
			}
		}},
		{"the error names another operation", "misuse: every bad argument has its error", `OpError says "reduce"`, func(f *faulty) {
			f.broadcast = func(buf uintptr, count int, dt dtype.DType, root int) error {
				if root < 0 {
					return &comm.OpError{Backend: "local", Op: "reduce", Rank: f.Rank(), Err: comm.ErrArgument}
				}
				return f.Communicator.Broadcast(buf, count, dt, root)
			}
		}},
		{"a bad call is sent all the same", "misuse: on one rank alone", "rank", func(f *faulty) {
			f.broadcast = func(buf uintptr, count int, dt dtype.DType, root int) error {
				err := f.Communicator.Broadcast(buf, count, dt, root)
				if root < 0 {
					_ = f.Communicator.Broadcast(buf, count, dt, 0)
				}
				return err
			}
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
				f.allReduce = func(uintptr, uintptr, int, dtype.DType, comm.ReduceOp) error { return nil }
				f.sync = func(context.Context) error { return nil }
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
				f.allGather = func(uintptr, uintptr, int, dtype.DType) error { return errors.New("rank 2 has a problem") }
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			rt := cpu.New()
			t.Cleanup(func() { _ = rt.Close() }) // a case that fails may leave memory
			s := newSuite(faulted(rt, test.fault), Timeout(20*time.Second))
			c := caseNamed(t, test.inCase)
			require.Empty(t, c.skip(s.Backend, 4))
			_, err := s.run(t.Context(), c, 4)
			assert.ErrorContains(t, err, test.text)
		})
	}
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
	s.grace = 10 * time.Millisecond
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

func TestTile(t *testing.T) {
	block := []byte("abcdefg")
	for offset := range 10 {
		for n := range 40 {
			got := tile(block, offset, n)
			for i, b := range got {
				require.Equal(t, block[(offset+i)%len(block)], b, "offset %d, %d bytes, byte %d", offset, n, i)
			}
		}
	}
}

// Inputs are chosen so that results differ between operations, whatever the
// number of ranks: otherwise the matrix could not tell them apart.
func TestReferencesDiffer(t *testing.T) {
	for _, dt := range dtype.All() {
		for _, size := range []int{2, 3, 8, 32} {
			for _, a := range dtype.ReduceOps() {
				for _, b := range dtype.ReduceOps() {
					if a == b || !a.Defined(dt) || !b.Defined(dt) || dt == dtype.Bool {
						continue
					}
					right := newReference(dt, a, size)
					var wrong []byte // what b makes of the inputs for a
					ref := &reference{dt: dt}
					inputs := make([][]byte, size)
					for r := range inputs {
						inputs[r] = reductionInput(dt, a, r, size)
					}
					if dt.IsFloat() {
						ref.floats(b, inputs)
						wrong = encodeFloats(dt, ref.value)
					} else {
						ref.ints(b, inputs)
						wrong = ref.exact
					}
					assert.Error(t, right.check(wrong, 0), "%v of %v on %d ranks passes for %v", b, dt, size, a)
				}
			}
		}
	}
}
