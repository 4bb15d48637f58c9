package spmd

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/tutti-go/tutti/comm"
)

// executable is a compiled graph.
type executable struct {
	graph  *builder      // uncompiled graph
	place  int           // index of this rank's device in the graph, -1 if the graph does not use it
	stages []stageRunner // in order
	uses   []int         // number of reads of each slot
}

// stageRunner runs a stage and the reduction after it.
type stageRunner struct {
	*stage
	compiled compute.Executable // nil if nothing uses its results
	group    comm.Communicator  // of its reduction
}

// Compile implements [compute.Builder]. All ranks compile the same graphs in the same order. For a distributed graph
// with reductions, Compile is collective over all ranks, including ranks without a device in the graph. It compares
// the graph's reductions, and a difference is [comm.ErrMismatch] on all ranks. Other graphs are compiled without
// communication.
func (g *builder) Compile() (compute.Executable, error) {
	if len(g.outputs) == 0 {
		return nil, fmt.Errorf("spmd: graph %q is compiled before it returned", g.name)
	}
	if err := g.compare(); err != nil {
		return nil, err
	}
	e := &executable{
		graph: g,
		uses:  make([]int, g.slots),
		place: -1,
	}
	for i := range g.devices {
		if g.device(i) == g.backend.device() {
			e.place = i
		}
	}
	for _, s := range g.stages {
		runner := stageRunner{stage: s}
		var err error
		if len(s.results) > 0 {
			if runner.compiled, err = s.compile(); err != nil {
				return nil, err
			}
			e.count(s.parameters)
		}
		if s.reduction != nil && g.devices > 1 {
			if runner.group, err = g.backend.group(g.groups(s.reduction)); err != nil {
				return nil, err
			}
		}
		if s.reduction != nil {
			e.count(s.reduction.operands)
		}
		e.stages = append(e.stages, runner)
	}
	for _, v := range g.outputs {
		e.uses[v.slot]++
	}
	return e, nil
}

// compile compiles the stage's graph. The Go backend (v0.1.0) fails on an unused parameter that is younger than all
// results, so one result is remade at the end, which copies nothing.
func (s *stage) compile() (compute.Executable, error) {
	last := len(s.results) - 1
	result, err := s.main.Identity(s.results[last])
	if err != nil {
		return nil, err
	}
	s.results[last] = result
	if err := s.main.Return(s.results, nil); err != nil {
		return nil, err
	}
	return s.builder.Compile()
}

// compare returns the same error on all ranks unless they compile the same reductions. Without it, a rank with an
// additional reduction of some shape would silently add values of other steps.
func (g *builder) compare() error {
	if g.devices == 1 {
		return nil
	}
	sum := sha256.New()
	count := 0
	for _, s := range g.stages {
		if s.reduction != nil {
			count++
			fmt.Fprintln(sum, s.reduction.op, s.reduction.shapes, g.groups(s.reduction))
		}
	}
	if count == 0 { // the graph needs no other rank
		return nil
	}
	hashes, err := g.backend.gather(sum.Sum(nil))
	if err != nil {
		return fmt.Errorf("spmd: graph %q: compare its AllReduce calls with other ranks': %w", g.name, err)
	}
	var different []int
	for rank, hash := range hashes {
		if !bytes.Equal(hash, hashes[0]) {
			different = append(different, rank)
		}
	}
	if different != nil {
		return fmt.Errorf("spmd: graph %q: %w: the AllReduce calls of ranks %v differ from those of rank 0 in number, "+
			"order, shape, operation or devices (this rank has %d): all ranks build the same graph",
			g.name, comm.ErrMismatch, different, count)
	}
	return nil
}

// count records the reads of slots.
func (e *executable) count(slots []int) {
	for _, slot := range slots {
		e.uses[slot]++
	}
}

// groups returns the devices of a reduction's groups.
func (g *builder) groups(r *reduction) [][]compute.DeviceNum {
	groups := make([][]compute.DeviceNum, len(r.groups))
	for i, indices := range r.groups {
		for _, index := range indices {
			groups[i] = append(groups[i], g.device(index))
		}
	}
	return groups
}

// Finalize implements [compute.Executable].
func (e *executable) Finalize() {
	for _, s := range e.stages {
		if s.compiled != nil {
			s.compiled.Finalize()
		}
	}
}

// Inputs implements [compute.Executable].
func (e *executable) Inputs() ([]string, []shapes.Shape) {
	return e.graph.names, shapesOf(e.graph.parameters)
}

// Outputs implements [compute.Executable].
func (e *executable) Outputs() []shapes.Shape { return shapesOf(e.graph.outputs) }

// shapesOf returns the shapes of values.
func shapesOf(values []*value) []shapes.Shape {
	all := make([]shapes.Shape, len(values))
	for i, v := range values {
		all[i] = v.shape
	}
	return all
}

// execution is one run of a graph: the buffers of the inner backend in the slots.
type execution struct {
	inner   compute.Backend  // backend of the buffers
	buffers []compute.Buffer // by slot
	owned   []bool           // owned by the execution, and freed after the last read
	unread  []int            // number of reads left for each slot
}

// read returns a buffer, and whether the caller now owns it.
func (x *execution) read(slot int) (compute.Buffer, bool) {
	x.unread[slot]--
	return x.buffers[slot], x.owned[slot] && x.unread[slot] == 0
}

// take returns a buffer owned by the caller.
func (x *execution) take(slot int) (compute.Buffer, error) {
	buffer, free := x.read(slot)
	if free {
		return buffer, nil
	}
	return duplicate(x.inner, buffer)
}

// put sets a slot to a buffer of the execution.
func (x *execution) put(slot int, buffer compute.Buffer) {
	x.buffers[slot] = buffer
	x.owned[slot] = true
}

// Execute implements [compute.Executable].
func (e *executable) Execute(
	inputs []compute.Buffer,
	donate []bool,
	device compute.DeviceNum,
) ([]compute.Buffer, error) {
	g := e.graph
	if len(inputs) != g.devices*len(g.parameters) || donate != nil && len(donate) != len(inputs) {
		return nil, fmt.Errorf("spmd: graph %q gets %d inputs for %d parameters on %d devices",
			g.name, len(inputs), len(g.parameters), g.devices)
	}
	place := e.place
	if g.devices == 1 { // a graph that is not distributed runs here, whichever device it names
		place = 0
		if g.assignment != nil {
			device = g.assignment[0]
		}
	}
	x := &execution{
		inner:   g.backend.Backend,
		buffers: make([]compute.Buffer, g.slots),
		owned:   make([]bool, g.slots),
		unread:  slices.Clone(e.uses),
	}
	if err := e.load(x, inputs, donate, place); err != nil {
		return nil, err
	}
	if place < 0 {
		return e.outputs(nil, place, device)
	}
	for _, s := range e.stages {
		if err := s.run(x, g.backend); err != nil {
			return nil, err
		}
	}
	results := make([]compute.Buffer, len(g.outputs))
	for i, v := range g.outputs {
		var err error
		if results[i], err = x.take(v.slot); err != nil {
			return nil, err
		}
	}
	return e.outputs(results, place, device)
}

// load puts this rank's inputs into their slots and frees donated inputs of other devices.
func (e *executable) load(x *execution, inputs []compute.Buffer, donate []bool, place int) error {
	parameters := e.graph.parameters
	local := make([]*buffer, len(parameters))
	for i, input := range inputs {
		b, ok := input.(*buffer)
		if !ok || b.backend != e.graph.backend {
			return fmt.Errorf("spmd: input %d is a buffer of another backend (%T)", i, input)
		}
		if i/len(parameters) == place {
			local[i%len(parameters)] = b
		} else if donate != nil && donate[i] {
			if err := b.Finalize(); err != nil {
				return err
			}
		}
	}
	for i, b := range local {
		if b == nil { // from a graph that does not use this rank's device
			continue
		}
		inner, err := b.inner()
		if err != nil {
			return err
		}
		slot := parameters[i].slot
		x.buffers[slot] = inner
		if donate != nil && donate[place*len(parameters)+i] {
			x.owned[slot] = b.release() != nil
		}
	}
	return nil
}

// run runs the stage and its reduction.
func (s *stageRunner) run(x *execution, b *backend) error {
	if s.compiled != nil {
		inputs := make([]compute.Buffer, len(s.parameters))
		free := make([]bool, len(s.parameters))
		for i, slot := range s.parameters {
			inputs[i], free[i] = x.read(slot)
		}
		results, err := s.compiled.Execute(inputs, free, 0)
		if err != nil {
			return err
		}
		for i, slot := range s.slots {
			x.put(slot, results[i])
		}
	}
	if s.reduction == nil {
		return nil
	}
	buffers := make([]compute.Buffer, len(s.reduction.operands))
	for i, slot := range s.reduction.operands {
		var err error
		if buffers[i], err = x.take(slot); err != nil {
			return err
		}
	}
	if s.group != nil { // one device has nothing to add
		if err := b.reduce(s.group, buffers, s.reduction.op); err != nil {
			return err
		}
	}
	for i, slot := range s.reduction.results {
		x.put(slot, buffers[i])
	}
	return nil
}

// outputs returns the results of all devices. This rank has its device's results and those that are the same
// everywhere.
func (e *executable) outputs(results []compute.Buffer, place int, device compute.DeviceNum) ([]compute.Buffer, error) {
	g := e.graph
	if g.devices > 1 && place >= 0 {
		device = g.device(place)
	}
	local := make([]*buffer, len(results))
	for i, inner := range results {
		local[i] = g.backend.newBuffer(inner, device)
	}
	all := make([]compute.Buffer, 0, g.devices*len(g.outputs))
	for index := range g.devices {
		for i, v := range g.outputs {
			switch {
			case index == place:
				all = append(all, local[i])
			case place >= 0 && v.uniform:
				local[i].memory.holders.Add(1)
				all = append(all, &buffer{
					backend: g.backend,
					device:  g.device(index),
					shape:   local[i].shape,
					memory:  local[i].memory,
				})
			default:
				all = append(all, &buffer{
					backend: g.backend,
					device:  g.device(index),
					shape:   v.shape,
				})
			}
		}
	}
	return all, nil
}
