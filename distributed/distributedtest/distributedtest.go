// Package distributedtest is the suite of package distributed for any backend:
// what its collectives, patterns and gradient buckets promise, as tests over a
// [commtest.Backend]. A backend that passes commtest should pass it too; it
// exercises the combinations of collectives, lengths and groups that training
// uses.
//
//	func TestDistributed(t *testing.T) {
//		distributedtest.Run(t, backend) // the commtest.Backend of the conformance test
//	}
//
// [RunReducer] is the suite of a program's [ddp.Reducer], [RunSelector] the suite of its
// [sparse.Selector].
//
// The ranks' inputs are functions of rank and step, so processes that run the suite
// together compute each other's inputs.
//
// On a runtime without [kernel.Kernels] the sparse parts are skipped. With -short,
// large tensors have fewer elements.
package distributedtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Option changes how [Run] works.
type Option func(*suite)

// Extended runs more lengths and steps, for continuous integration.
func Extended() Option {
	return func(s *suite) { s.extended = true }
}

// Cases leaves out the cases for which keep is false with that number of ranks: another run of the suite has them.
func Cases(keep func(ranks int, name string) bool) Option {
	return func(s *suite) { s.keep = keep }
}

// SameBits has steps whose values are rounded, and outer loops, compared, bit for bit, with those of a world of
// goroutines over another backend.
func SameBits(world func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error) Option {
	return func(s *suite) { s.reference = world }
}

type suite struct {
	commtest.Backend
	reference func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error
	extended  bool
	keep      func(ranks int, name string) bool // nil: all
	selector  sparse.Selector                   // of all patterns, if set
	made      sync.Map                          // gradients that many cases have, by their gradientOf
}

// seed is the seed of all inputs.
const seed = 1

// caseTimeout bounds one case: longer than any of them takes, so that a rank
// that waits forever is an error and not a hanging test.
const caseTimeout = 2 * time.Minute

// testCase is one named part of the suite; body runs on every rank.
type testCase struct {
	name   string
	body   func(*rank)
	sparse bool // needs kernel.Kernels
}

// Run runs the suite as subtests of t, for each world size of b.
func Run(t *testing.T, b commtest.Backend, opts ...Option) {
	t.Helper()
	cases := []testCase{
		{name: "Collectives", body: testCollectives},
		{name: "Gradients", body: testGradientSync},
		{name: "Mesh", body: testMesh},
		{name: "Many", body: testMany},
		{name: "Training", body: testTraining, sparse: true},
		{name: "Outer", body: testOuter, sparse: true},
	}
	cases = append(cases, patternCases()...)
	runCases(t, b, append(cases, testCase{
		name:   "SameBits",
		body:   testSameBits,
		sparse: true,
	}), opts)
}

func runCases(t *testing.T, b commtest.Backend, cases []testCase, opts []Option) {
	t.Helper()
	tuning.Set(t, tuned)
	s := &suite{Backend: b}
	for _, o := range opts {
		o(s)
	}
	for _, size := range b.Sizes {
		t.Run(fmt.Sprintf("ranks=%d", size), func(t *testing.T) {
			defer s.made.Clear()
			for _, c := range cases {
				if s.keep != nil && !s.keep(size, c.name) {
					continue
				}
				t.Run(c.name, func(t *testing.T) {
					ctx, cancel := context.WithTimeout(t.Context(), caseTimeout)
					defer cancel()
					var skipped atomic.Bool
					err := b.Run(ctx, size, func(ctx context.Context, cr commtest.Rank) error {
						r := newRank(ctx, s, cr)
						if c.sparse && !r.hasKernels() {
							skipped.Store(true)
							return nil
						}
						return r.run(c.body)
					})
					if err != nil {
						t.Error(err)
					}
					if skipped.Load() {
						t.Skip("the runtime has no sparse kernels")
					}
				})
			}
		})
	}
}

// rank is one participant of a case.
type rank struct {
	*suite
	ctx  context.Context
	c    comm.Communicator
	rt   runtime.Runtime
	rank int
	size int
	live []func() error // frees what the part of the case made
}

func newRank(ctx context.Context, s *suite, r commtest.Rank) *rank {
	return &rank{
		suite: s,
		ctx:   ctx,
		c:     r.Comm,
		rt:    r.Runtime,
		rank:  r.Comm.Rank(),
		size:  r.Comm.WorldSize(),
	}
}

// hasKernels reports whether sparse patterns work on the rank's runtime.
func (r *rank) hasKernels() bool {
	_, err := kernel.Lookup(r.rt)
	return err == nil
}

// failure is what a rank's part of a case panics with: [caught] makes it an error.
type failure struct{ error }

// must ends a rank's part of a case unless all errors are nil.
func must(errs ...error) {
	if err := errors.Join(errs...); err != nil {
		panic(failure{err})
	}
}

// fail ends a rank's part of a case.
func fail(format string, args ...any) {
	must(fmt.Errorf(format, args...))
}

// got returns x, or ends a rank's part of a case.
func got[T any](x T, err error) T {
	must(err)
	return x
}

// caught returns what body failed with.
func caught(body func()) (err error) {
	defer func() {
		switch failed := recover().(type) {
		case nil:
		case failure:
			err = failed.error
		default:
			panic(failed)
		}
	}()
	body()
	return nil
}

// part runs a part of a case, whose label is in its error, and frees what it made.
func (r *rank) part(label string, body func()) {
	outer := r.live
	r.live = nil
	err := caught(body)
	if err != nil {
		err = fmt.Errorf("%s: %w", label, err)
	}
	for _, free := range slices.Backward(r.live) {
		err = errors.Join(err, free())
	}
	r.live = outer
	must(err)
}

// run executes a body and frees what it made.
func (r *rank) run(body func(*rank)) error {
	return caught(func() {
		r.part(fmt.Sprintf("rank %d of %d", r.rank, r.size), func() {
			body(r)
		})
	})
}

// after has the end of the part free something.
func (r *rank) after(free func() error) {
	r.live = append(r.live, free)
}

// tensor makes a tensor of type dt with the given values.
func (r *rank) tensor(dt dtype.DType, values []float32) *runtime.Tensor {
	t := got(runtime.New(r.rt, dt, len(values)))
	r.after(t.Free)
	r.write(t, values)
	return t
}

// write stores values, rounded to t's type.
func (r *rank) write(t *runtime.Tensor, values []float32) {
	raw := hostmem.Bytes(values)
	if t.DType() != dtype.F32 {
		raw = make([]byte, t.Bytes())
		must(dtype.FromFloat32(raw, t.DType(), values))
	}
	must(r.rt.CopyIn(got(t.Ptr()), raw))
}

// bytes returns t's content.
func (r *rank) bytes(t *runtime.Tensor) []byte {
	raw := make([]byte, t.Bytes())
	must(r.rt.CopyOut(raw, got(t.Ptr())))
	return raw
}

// read returns t's elements as float32.
func (r *rank) read(t *runtime.Tensor) []float32 {
	values := make([]float32, t.Len())
	if t.DType() == dtype.F32 {
		must(r.rt.CopyOut(hostmem.Bytes(values), got(t.Ptr())))
	} else {
		must(dtype.ToFloat32(values, r.bytes(t), t.DType()))
	}
	return values
}

// sum adds up x over the ranks, in float64, in place.
func (r *rank) sum(x []float64) {
	t := got(runtime.FromSlice(r.rt, x, len(x)))
	defer t.Free()
	p := got(t.Ptr())
	must(r.rt.Synchronize(r.ctx))
	must(r.c.AllReduce(p, p, len(x), dtype.F64, comm.Sum))
	must(r.c.Sync(r.ctx))
	must(runtime.CopyOut(x, t))
}
