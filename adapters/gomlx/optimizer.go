// Package gomlx makes programs of GoMLX (https://github.com/gomlx/gomlx) data
// parallel: an optimizer that averages gradients over the ranks of a tutti
// communicator before another one uses them, and a data set of which each rank
// gets its share. It works with every backend of GoMLX whose tensors the host can
// read; README.md has a program before and after.
package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/gomlx/pkg/core/dtypes"
	"github.com/gomlx/gomlx/pkg/core/graph"
	"github.com/gomlx/gomlx/pkg/core/tensors"
	mlctx "github.com/gomlx/gomlx/pkg/ml/context"
	"github.com/gomlx/gomlx/pkg/ml/context/initializers"
	"github.com/gomlx/gomlx/pkg/ml/train"
	"github.com/gomlx/gomlx/pkg/ml/train/optimizers"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// scope is where the optimizer keeps gradients between the two halves of a step.
const scope = "/tutti"

// Optimizer averages gradients over ranks before an optimizer of GoMLX uses them.
// The trainer's graph only computes gradients; when it has run, they are reduced,
// where they are, and a second graph updates the variables. Gradients that the
// trainer accumulates are reduced once, when they are complete.
//
// All ranks have the same trainable variables, and every graph of a trainer uses all
// of them. What train.AddPerStepUpdateGraphFn adds runs before the update.
type Optimizer struct {
	ctx   context.Context // of the training: hooks of GoMLX have none
	c     comm.Communicator
	cfg   ddp.Config
	inner optimizers.Interface
	rt    *cpu.Runtime
	sync  *ddp.Gradients

	model  *mlctx.Context // of the first graph
	params []*mlctx.Variable
	slots  []*mlctx.Variable // their gradients
	due    *mlctx.Variable   // not 0: slots are complete
	update *mlctx.Exec
}

// New returns an optimizer that averages over the ranks of c as cfg says, densely
// unless set, and leaves the update to inner, which works with given gradients
// (train.OptimizeWithGradients: Adam, SGD and their relatives). ctx ends waits for
// other ranks. All ranks pass the same.
func New(ctx context.Context, c comm.Communicator, inner optimizers.Interface, cfg ddp.Config) (*Optimizer, error) {
	if _, ok := inner.(train.OptimizeWithGradients); !ok || c == nil {
		return nil, fmt.Errorf("gomlx: new optimizer: %w: communicator %v; optimizer %T takes given gradients: %v", comm.ErrArgument, c, inner, ok)
	}
	return &Optimizer{ctx: ctx, c: c, cfg: cfg, inner: inner, rt: cpu.New()}, nil
}

// Attach has loop reduce gradients after each step. When the loop starts, and when
// the first gradients are reduced, all ranks get rank 0's variables, the state of
// the random numbers among them. What rank 0 loads lazily (a checkpoint), all ranks
// load.
func (o *Optimizer) Attach(loop *train.Loop) {
	const first = -1000 // before hooks that look at the variables
	loop.OnStart("tutti", first, func(loop *train.Loop, _ train.Dataset) error {
		if loop.LoopStep > 0 {
			return nil
		}
		ctx := loop.Trainer.Context()
		if v := ctx.GetVariableByScopeAndName(mlctx.RootScope, mlctx.RNGStateVariableName); v == nil || !v.HasValue() {
			if err := ctx.ResetRNGState(); err != nil {
				return err
			}
		}
		return o.broadcast(slices.Collect(ctx.IterVariables()))
	})
	loop.OnStep("tutti", first, func(*train.Loop, []*tensors.Tensor) error { return o.step() })
}

// UpdateGraph implements optimizers.Interface.
func (o *Optimizer) UpdateGraph(ctx *mlctx.Context, _ *graph.Graph, loss *graph.Node) {
	o.UpdateGraphWithGradients(ctx, ctx.BuildTrainableVariablesGradientsGraph(loss), loss.DType())
}

// UpdateGraphWithGradients implements train.OptimizeWithGradients. It builds the
// half of a step that comes before the reduction.
func (o *Optimizer) UpdateGraphWithGradients(ctx *mlctx.Context, gradients []*graph.Node, loss dtypes.DType) {
	ctx, g := ctx.Checked(false), gradients[0].Graph()
	var params, slots []*mlctx.Variable
	for v := range ctx.IterVariables() {
		if v.Trainable && v.InUseByGraph(g) {
			slot := ctx.InAbsPath(scope+v.Scope()).WithInitializer(initializers.Zero).VariableWithShape(v.Name(), v.Shape())
			params, slots = append(params, v), append(slots, slot.SetTrainable(false))
		}
	}
	for i, slot := range slots {
		slot.SetValueGraph(gradients[i])
	}
	due := ctx.InAbsPath(scope).VariableWithValue("due", int32(0)).SetTrainable(false)
	due.SetValueGraph(graph.Const(g, int32(1)))
	if o.update != nil {
		if !slices.Equal(params, o.params) {
			panic(errors.New("gomlx: a graph uses other trainable variables than the first one"))
		}
		return
	}
	o.model, o.params, o.slots, o.due = ctx, params, slots, due
	o.update = mlctx.MustNewExec(g.Backend(), ctx, func(ctx *mlctx.Context, g *graph.Graph) *graph.Node {
		var reduced []*graph.Node
		for i, v := range o.params {
			v.ValueGraph(g) // so that it is in use
			reduced = append(reduced, o.slots[i].ValueGraph(g))
		}
		o.inner.(train.OptimizeWithGradients).UpdateGraphWithGradients(ctx.Checked(false), reduced, loss)
		return graph.ScalarZero(g, loss)
	})
}

// Clear implements optimizers.Interface.
func (o *Optimizer) Clear(ctx *mlctx.Context) error {
	return errors.Join(ctx.InAbsPath(scope).DeleteVariablesInScope(), o.inner.Clear(ctx))
}

// Close gives memory back. The communicator stays as it is.
func (o *Optimizer) Close() error {
	var err error
	if o.sync != nil {
		err = o.sync.Close()
	}
	return errors.Join(err, o.rt.Close())
}

// step reduces gradients and updates variables, if gradients are complete.
func (o *Optimizer) step() error {
	if o.due == nil { // no graph that updates was built
		return nil
	}
	if due, err := o.due.Value(); err != nil || tensors.ToScalar[int32](due) == 0 {
		return err
	}
	if err := o.due.SetValue(tensors.FromScalar(int32(0))); err != nil {
		return err
	}
	if o.sync == nil {
		if err := o.broadcast(o.params); err != nil {
			return err
		}
	}
	err := o.with(o.slots, nil, func(gradients []*runtime.Tensor) (err error) {
		if o.sync == nil {
			if o.sync, err = ddp.New(o.ctx, o.rt, o.c, gradients, o.cfg); err != nil {
				return err
			}
		}
		return o.sync.ReduceAll(o.ctx, gradients)
	})
	if err == nil {
		_, err = o.update.Exec()
	}
	return err
}

// broadcast gives all ranks rank 0's variables, those that have values.
func (o *Optimizer) broadcast(variables []*mlctx.Variable) error {
	variables = slices.DeleteFunc(variables, func(v *mlctx.Variable) bool { return !v.HasValue() })
	return o.with(variables, nil, func(values []*runtime.Tensor) error {
		return distributed.BroadcastAll(o.ctx, o.c, values, 0)
	})
}

// with calls use with tensors of the memory of variables, behind those that there
// are already. GoMLX gives access to memory only while a function runs.
func (o *Optimizer) with(variables []*mlctx.Variable, wrapped []*runtime.Tensor, use func([]*runtime.Tensor) error) error {
	if len(variables) == 0 {
		return use(wrapped)
	}
	value, err := variables[0].Value()
	if err != nil {
		return err
	}
	dt, err := dtype.Parse(value.DType().String())
	if err != nil {
		return fmt.Errorf("%s: %w", variables[0].ScopeAndName(), err)
	}
	access := value.MutableBytes(func(data []byte) {
		var t *runtime.Tensor
		if t, err = cpu.WrapBytes(o.rt, data, dt, value.Shape().Dimensions...); err == nil {
			err = errors.Join(o.with(variables[1:], append(wrapped, t), use), t.Free())
		}
	})
	return errors.Join(access, err)
}
