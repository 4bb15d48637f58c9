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
	"github.com/gomlx/gomlx/ml/train"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
)

// position is the state that a joining member gets in addition to the variables.
type position struct {
	Step, Epoch, Batch int      // of the training and its data
	Reduction          []byte   // state shared by all ranks
	Paths              []string // of the variables that follow
}

// RunElastic runs loop up to a global step, as RunToGlobalStep does, as a member of an elastic job. o is attached.
// Both o and data are made with a communicator of one rank (noop.New). cfg has the settings of package elastic except
// Runtime and Tensors, which RunElastic sets.
//
// A member whose examples differ from the others' is refused. A joining member gets another member's variables, the
// loop's step and the position in the data. A step that loses a member is repeated with the same batch. Before it
// joins, a member runs the graph of a step once, without an update. Hooks of the loop's start and end run in each
// step. A start hook that returns io.EOF ends the training. An optimizer of accumulated gradients is
// [comm.ErrArgument].
//
// [elastic.ErrEnded] means that the others have made the last step without this member, whose variables are not the
// result.
//
// When RunElastic returns, o and data use their own communicator again. It can be called again: the state of the
// reduction stays.
func (o *Optimizer) RunElastic(
	ctx context.Context,
	cfg elastic.Config,
	loop *train.Loop,
	data *Dataset,
	step int,
) (metrics []*tensors.Tensor, err error) {
	if loop.Trainer.NumAccumulatingSteps() > 1 || data.Batches() == 0 {
		return nil, fmt.Errorf("gomlx: run elastic: %w: gradients of %d steps are accumulated, an epoch has %d batches",
			comm.ErrArgument, loop.Trainer.NumAccumulatingSteps(), data.Batches())
	}
	if err := o.prepare(loop, data.Infinite(true)); err != nil {
		return nil, err
	}
	sum, err := data.checksum()
	if err != nil {
		return nil, err
	}
	cfg.Terms = fmt.Sprintf("%s checksum(%s)=%08x", cfg.Terms, data.name, sum) // members are refused if it differs
	data.compared = true
	t := &trainer{Gradients: o.sync, optimizer: o, loop: loop, data: data}
	cfg.Step = uint64(loop.LoopStep)
	cfg.Runtime = o.rt
	alone := o.c
	defer func() {
		err = errors.Join(err, t.Rebind(context.WithoutCancel(ctx), alone))
		o.sync.BeforeCommit(nil)
	}()
	m, err := elastic.Join(ctx, cfg, t)
	if err != nil {
		return nil, err
	}
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

// prepare makes the variables and, if it is missing, the reducer of gradients, by a step that ends before the
// reduction.
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

// trainer is the state that a member trains: the variables of a model, the loop's step and the position in the data.
type trainer struct {
	*ddp.Gradients
	optimizer *Optimizer  // has the Gradients
	loop      *train.Loop // of the training
	data      *Dataset    // of the training
}

// Rebind implements [elastic.Trainer].
func (t *trainer) Rebind(ctx context.Context, c comm.Communicator) error {
	t.optimizer.c = c
	return errors.Join(t.data.Rebind(c), t.Gradients.Rebind(ctx, c))
}

// Hash returns the hash of the parameters, which members compare ([elastic.Trainer]).
func (t *trainer) Hash(context.Context) (uint64, error) {
	h := fnv.New64a()
	for _, v := range inOrder(t.optimizer.params) {
		if err := v.MustValue().ConstBytes(func(data []byte) { h.Write(data) }); err != nil {
			return 0, err
		}
	}
	return h.Sum64(), nil
}

// SharedState implements [elastic.Trainer]. It returns the variables without gradients, and the position of the
// training.
func (t *trainer) SharedState(ctx context.Context) ([]byte, error) {
	reduction, err := t.Gradients.SharedState(ctx)
	if err != nil {
		return nil, err
	}
	p := position{Step: t.loop.LoopStep, Epoch: t.data.epoch, Batch: t.data.batch, Reduction: reduction}
	var values []*tensors.Tensor
	for v := range t.loop.Trainer.Store().IterVariables() {
		if v.HasValue() && !strings.HasPrefix(v.Path(), scope+"/") {
			p.Paths = append(p.Paths, v.Path())
			values = append(values, v.MustValue())
		}
	}
	var state bytes.Buffer
	encoder := gob.NewEncoder(&state)
	if err := encoder.Encode(p); err != nil {
		return nil, err
	}
	for _, value := range values {
		if err := value.GobSerialize(encoder); err != nil {
			return nil, err
		}
	}
	return state.Bytes(), nil
}

// Restore implements [elastic.Trainer].
func (t *trainer) Restore(ctx context.Context, states ...[]byte) error {
	decoder := gob.NewDecoder(bytes.NewReader(states[0]))
	var p position
	if err := decoder.Decode(&p); err != nil {
		return err
	}
	store := t.loop.Trainer.Store()
	for _, path := range p.Paths {
		value, err := tensors.GobDeserialize(decoder)
		if err != nil {
			return err
		}
		v := store.GetVariable(path)
		if v == nil { // a variable of the optimizer, which has made no update here
			store.VariableWithValue(path, value).SetTrainable(false)
			continue
		}
		if err := v.SetValue(value); err != nil {
			return err
		}
	}
	t.loop.LoopStep = p.Step
	if err := t.data.Seek(p.Epoch, p.Batch); err != nil {
		return err
	}
	return t.Gradients.Restore(ctx, p.Reduction)
}
