package spmd

import (
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
)

//go:generate go run ./generate

var _ compute.Function = (*function)(nil)

// Name implements [compute.Function].
func (f *function) Name() string { return f.name }

// Builder implements [compute.Function].
func (f *function) Builder() compute.Builder { return f.builder }

// Parent implements [compute.Function].
func (f *function) Parent() compute.Function {
	if f.parent == nil {
		return nil
	}
	return f.parent
}

// Closure implements [compute.Function].
func (f *function) Closure() (compute.Function, error) {
	o := f.begin()
	inner, err := o.target.Closure()
	if err != nil {
		return nil, err
	}
	return f.builder.nested(inner, "", f), nil
}

// Parameter implements [compute.Function].
func (f *function) Parameter(name string, shape shapes.Shape, sharding *compute.ShardingSpec) (compute.Value, error) {
	if f.inner != nil {
		o := f.begin()
		return o.one(o.target.Parameter(name, shape, nil))
	}
	g := f.builder
	v := &value{
		shape:   shape,
		uniform: g.devices == 1 || replicated(sharding),
		slot:    g.newSlot(),
	}
	g.parameters = append(g.parameters, v)
	g.names = append(g.names, name)
	return v, nil
}

// replicated reports whether a sharding gives all devices the same value.
func replicated(sharding *compute.ShardingSpec) bool {
	return sharding != nil && !slices.ContainsFunc(sharding.Axes, func(axes []string) bool { return len(axes) > 0 })
}

// Constant implements [compute.Function].
func (f *function) Constant(flat any, dims ...int) (compute.Value, error) {
	o := f.begin()
	return o.one(o.target.Constant(flat, dims...))
}

// Shape implements [compute.Function].
func (f *function) Shape(v compute.Value) (shapes.Shape, error) {
	known, ok := v.(*value)
	if !ok {
		return shapes.Invalid(), fmt.Errorf("spmd: a value of another backend (%T)", v)
	}
	return known.shape, nil
}

// Return implements [compute.Function]. In an SPMD graph, shardings say how the devices' results form a whole, which
// does not concern the graph.
func (f *function) Return(outputs []compute.Value, _ []*compute.ShardingSpec) error {
	if f.inner != nil {
		o := f.begin()
		inner := o.operands(outputs)
		if o.err != nil {
			return o.err
		}
		f.uniform = f.uniform && o.uniform
		return o.target.Return(inner, nil)
	}
	if len(outputs) == 0 || len(f.builder.outputs) > 0 {
		return fmt.Errorf("spmd: graph %q returns %d values, after %d", f.builder.name, len(outputs), len(f.builder.outputs))
	}
	for _, output := range outputs {
		v, ok := output.(*value)
		if !ok {
			return fmt.Errorf("spmd: a value of another backend (%T)", output)
		}
		if _, err := f.builder.export(v); err != nil {
			return err
		}
		f.builder.outputs = append(f.builder.outputs, v)
	}
	return nil
}

// Call implements [compute.Function].
func (f *function) Call(callee compute.Function, inputs ...compute.Value) ([]compute.Value, error) {
	o := f.begin()
	inner := o.function(callee)
	operands := o.operands(inputs)
	if o.err != nil {
		return nil, o.err
	}
	return o.many(o.target.Call(inner, operands...))
}

// Sort implements [compute.Function].
func (f *function) Sort(
	comparator compute.Function,
	axis int,
	stable bool,
	inputs ...compute.Value,
) ([]compute.Value, error) {
	o := f.begin()
	inner := o.function(comparator)
	operands := o.operands(inputs)
	if o.err != nil {
		return nil, o.err
	}
	return o.many(o.target.Sort(inner, axis, stable, operands...))
}

// While implements [compute.Function].
func (f *function) While(condition, body compute.Function, state ...compute.Value) ([]compute.Value, error) {
	o := f.begin()
	innerCondition := o.function(condition)
	innerBody := o.function(body)
	operands := o.operands(state)
	if o.err != nil {
		return nil, o.err
	}
	return o.many(o.target.While(innerCondition, innerBody, operands...))
}

// If implements [compute.Function].
func (f *function) If(predicate compute.Value, yes, no compute.Function) ([]compute.Value, error) {
	o := f.begin()
	innerYes := o.function(yes)
	innerNo := o.function(no)
	operand := o.operand(predicate)
	if o.err != nil {
		return nil, o.err
	}
	return o.many(o.target.If(operand, innerYes, innerNo))
}

// AllReduce implements [compute.CollectiveOps]. It ends a stage.
func (f *function) AllReduce(
	operands []compute.Value,
	reduce compute.ReduceOpType,
	groups [][]int,
) ([]compute.Value, error) {
	g := f.builder
	if f.inner != nil {
		return nil, fmt.Errorf("spmd: AllReduce in a closure or a function, which the Go backend runs by itself: %w; "+
			"call it in the graph's main function", compute.ErrNotImplemented)
	}
	op, ok := reductions[reduce]
	if !ok {
		return nil, fmt.Errorf("spmd: AllReduce by %s: %w", reduce, compute.ErrNotImplemented)
	}
	if err := g.checkGroups(groups); err != nil {
		return nil, err
	}
	r := &reduction{
		op:     op,
		groups: groups,
	}
	var results []compute.Value
	for _, operand := range operands {
		v, ok := operand.(*value)
		if !ok {
			return nil, fmt.Errorf("spmd: a value of another backend (%T)", operand)
		}
		if _, err := elementType(v.shape.DType); err != nil {
			return nil, err
		}
		slot, err := g.export(v)
		if err != nil {
			return nil, err
		}
		result := &value{
			shape:   v.shape,
			uniform: len(groups) == 1,
			slot:    g.newSlot(),
		}
		r.operands = append(r.operands, slot)
		r.shapes = append(r.shapes, v.shape)
		r.results = append(r.results, result.slot)
		results = append(results, result)
	}
	g.stage().reduction = r
	g.begin()
	return results, nil
}

// checkGroups returns an error unless each device is in one group.
func (g *builder) checkGroups(groups [][]int) error {
	devices := slices.Concat(groups...)
	slices.Sort(devices)
	if len(devices) != g.devices {
		return fmt.Errorf("spmd: groups %v of AllReduce must contain each of %d devices once", groups, g.devices)
	}
	for i, device := range devices {
		if device != i {
			return fmt.Errorf("spmd: groups %v of AllReduce must contain each of %d devices once", groups, g.devices)
		}
	}
	return nil
}
