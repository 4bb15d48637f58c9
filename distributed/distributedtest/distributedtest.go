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
// [RunReducer] is the suite of a program's own [ddp.Reducer], [RunSelector] that of its own
// [sparse.Selector].
//
// The ranks' inputs are functions of a seed, so processes that run the suite
// together compute each other's inputs, and every failure names what it needs
// to be repeated.
//
// On a runtime without [runtime.Kernels] the sparse parts are skipped. With -short,
// large tensors have fewer elements.
package distributedtest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// Option changes how [Run] works.
type Option func(*suite)

// Extended runs more lengths and steps, for continuous integration.
func Extended() Option { return func(s *suite) { s.extended = true } }

// Cases leaves out the cases that keep is false for, with so many ranks: those that another run of the suite
// has.
func Cases(keep func(ranks int, name string) bool) Option { return func(s *suite) { s.keep = keep } }

// Seed sets the seed of the inputs, 1 unless set.
func Seed(seed uint64) Option { return func(s *suite) { s.seed = seed } }

type suite struct {
	commtest.Backend
	extended bool
	keep     func(ranks int, name string) bool // nil: all
	selector sparse.Selector                   // of all patterns, if set
	made     sync.Map                          // gradients that many cases have, by their gradientOf
	seed     uint64
}

// caseTimeout bounds one case: longer than any of them takes, so that a rank
// that waits for ever is an error and not a hanging test.
const caseTimeout = 2 * time.Minute

// testCase is one named part of the suite; body runs on every rank.
type testCase struct {
	name   string
	body   func(*rank) error
	sparse bool // needs runtime.Kernels
}

// Run runs the suite as subtests of t, for each world size of b.
func Run(t *testing.T, b commtest.Backend, opts ...Option) {
	t.Helper()
	cases := []testCase{
		{name: "Collectives", body: testCollectives},
		{name: "Misuse", body: testMisuse},
		{name: "SparseMisuse", body: testSparseMisuse, sparse: true},
		{name: "Gradients", body: testGradientSync},
		{name: "Mesh", body: testMesh},
		{name: "Many", body: testMany},
		{name: "Training", body: testTraining, sparse: true},
		{name: "Levels", body: testLevels, sparse: true},
	}
	runCases(t, b, append(cases, patternCases()...), opts)
}

func runCases(t *testing.T, b commtest.Backend, cases []testCase, opts []Option) {
	t.Helper()
	s := &suite{Backend: b, seed: 1}
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
						t.Errorf("seed %d: %v", s.seed, err)
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
	live []*runtime.Tensor
}

func newRank(ctx context.Context, s *suite, r commtest.Rank) *rank {
	return &rank{suite: s, ctx: ctx, c: r.Comm, rt: r.Runtime, rank: r.Comm.Rank(), size: r.Comm.WorldSize()}
}

// hasKernels reports whether sparse patterns work on the rank's runtime.
func (r *rank) hasKernels() bool {
	_, err := runtime.KernelsOf(r.rt)
	return err == nil
}

// run executes a body and frees what it made.
func (r *rank) run(body func(*rank) error) error {
	err := body(r)
	if err != nil {
		err = fmt.Errorf("rank %d of %d: %w", r.rank, r.size, err)
	}
	return errors.Join(err, r.free())
}

func (r *rank) free() error {
	var errs []error
	for _, t := range r.live {
		errs = append(errs, t.Free())
	}
	r.live = nil
	return errors.Join(errs...)
}

// tensor makes a tensor of type dt with the given values.
func (r *rank) tensor(dt dtype.DType, values []float32) (*runtime.Tensor, error) {
	t, err := runtime.New(r.rt, dt, len(values))
	if err != nil {
		return nil, err
	}
	r.live = append(r.live, t)
	return t, r.write(t, values)
}

// write stores values, rounded to t's type.
func (r *rank) write(t *runtime.Tensor, values []float32) error {
	raw := hostmem.Bytes(values)
	if t.DType() != dtype.F32 {
		raw = make([]byte, t.Bytes())
		if err := dtype.FromFloat32(raw, t.DType(), values); err != nil {
			return err
		}
	}
	p, err := t.Ptr()
	if err != nil {
		return err
	}
	return r.rt.CopyIn(p, raw)
}

// bytes returns t's content.
func (r *rank) bytes(t *runtime.Tensor) ([]byte, error) {
	raw := make([]byte, t.Bytes())
	return raw, r.copyOut(raw, t)
}

func (r *rank) copyOut(raw []byte, t *runtime.Tensor) error {
	p, err := t.Ptr()
	if err != nil {
		return err
	}
	return r.rt.CopyOut(raw, p)
}

// read returns t's elements as float32.
func (r *rank) read(t *runtime.Tensor) ([]float32, error) {
	values := make([]float32, t.Len())
	if t.DType() == dtype.F32 {
		return values, r.copyOut(hostmem.Bytes(values), t)
	}
	raw, err := r.bytes(t)
	if err != nil {
		return nil, err
	}
	return values, dtype.ToFloat32(values, raw, t.DType())
}

// sum adds up x over the ranks, in float64, in place.
func (r *rank) sum(x []float64) error {
	t, err := runtime.FromSlice(r.rt, x, len(x))
	if err != nil {
		return err
	}
	defer t.Free()
	p, err := t.Ptr()
	if err != nil {
		return err
	}
	if err := r.rt.Synchronize(r.ctx); err != nil {
		return err
	}
	if err := r.c.AllReduce(p, p, len(x), dtype.F64, comm.Sum); err != nil {
		return err
	}
	if err := r.c.Sync(r.ctx); err != nil {
		return err
	}
	return runtime.CopyOut(x, t)
}
