package train

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"time"

	"gonum.org/v1/gonum/blas/blas32"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// leaving is how long a member that is asked to end waits for the next vote. It then leaves in order, and another
// member takes over its residual.
const leaving = 5 * time.Second

// progress is the state that members share. With Reproducible it includes the velocity; otherwise each member's
// velocity is private and starts at zero.
type progress struct {
	Step, Tested int       // steps made, and steps made before the last test
	Params       []float32 // of the model
	Velocity     []float32 // with Reproducible: the same on all members
	History      history   // of the job
	Shared       []byte    // of the reduction
}

// member is one process's part of an elastic job. It is the job's trainer.
type member struct {
	*sparse.Reducer
	*trainer
	done     progress  // Params, History and Shared are set only in copies that are sent
	testSet  examples  // to test on
	observer Observer  // receives each step
	start    time.Time // when this process began
}

// newMember makes a member that is not yet in a communicator.
func newMember(ctx context.Context, rt runtime.Runtime, cfg Config, observer Observer) (*member, error) {
	trainSet, testSet, err := cfg.examples()
	if err != nil {
		return nil, err
	}
	alone := backend.Rank{
		Comm:      noop.New(rt),
		Runtime:   rt,
		HostRanks: 1,
	}
	t, err := newTrainer(ctx, alone, cfg, trainSet, testSet)
	if err != nil {
		return nil, err
	}
	m := &member{
		trainer:  t,
		testSet:  testSet,
		observer: observer,
		start:    time.Now(),
	}
	if t.sparse != nil {
		m.Reducer, _ = t.sparse.Sparse()
	}
	return m, nil
}

// Rebind implements [elastic.Trainer].
func (m *member) Rebind(ctx context.Context, c comm.Communicator) error {
	m.rank.Comm = c
	m.tested = m.testSet.share(c)
	if m.fixed != nil {
		return m.fixed.Rebind(ctx, c)
	}
	return m.Reducer.Rebind(c)
}

// BeforeCommit implements [elastic.Trainer].
func (m *member) BeforeCommit(vote func(context.Context) error) {
	if m.fixed != nil {
		m.fixed.BeforeCommit(vote)
	} else {
		m.Reducer.BeforeCommit(vote)
	}
}

// SharedState implements [elastic.Trainer].
func (m *member) SharedState(ctx context.Context) ([]byte, error) {
	save := m.fixed.SharedState
	if m.fixed == nil {
		save = m.Reducer.SharedState
	}
	shared, err := save(ctx)
	if err != nil {
		return nil, err
	}
	state := m.done
	if m.fixed != nil {
		state.Velocity = m.velocity
	}
	state.Params = m.model.params
	state.History = m.history
	state.Shared = shared
	var b bytes.Buffer
	err = gob.NewEncoder(&b).Encode(state)
	return b.Bytes(), err
}

// Restore implements [elastic.Trainer].
func (m *member) Restore(ctx context.Context, states ...[]byte) error {
	var state progress
	if err := gob.NewDecoder(bytes.NewReader(states[0])).Decode(&state); err != nil {
		return err
	}
	copy(m.model.params, state.Params)
	clear(m.velocity[copy(m.velocity, state.Velocity):])
	m.history = state.History
	m.done = progress{Step: state.Step, Tested: state.Tested}
	if m.fixed != nil {
		return m.fixed.Restore(ctx, state.Shared)
	}
	return m.Reducer.Restore(ctx, state.Shared)
}

// Residuals implements [elastic.Trainer].
func (m *member) Residuals() ([]*runtime.Tensor, error) {
	if m.fixed != nil {
		return nil, nil
	}
	residual, err := m.Residual()
	if errors.Is(err, comm.ErrUnsupported) {
		return nil, nil
	}
	return []*runtime.Tensor{residual}, err
}

// Hash returns the hash that members compare, as [elastic.Trainer] says.
func (m *member) Hash(context.Context) (uint64, error) { return m.hash(), nil }

// membership reads a member's configuration from the environment that a launcher sets.
func membership(rt runtime.Runtime, cfg Config) (elastic.Config, error) {
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return elastic.Config{}, err
	}
	conf, err := elastic.FromEnv(elastic.Config{Runtime: rt, Patience: cfg.Patience, Terms: fmt.Sprintf("%+v", cfg)})
	if err != nil {
		return conf, err
	}
	links := tcp.Config{TLS: conf.TLS, Silence: elastic.DefaultSilence}
	if err := links.ReadEnv(os.Getenv, job.LocalRank); err != nil {
		return conf, err
	}
	conf.Silence = links.Silence // slow links lengthen all of a member's timeouts
	conf.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		c := links
		c.Rank = p.Rank
		c.WorldSize = p.Size
		c.World = p.World
		return tcp.New(ctx, kv, c)
	}
	return conf, nil
}

// RunElastic trains as a member of a job started by tutti launch --min. The batch over all members stays the same for
// any number of members. The member with rank 0 in the last epoch reports to the observer.
func RunElastic(ctx context.Context, cfg Config, observer Observer) error {
	rt := cpu.New()
	conf, err := membership(rt, cfg)
	if err != nil {
		return err
	}
	t, err := newMember(ctx, rt, cfg, observer)
	if err != nil {
		return err
	}
	m, err := elastic.Join(ctx, conf, t)
	if err != nil {
		return errors.Join(err, t.close())
	}
	running, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() {
		m.Leave()
		time.AfterFunc(leaving, func() { cancel(context.Cause(ctx)) })
	})()
	err = m.Run(running, func(ctx context.Context, e *elastic.Epoch) error {
		return t.proceed(ctx, m)
	})
	if errors.Is(err, elastic.ErrEnded) { // the others have reported
		slog.Warn(err.Error())
		err = nil
	}
	return errors.Join(err, context.Cause(ctx), m.Close(), t.close())
}

// proceed makes one step of the job: a training step, a test, or the last step, which averages the results.
func (m *member) proceed(ctx context.Context, job *elastic.Member) error {
	perEpoch := m.data.Len() / m.cfg.Batch
	steps := perEpoch * m.cfg.Epochs
	last := m.done.Step == steps
	due := last || m.done.Step%m.cfg.testEvery(perEpoch) == 0
	m.clock = time.Since(m.start)
	switch {
	case due && m.done.Tested < m.done.Step:
		return m.measure(ctx, job)
	case !last:
		return m.advance(ctx, perEpoch, steps)
	}
	result, err := m.result(ctx)
	if err != nil {
		return err
	}
	if err := job.Commit(ctx); err != nil {
		return err
	}
	if m.rank.Comm.Rank() == 0 {
		m.observer.Finished(result)
	}
	return io.EOF
}

// measure tests the accuracy.
func (m *member) measure(ctx context.Context, job *elastic.Member) error {
	tests := m.Tests
	err := m.test(ctx, m.testSet.Len())
	if err == nil {
		err = job.Commit(ctx)
	}
	if err != nil {
		m.Tests = tests
		return err
	}
	m.done.Tested = m.done.Step
	return nil
}

// advance trains on one batch.
func (m *member) advance(ctx context.Context, perEpoch, steps int) error {
	if m.fixed != nil {
		loss, err := m.contribute(ctx, m.done.Step, perEpoch)
		if err != nil {
			return err
		}
		m.descend(m.done.Step, perEpoch)
		return m.advanced(ctx, loss, steps)
	}
	before := slices.Clone(m.velocity)
	loss := m.move(m.done.Step, perEpoch)
	err := runtime.CopyIn(m.update, m.gradient)
	if err == nil {
		err = m.AllReduce(ctx, m.update)
	}
	if err != nil {
		copy(m.velocity, before)
		return err
	}
	if err := runtime.CopyOut(m.gradient, m.update); err != nil {
		return err
	}
	blas32.Axpy(-1, vector(m.gradient), vector(m.model.params))
	return m.advanced(ctx, loss, steps)
}

// advanced records a completed step.
func (m *member) advanced(ctx context.Context, loss float64, steps int) error {
	m.done.Step++
	if m.rank.Comm.Rank() == 0 {
		m.observer.Step(m.cfg.Patterns[0], m.done.Step, steps)
	}
	err := m.record(ctx, loss)
	m.Curve[len(m.Curve)-1].Seconds = m.clock.Seconds()
	return err
}
