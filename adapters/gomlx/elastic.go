package gomlx

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"strings"

	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/elastic"
)

// position is what a member that joins gets beside the variables.
type position struct {
	Step, Epoch, Batch int
	Reduction          []byte   // the state that all ranks share
	Paths              []string // of the variables that follow
}

// RunElastic has loop run to a global step, as RunToGlobalStep does, as a member of an elastic job. o is attached, and
// made, like data, with a communicator of one rank (noop.New). cfg has what package elastic needs, but for Runtime, Bind,
// Tensors, Save, Load, Residuals and Hash, which are set here.
//
// A member that joins gets all variables of another one, the loop's step and the position in the data. A step that
// lost a member is made again, from the same batch. Before it joins, a member runs the graph of a step once, without
// an update. Hooks of the loop's start and end are called in each step, and one of the start that returns io.EOF ends
// the training. An optimizer of accumulated gradients is [comm.ErrArgument].
//
// When it returns, o and data are with their own communicator again, and it can be called again: what the reduction keeps stays.
func (o *Optimizer) RunElastic(ctx context.Context, cfg elastic.Config, loop *train.Loop, data *Dataset, step int) (metrics []*tensors.Tensor, err error) {
	if loop.Trainer.NumAccumulatingSteps() > 1 || data.Batches() == 0 {
		return nil, fmt.Errorf("gomlx: run elastic: %w: gradients of %d steps are accumulated, an epoch has %d batches",
			comm.ErrArgument, loop.Trainer.NumAccumulatingSteps(), data.Batches())
	}
	if err := o.prepare(loop, data.Infinite(true)); err != nil {
		return nil, err
	}
	store := loop.Trainer.Store()
	var m *elastic.Member
	cfg.Step, cfg.Runtime, cfg.Residuals = uint64(loop.LoopStep), o.rt, o.sync.Residuals
	bind := func(ctx context.Context, c comm.Communicator) error {
		o.c = c
		return errors.Join(data.Rebind(c), o.sync.Rebind(ctx, c))
	}
	alone := o.c
	defer func() {
		err = errors.Join(err, bind(context.WithoutCancel(ctx), alone))
		o.sync.BeforeCommit(nil)
	}()
	cfg.Bind = func(ctx context.Context, e *elastic.Epoch) error { return bind(ctx, e.Comm) }
	cfg.Save = func(ctx context.Context) ([]byte, error) { return o.save(ctx, store, loop, data) }
	cfg.Load = func(ctx context.Context, state []byte) error { return o.load(ctx, state, store, loop, data) }
	cfg.Hash = func(context.Context) (uint64, error) {
		h := fnv.New64a()
		var err error
		for _, v := range inOrder(o.params) {
			err = errors.Join(err, v.MustValue().ConstBytes(func(data []byte) { h.Write(data) }))
		}
		return h.Sum64(), err
	}
	m, err = elastic.Join(ctx, cfg)
	if err != nil {
		return nil, err
	}
	o.sync.BeforeCommit(func(ctx context.Context) error { return m.Commit(ctx) })
	err = m.Run(ctx, func(context.Context, *elastic.Epoch) error {
		if loop.LoopStep >= step {
			return io.EOF
		}
		epoch, batch := data.Position()
		last, err := loop.RunSteps(data, 1)
		if err != nil {
			return errors.Join(err, data.Seek(epoch, batch))
		}
		metrics = last
		return nil
	})
	return metrics, errors.Join(err, m.Close())
}

// prepare makes the variables, and what reduces the gradients unless there is such, by a step that ends before that.
func (o *Optimizer) prepare(loop *train.Loop, data *Dataset) error {
	epoch, batch := data.Position()
	for b, err := range data.Iter() {
		if err == nil {
			_, err = loop.Trainer.TrainStep(b)
		}
		if err != nil {
			return err
		}
		break
	}
	err := data.Seek(epoch, batch)
	if err == nil && o.sync == nil {
		err = o.with(o.slots, nil, o.begin)
	}
	return err
}

// save returns the variables but for gradients, and where the training is.
func (o *Optimizer) save(ctx context.Context, store *model.Store, loop *train.Loop, data *Dataset) ([]byte, error) {
	at := position{Step: loop.LoopStep, Epoch: data.epoch, Batch: data.batch}
	var err error
	if at.Reduction, err = o.sync.SharedState(ctx); err != nil {
		return nil, err
	}
	var values []*tensors.Tensor
	for v := range store.IterVariables() {
		if v.HasValue() && !strings.HasPrefix(v.Path(), scope+"/") {
			at.Paths, values = append(at.Paths, v.Path()), append(values, v.MustValue())
		}
	}
	var state bytes.Buffer
	encoder := gob.NewEncoder(&state)
	err = encoder.Encode(at)
	for _, t := range values {
		err = errors.Join(err, t.GobSerialize(encoder))
	}
	return state.Bytes(), err
}

// load is given what save returned.
func (o *Optimizer) load(ctx context.Context, state []byte, store *model.Store, loop *train.Loop, data *Dataset) error {
	decoder := gob.NewDecoder(bytes.NewReader(state))
	var at position
	if err := decoder.Decode(&at); err != nil {
		return err
	}
	for _, path := range at.Paths {
		t, err := tensors.GobDeserialize(decoder)
		if err != nil {
			return err
		}
		if v := store.GetVariable(path); v == nil { // of the optimizer, which has made no update here
			store.VariableWithValue(path, t).SetTrainable(false)
		} else if err := v.SetValue(t); err != nil {
			return err
		}
	}
	loop.LoopStep = at.Step
	return errors.Join(data.Seek(at.Epoch, at.Batch), o.sync.Restore(ctx, at.Reduction))
}
