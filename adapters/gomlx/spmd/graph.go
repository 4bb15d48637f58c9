package spmd

import (
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/tutti-go/tutti/comm"
)

// builder builds a graph as a series of stages. An AllReduce ends a stage, and later operations go into the next one.
// A stage is a graph of the inner backend, compiled separately. A value that a later stage uses is a result of the
// stage that computes it and a parameter of the stages that use it.
type builder struct {
	backend *backend  // made the builder
	name    string    // of the graph
	main    *function // function of the graph
	stages  []*stage  // in execution order

	devices    int                 // number of devices that run the graph; 1 unless it is distributed
	assignment []compute.DeviceNum // devices by index; nil: 0, 1, …

	parameters []*value // of main
	names      []string // of parameters
	outputs    []*value // of main
	slots      int      // number of values with a slot
}

// stage is the part of a graph between two reductions.
type stage struct {
	builder compute.Builder  // of the inner backend
	main    compute.Function // its main function

	parameters []int           // slots of main's parameters
	results    []compute.Value // of main
	slots      []int           // of results

	reduction *reduction // after it; nil for the last stage
}

// reduction is an AllReduce.
type reduction struct {
	operands []int          // slots
	shapes   []shapes.Shape // of operands
	results  []int          // slots
	op       comm.ReduceOp  // the operation
	groups   [][]int        // indices of devices
}

// value is a value of a graph.
type value struct {
	shape   shapes.Shape // of the value
	uniform bool         // the same on all devices

	stage   *stage                   // computes the value; nil for a parameter and for the result of a reduction
	inner   compute.Value            // in that stage
	imports map[*stage]compute.Value // parameters of stages that use it
	slot    int                      // index in an execution; -1 if only its stage uses the value
	scope   *function                // closure or named function of the value; nil for main
}

// newBuilder returns the builder of an empty graph.
func newBuilder(b *backend, name string) *builder {
	g := &builder{
		backend: b,
		name:    name,
		devices: 1,
	}
	g.main = &function{
		builder: g,
		name:    compute.MainName,
		uniform: true,
	}
	g.begin()
	return g
}

// begin starts a stage.
func (g *builder) begin() {
	inner := g.backend.Backend.Builder(fmt.Sprintf("%s, stage %d", g.name, len(g.stages)))
	g.stages = append(g.stages, &stage{
		builder: inner,
		main:    inner.Main(),
	})
}

// stage returns the current stage.
func (g *builder) stage() *stage { return g.stages[len(g.stages)-1] }

// Name implements [compute.Builder].
func (g *builder) Name() string { return g.name }

// Main implements [compute.Builder].
func (g *builder) Main() compute.Function { return g.main }

// NewFunction implements [compute.Builder].
func (g *builder) NewFunction(name string) (compute.Function, error) {
	inner, err := g.stage().builder.NewFunction(name)
	if err != nil {
		return nil, err
	}
	return g.nested(inner, name, nil), nil
}

// nested returns a function that is built within the current stage.
func (g *builder) nested(inner compute.Function, name string, parent *function) *function {
	return &function{
		builder: g,
		name:    name,
		parent:  parent,
		inner:   inner,
		stage:   g.stage(),
		uniform: true,
	}
}

// OpShape implements [compute.Builder].
func (g *builder) OpShape(v compute.Value) (shapes.Shape, error) { return g.main.Shape(v) }

// DistributedSPMD implements [compute.Builder].
func (g *builder) DistributedSPMD(devices int) error {
	if devices < 1 || devices > g.backend.NumDevices() {
		return fmt.Errorf("spmd: a graph for %d devices, there are %d ranks", devices, g.backend.NumDevices())
	}
	g.devices = devices
	return nil
}

// DistributedAutoSharding implements [compute.Builder]. Partitioning a graph is a compiler's work, which the Go
// backend does not do.
func (g *builder) DistributedAutoSharding(...compute.Mesh) error {
	return fmt.Errorf("spmd: AutoSharding: %w: this backend runs SPMD graphs and partitions no others",
		compute.ErrNotImplemented)
}

// DeviceAssignment implements [compute.Builder].
func (g *builder) DeviceAssignment(devices ...compute.DeviceNum) error {
	if len(devices) != g.devices {
		return fmt.Errorf("spmd: %d devices are assigned to a graph for %d", len(devices), g.devices)
	}
	for i, device := range devices {
		if err := g.backend.checkDevice(device); err != nil {
			return err
		}
		if slices.Contains(devices[:i], device) {
			return fmt.Errorf("spmd: device %d is assigned twice", device)
		}
	}
	g.assignment = slices.Clone(devices)
	return nil
}

// device returns the device with an index.
func (g *builder) device(index int) compute.DeviceNum {
	if g.assignment == nil {
		return compute.DeviceNum(index)
	}
	return g.assignment[index]
}

// newSlot returns an index for a value in executions.
func (g *builder) newSlot() int {
	g.slots++
	return g.slots - 1
}

// export makes v available to later stages and returns its slot.
func (g *builder) export(v *value) (int, error) {
	if v.scope != nil {
		return 0, fmt.Errorf("spmd: a value of a closure or of function %q is used outside of it", v.scope.name)
	}
	if v.slot < 0 {
		v.slot = g.newSlot()
		v.stage.results = append(v.stage.results, v.inner)
		v.stage.slots = append(v.stage.slots, v.slot)
	}
	return v.slot, nil
}

// local returns v as a value of a stage.
func (g *builder) local(v *value, s *stage) (compute.Value, error) {
	if v.stage == s {
		return v.inner, nil
	}
	if inner, ok := v.imports[s]; ok {
		return inner, nil
	}
	slot, err := g.export(v)
	if err != nil {
		return nil, err
	}
	inner, err := s.main.Parameter(fmt.Sprint("value ", slot), v.shape, nil)
	if err != nil {
		return nil, err
	}
	s.parameters = append(s.parameters, slot)
	if v.imports == nil {
		v.imports = map[*stage]compute.Value{}
	}
	v.imports[s] = inner
	return inner, nil
}

// function is main, whose operations go into the current stage, or a closure or named function, whose operations go
// into the stage in which it began.
type function struct {
	builder *builder         // of the graph
	name    string           // "" for a closure
	parent  *function        // function that contains it; nil for main
	inner   compute.Function // nil for main
	stage   *stage           // nil for main
	uniform bool             // the values that it uses from other functions are the same on all devices
}

// operation is an operation being added to a function.
type operation struct {
	f       *function        // contains the operation
	stage   *stage           // runs the operation
	target  compute.Function // of the inner backend
	uniform bool             // all operands are
	err     error            // first error of an operand
}

// begin starts an operation.
func (f *function) begin() *operation {
	o := &operation{
		f:       f,
		stage:   f.stage,
		target:  f.inner,
		uniform: true,
	}
	if f.inner == nil {
		o.stage = f.builder.stage()
		o.target = o.stage.main
	}
	return o
}

// operand converts an operand; nil for an omitted one.
func (o *operation) operand(v compute.Value) compute.Value {
	if v == nil {
		return nil
	}
	known, ok := v.(*value)
	if !ok {
		o.err = fmt.Errorf("spmd: a value of another backend (%T)", v)
		return nil
	}
	inner, err := o.f.builder.local(known, o.stage)
	if err != nil && o.err == nil {
		o.err = err
	}
	o.uniform = o.uniform && known.uniform
	return inner
}

// operands converts operands.
func (o *operation) operands(values []compute.Value) []compute.Value {
	inner := make([]compute.Value, len(values))
	for i, v := range values {
		inner[i] = o.operand(v)
	}
	return inner
}

// function converts a closure or a named function to an operand.
func (o *operation) function(f compute.Function) compute.Function {
	nested, ok := f.(*function)
	switch {
	case !ok || nested.inner == nil:
		o.err = fmt.Errorf("spmd: %T is no closure and no named function of this graph", f)
		return f
	case nested.stage != o.stage:
		o.err = fmt.Errorf("spmd: a closure or a function (%q) from before an AllReduce is used after it: %w; "+
			"build it after the AllReduce", nested.name, compute.ErrNotImplemented)
	}
	o.uniform = o.uniform && nested.uniform
	return nested.inner
}

// quantization converts the values in the operand.
func (o *operation) quantization(q *compute.Quantization) *compute.Quantization {
	if q == nil {
		return nil
	}
	inner := *q
	inner.Scale = o.operand(q.Scale)
	inner.ZeroPoint = o.operand(q.ZeroPoint)
	return &inner
}

// attention converts the values in the operand.
func (o *operation) attention(c *compute.ScaledDotProductAttentionConfig) *compute.ScaledDotProductAttentionConfig {
	if c == nil {
		return nil
	}
	inner := *c
	inner.QuerySeqLen = o.operand(c.QuerySeqLen)
	inner.KeyValueSeqLen = o.operand(c.KeyValueSeqLen)
	inner.Bias = o.operand(c.Bias)
	inner.Mask = o.operand(c.Mask)
	return &inner
}

// many returns the results of an operation.
func (o *operation) many(results []compute.Value, err error) ([]compute.Value, error) {
	if o.err != nil {
		return nil, o.err
	}
	if err != nil {
		return nil, err
	}
	scope := o.f
	if o.f.inner == nil {
		scope = nil
	}
	o.f.uniform = o.f.uniform && o.uniform
	values := make([]compute.Value, len(results))
	for i, inner := range results {
		shape, err := o.target.Shape(inner)
		if err != nil {
			return nil, err
		}
		values[i] = &value{
			shape:   shape,
			uniform: o.uniform,
			stage:   o.stage,
			inner:   inner,
			slot:    -1,
			scope:   scope,
		}
	}
	return values, nil
}

// one returns the result of an operation.
func (o *operation) one(result compute.Value, err error) (compute.Value, error) {
	values, err := o.many([]compute.Value{result}, err)
	if err != nil {
		return nil, err
	}
	return values[0], nil
}

// two returns the results of an operation.
func (o *operation) two(a, b compute.Value, err error) (compute.Value, compute.Value, error) {
	values, err := o.many([]compute.Value{a, b}, err)
	if err != nil {
		return nil, nil, err
	}
	return values[0], values[1], nil
}

// three returns the results of an operation.
func (o *operation) three(a, b, c compute.Value, err error) (compute.Value, compute.Value, compute.Value, error) {
	values, err := o.many([]compute.Value{a, b, c}, err)
	if err != nil {
		return nil, nil, nil, err
	}
	return values[0], values[1], values[2], nil
}

// oneAndMany returns the results of an operation.
func (o *operation) oneAndMany(a compute.Value, b []compute.Value, err error) (compute.Value, []compute.Value, error) {
	values, err := o.many(append([]compute.Value{a}, b...), err)
	if err != nil {
		return nil, nil, err
	}
	return values[0], values[1:], nil
}
