package standin

import (
	"context"
	"errors"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/runtime"
)

// ErrFault is the error of a call that fails on demand.
var ErrFault = errors.New("injected fault")

// Faulty is a communicator whose call number At fails before it is made. Tests set the fields while nothing is in
// flight.
type Faulty struct {
	comm.Methods
	comm.Wrapped
	mu        sync.Mutex // calls come from a worker as well
	Calls     int        // made so far; guarded by mu
	At        int        // below 0: none fails; guarded by mu
	CountedBy *Faulty    // nil: this one
}

// NewFaulty returns c, of which no call fails until At is set.
func NewFaulty(c comm.Communicator) *Faulty {
	f := &Faulty{Wrapped: comm.Wrap(c), At: -1}
	f.Methods = intercept(c, func(...comm.Call) error { return f.count() })
	return f
}

func (f *Faulty) count() error {
	if f.CountedBy != nil {
		return f.CountedBy.count()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Calls++
	if f.Calls-1 == f.At {
		return ErrFault
	}
	return nil
}

// Sync also fails before it waits.
func (f *Faulty) Sync(ctx context.Context) error {
	if err := f.count(); err != nil {
		return err
	}
	return f.Communicator.Sync(ctx)
}

// Trainee is a rank that reduces a sequence of gradients.
type Trainee struct {
	S        *engine.Reducer
	T        *runtime.Tensor
	Gradient func(step int) []float32
}

// NewTrainee prepares the reduction of n normally distributed numbers a step.
func NewTrainee(rt runtime.Runtime, c comm.Communicator, cfg engine.Config, n int) (*Trainee, error) {
	s, err := engine.New(rt, c, n, cfg)
	if err != nil {
		return nil, err
	}
	rank := c.Rank()
	u := &Trainee{S: s, Gradient: func(step int) []float32 { return Normal(n, rank, step) }}
	u.T, err = runtime.FromSlice(rt, u.Gradient(0), n)
	return u, err
}

// Load writes the gradient of a step to the tensor.
func (u *Trainee) Load(step int) error {
	return runtime.CopyIn(u.T, u.Gradient(step))
}

// Step loads the gradient of a step and averages it.
func (u *Trainee) Step(ctx context.Context, step int) error {
	return errors.Join(u.Load(step), u.S.AllReduce(ctx, u.T))
}

// State returns the bits of the residual, if there is one.
func (u *Trainee) State() []uint32 {
	r, err := u.S.Residual()
	if errors.Is(err, comm.ErrUnsupported) {
		return nil
	}
	if err != nil {
		panic(err)
	}
	return Bits(r)
}

// Close frees the reducer and the tensor.
func (u *Trainee) Close() error {
	return errors.Join(u.S.Close(), u.T.Free())
}
