// Package gomlx makes programs of GoMLX (https://github.com/gomlx/gomlx) data parallel. An optimizer averages
// gradients over the ranks of a tutti communicator before another one uses them, and a data set gives each rank its
// share. The package works with every backend of GoMLX whose tensors the host can read. README.md has a program
// before and after.
package gomlx

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// scope is the scope in which the optimizer keeps gradients between the two halves of a step.
const scope = "/tutti"

// Optimizer averages gradients over ranks before an optimizer of GoMLX uses them. The trainer's graph only computes
// gradients. After it has run, they are reduced in place, and a second graph updates the variables. Gradients that
// the trainer accumulates are reduced once, when they are complete.
//
// All ranks have the same trainable variables, and every graph of a trainer uses all of them. Integers and booleans
// have no gradient and are ignored, even if they are marked trainable: GoMLX's loader of checkpoints marks everything
// that it loads, including the state of the random numbers. Graphs of train.AddPerStepUpdateGraphFn run before the
// update.
type Optimizer struct {
	world
	cfg   ddp.Config          // as passed
	inner optimizer.Interface // makes the updates
	sync  *ddp.Gradients      // averages gradients; nil before the first step
	saved [][]byte            // argument of Restore before the first step

	params   []*model.Variable // of the first graph
	slots    []*model.Variable // their gradients, in the order common to all ranks
	averages []*model.Variable // statistics of batch normalization, if they are synchronized
	reduced  *tensors.Tensor   // the first slot's value in the last update; each updating graph makes another
	update   *model.Exec       // makes an update from the slots

	syncBatchNorm bool // see SyncBatchNorm
}

// world is the state that GoMLX's hooks lack.
type world struct {
	ctx context.Context   // of the training
	c   comm.Communicator // to all ranks
	rt  *cpu.Runtime      // of gradients on the host
}

// New returns an optimizer that averages over the ranks of c as cfg says, densely by default, and leaves the update
// to inner. inner must work with given gradients (train.OptimizeWithGradients: Adam, SGD and their relatives). ctx
// ends waits for other ranks. All ranks pass the same.
func New(ctx context.Context, c comm.Communicator, inner optimizer.Interface, cfg ddp.Config) (*Optimizer, error) {
	if _, ok := inner.(train.OptimizeWithGradients); !ok || c == nil {
		return nil, fmt.Errorf("gomlx: new optimizer: %w: communicator %v; optimizer %T takes given gradients: %v",
			comm.ErrArgument, c, inner, ok)
	}
	return &Optimizer{
		world: world{ctx, c, cpu.New()},
		cfg:   cfg,
		inner: inner,
	}, nil
}

// Attach makes loop reduce gradients after each step. When the loop starts, ranks with different examples in their
// [Dataset] get [comm.ErrMismatch]. Then, and when the first gradients are reduced, all ranks get rank 0's variables,
// including the state of the random numbers. If rank 0 loads a checkpoint lazily, all ranks must load it.
func (o *Optimizer) Attach(loop *train.Loop) { o.attach(loop, o.step) }

// attach makes loop begin with the same variables on all ranks, and call step after each step.
func (o world) attach(loop *train.Loop, step func() error) {
	const first = -1000 // before hooks that read the variables
	loop.OnStart("tutti", first, func(loop *train.Loop, data train.Dataset) error {
		if d, ok := data.(*Dataset); ok {
			if err := o.compare(d); err != nil {
				return err
			}
		}
		if loop.LoopStep > 0 {
			return nil
		}
		store := loop.Trainer.Store()
		if v := store.GetVariable("/" + model.RNGStateVariableName); v == nil || !v.HasValue() {
			if err := store.ResetRNGState(); err != nil {
				return err
			}
		}
		return o.broadcast(slices.Collect(store.IterVariables()))
	})
	loop.OnStep("tutti", first, func(*train.Loop, []*tensors.Tensor) error { return step() })
}

// SyncBatchNorm makes every update average the statistics of batch normalization (mean, variance and their weight)
// over the ranks. All ranks then evaluate the same model, and any of them may write a checkpoint. Within a step a
// rank normalizes by its own batch. Call it before the first step, on all ranks.
func (o *Optimizer) SyncBatchNorm() *Optimizer {
	o.syncBatchNorm = true
	return o
}

// Stats returns the statistics of [ddp.Gradients] for the last update. Before the first one they are zero.
func (o *Optimizer) Stats() (ddp.Stats, error) {
	if o.sync == nil {
		return ddp.Stats{}, nil
	}
	return o.sync.Stats(o.ctx)
}

// State returns the state that the reduction keeps between updates ([ddp.Gradients.State]: residuals of sparse
// patterns, momentum), nil before the first. Each rank saves its own, beside the checkpoint of variables that one
// rank writes.
func (o *Optimizer) State() ([]byte, error) {
	if o.sync == nil {
		return nil, nil
	}
	return o.sync.State(o.ctx)
}

// Restore continues from states that [Optimizer.State] returned, together with the variables of the same step. It
// takes the rank's own state or, if the number of ranks has changed, all states ([ddp.Gradients.Restore]). Before the
// first step, the first reduction restores them and reports their errors.
func (o *Optimizer) Restore(states ...[]byte) error {
	states = slices.DeleteFunc(states, func(s []byte) bool { return len(s) == 0 })
	if o.sync == nil || len(states) == 0 {
		o.saved = states
		return nil
	}
	return o.sync.Restore(o.ctx, states...)
}

// UpdateGraph implements optimizer.Interface.
func (o *Optimizer) UpdateGraph(scope *model.Scope, _ *graph.Graph, loss *graph.Node) {
	o.UpdateGraphWithGradients(scope, scope.BuildTrainableVariablesGradientsGraph(loss), loss.DType())
}

// UpdateGraphWithGradients implements train.OptimizeWithGradients. It builds the half of a step before the reduction.
func (o *Optimizer) UpdateGraphWithGradients(s *model.Scope, gradients []*graph.Node, loss dtypes.DType) {
	store := s.Store()
	g := gradients[0].Graph()
	var params, slots []*model.Variable
	for i, v := range trainable(s, g) {
		if !differentiable(v) {
			continue
		}
		slot := store.VariableWithShape(scope+v.Path(), v.Shape(), graph.Zeros).SetTrainable(false)
		slot.SetNodeValue(gradients[i])
		params = append(params, v)
		slots = append(slots, slot)
	}
	if len(params) == 0 {
		panic(errors.New("gomlx: a graph has no trainable variables but integers"))
	}
	if o.update != nil {
		if !slices.Equal(params, o.params) {
			panic(errors.New("gomlx: a graph uses other trainable variables than the first one"))
		}
		return
	}
	for v := range s.IterVariables() {
		if o.syncBatchNorm && !v.Trainable && path.Base(v.Scope()) == norm.BatchNormalizationScopeName {
			o.averages = append(o.averages, v)
		}
	}
	o.params, o.slots, o.averages = params, inOrder(slots), inOrder(o.averages)
	o.update = model.MustNewExec(g.Backend(), store, func(s *model.Scope, g *graph.Graph) *graph.Node {
		var reduced []*graph.Node
		for i, v := range params {
			v.NodeValue(g) // marks it as used
			reduced = append(reduced, slots[i].NodeValue(g))
		}
		o.inner.(train.OptimizeWithGradients).UpdateGraphWithGradients(s, reduced, loss)
		return graph.ScalarZero(g, loss)
	})
}

// trainable returns the variables that a graph trains, in the order of their gradients.
func trainable(s *model.Scope, g *graph.Graph) (all []*model.Variable) {
	for v := range s.IterVariables() {
		if v.Trainable && v.InUseByGraph(g) {
			all = append(all, v)
		}
	}
	return all
}

// differentiable reports whether a variable can have a gradient.
func differentiable(v *model.Variable) bool {
	dt := v.DType()
	return dt.IsFloat() || dt.IsComplex()
}

// Clear implements optimizer.Interface.
func (o *Optimizer) Clear(s *model.Scope) error {
	return errors.Join(s.Store().DeleteVariablesInScope(scope), o.inner.Clear(s))
}

// Close frees memory. The communicator stays open.
func (o *Optimizer) Close() error {
	var err error
	if o.sync != nil {
		err = o.sync.Close()
	}
	return errors.Join(err, o.rt.Close())
}

// step reduces gradients and updates variables, if gradients are complete.
func (o *Optimizer) step() error {
	if len(o.slots) == 0 { // no updating graph was built
		return nil
	}
	complete, err := o.slots[0].Value()
	if err != nil || complete == o.reduced {
		return err
	}
	o.reduced = complete
	if o.sync == nil {
		if err := o.broadcast(o.params); err != nil {
			return err
		}
	}
	err = o.with(o.averages, nil, func(averages []*runtime.Tensor) error {
		return distributed.AllReduceAll(o.ctx, o.c, averages, comm.Avg)
	})
	if err == nil {
		err = o.with(o.slots, nil, func(gradients []*runtime.Tensor) error {
			if o.sync == nil {
				if err := o.begin(gradients); err != nil {
					return err
				}
			}
			return named(o.sync.ReduceAll(o.ctx, gradients), o.slots)
		})
	}
	if err == nil {
		_, err = o.update.Call()
	}
	return err
}

// begin makes the reducer of such gradients.
func (o *Optimizer) begin(gradients []*runtime.Tensor) (err error) {
	if o.sync, err = ddp.New(o.ctx, o.rt, o.c, gradients, o.cfg); err == nil && len(o.saved) > 0 {
		err, o.saved = o.sync.Restore(o.ctx, o.saved...), nil
	}
	return named(err, o.slots)
}

// named adds the variable's name to an error about one of the variables' tensors.
func named(err error, variables []*model.Variable) error {
	var tensorErr *distributed.TensorError
	if errors.As(err, &tensorErr) && tensorErr.Index < len(variables) {
		return fmt.Errorf("gomlx: variable %s: %w", strings.TrimPrefix(variables[tensorErr.Index].Path(), scope), err)
	}
	return err
}

// broadcast gives all ranks rank 0's variables that have values.
func (o world) broadcast(variables []*model.Variable) error {
	variables = slices.DeleteFunc(variables, func(v *model.Variable) bool { return !v.HasValue() })
	return o.with(inOrder(variables), nil, func(values []*runtime.Tensor) error {
		return distributed.BroadcastAll(o.ctx, o.c, values, 0)
	})
}

// inOrder returns variables sorted by path, because ranks that load a checkpoint may have them in different orders.
func inOrder(variables []*model.Variable) []*model.Variable {
	return slices.SortedFunc(slices.Values(variables), func(v, w *model.Variable) int {
		return strings.Compare(v.Path(), w.Path())
	})
}

// with calls use with wrapped and tensors of the variables' memory. GoMLX gives access to memory only while a
// function runs.
func (o world) with(variables []*model.Variable, wrapped []*runtime.Tensor, use func([]*runtime.Tensor) error) error {
	if len(variables) == 0 {
		return use(wrapped)
	}
	value, err := variables[0].Value()
	if err != nil {
		return err
	}
	dt, err := dtype.Parse(value.DType().String())
	if err != nil {
		return fmt.Errorf("%s: %w", variables[0].Path(), err)
	}
	access := mutable(value, func(data []byte) {
		var t *runtime.Tensor
		if t, err = cpu.WrapBytes(o.rt, data, dt, value.Shape().Dimensions...); err == nil {
			err = errors.Join(o.with(variables[1:], append(wrapped, t), use), t.Free())
		}
	})
	return errors.Join(access, err)
}

// mutable calls use with the memory of a value. This is the backend's memory if the host can write it and GoMLX has
// no copy, and otherwise a copy, which GoMLX then makes the value.
func mutable(value *tensors.Tensor, use func(data []byte)) error {
	backend, err := value.Backend()
	if err != nil || value.HasLocal() || !backend.HasSharedBuffers() {
		return value.MutableBytes(use)
	}
	device, err := value.Device()
	if err != nil {
		return err
	}
	buffer, err := value.Buffer(backend, device)
	if err != nil {
		return err
	}
	data, err := buffer.Data()
	if err == nil {
		use(dtypes.UnsafeByteSliceFromAny(data))
	}
	return err
}
