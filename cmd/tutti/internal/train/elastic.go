package train

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"gonum.org/v1/gonum/blas/blas32"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// leaving is how long a member that is told to end has for the next vote, to leave in order: its residual goes to another one.
const leaving = 5 * time.Second

// progress is what members have alike. A velocity is a member's own, and begins with zeros.
type progress struct {
	Step, Tested int // steps that are done, and how many were when the accuracy was measured last
	Params       []float32
	History      history
	Shared       []byte // of the reduction
}

// RunElastic trains as a member of a job that tutti launch --min has started. The batch of all members together
// stays, whatever their number. The member with rank 0 of the last epoch reports to the observer.
func RunElastic(ctx context.Context, cfg Config, observer Observer) error {
	trainSet, testSet, err := cfg.examples()
	if err != nil {
		return err
	}
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return err
	}
	rt := cpu.New()
	e, err := elastic.FromEnv(elastic.Config{Runtime: rt, Terms: fmt.Sprintf("%+v", cfg)})
	if err != nil {
		return err
	}
	e.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		c := tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: e.TLS, Silence: elastic.DefaultSilence}
		if err := c.ReadEnv(os.Getenv, job.LocalRank); err != nil {
			return nil, err
		}
		return tcp.New(ctx, kv, c)
	}
	var m *elastic.Member
	var t *trainer
	var s *sparse.Reducer // t's
	var p progress
	start := time.Now()
	e.Bind = func(ctx context.Context, epoch *elastic.Epoch) (err error) {
		rank := backend.Rank{Comm: epoch.Comm, Runtime: rt, HostRanks: 1}
		if t == nil {
			if t, err = newTrainer(ctx, rank, cfg, trainSet, testSet); err != nil {
				return err
			}
			s, _ = t.sparse.Sparse()
			s.BeforeCommit(m.Commit)
			return nil
		}
		t.rank, t.tested = rank, testSet.share(epoch.Comm)
		return s.Rebind(epoch.Comm)
	}
	e.Save = func(ctx context.Context) ([]byte, error) {
		shared, err := s.SharedState(ctx)
		p.Params, p.History, p.Shared = t.model.params, t.history, shared
		var b bytes.Buffer
		err = errors.Join(err, gob.NewEncoder(&b).Encode(p))
		return b.Bytes(), err
	}
	e.Load = func(ctx context.Context, state []byte) error {
		p = progress{}
		if err := gob.NewDecoder(bytes.NewReader(state)).Decode(&p); err != nil {
			return err
		}
		copy(t.model.params, p.Params)
		clear(t.velocity)
		t.history = p.History
		return s.Restore(ctx, p.Shared)
	}
	e.Hash = func(context.Context) (uint64, error) { return t.hash(), nil }
	e.Residuals = func() ([]*runtime.Tensor, error) {
		r, err := s.Residual()
		if errors.Is(err, comm.ErrUnsupported) {
			return nil, nil
		}
		return []*runtime.Tensor{r}, err
	}
	if m, err = elastic.Join(ctx, e); err != nil {
		return err
	}
	stepsPerEpoch := trainSet.Len() / cfg.Batch
	steps := stepsPerEpoch * cfg.Epochs
	running, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() {
		m.Leave()
		time.AfterFunc(leaving, func() { cancel(context.Cause(ctx)) })
	})()
	err = m.Run(running, func(ctx context.Context, epoch *elastic.Epoch) error {
		t.clock = time.Since(start)
		switch due := p.Step%cfg.testEvery(stepsPerEpoch) == 0 || p.Step == steps; {
		case due && p.Tested < p.Step: // a step of its own
			tests := t.Tests
			err := t.test(ctx, testSet.Len())
			if err == nil {
				err = m.Commit(ctx)
			}
			if err != nil {
				t.Tests = tests
				return err
			}
			p.Tested = p.Step
			return nil
		case p.Step == steps:
			r, err := t.result(ctx)
			if err == nil {
				err = m.Commit(ctx)
			}
			if err != nil {
				return err
			}
			if epoch.Comm.Rank() == 0 {
				observer.Finished(r)
			}
			return io.EOF
		}
		before := slices.Clone(t.velocity)
		loss := t.move(p.Step, stepsPerEpoch)
		err := runtime.CopyIn(t.update, t.gradient)
		if err == nil {
			err = t.sparse.AllReduce(ctx, t.update)
		}
		if err != nil {
			copy(t.velocity, before)
			return err
		}
		if p.Step++; epoch.Comm.Rank() == 0 {
			observer.Step(cfg.Patterns[0], p.Step, steps)
		}
		if err := runtime.CopyOut(t.gradient, t.update); err != nil {
			return err
		}
		blas32.Axpy(-1, vector(t.gradient), vector(t.model.params))
		err = t.record(ctx, loss)
		t.Curve[len(t.Curve)-1].Seconds = t.clock.Seconds()
		return err
	})
	err = errors.Join(err, context.Cause(ctx), m.Close())
	if t != nil { // there was an epoch
		err = errors.Join(err, t.close())
	}
	return err
}
