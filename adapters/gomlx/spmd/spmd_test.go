package spmd_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/distributed"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/adapters/gomlx/spmd"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// onRanks calls body with the backend of each rank.
func onRanks(t *testing.T, ranks int, body func(backend compute.Backend, rank int) error) {
	t.Helper()
	require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
		inner, err := gobackend.New("")
		if err != nil {
			return err
		}
		backend, err := spmd.New(ctx, c, inner)
		if err != nil {
			return err
		}
		defer backend.Finalize()
		return body(backend, c.Rank())
	}))
}

// newGraph returns a graph for all devices of a mesh.
func newGraph(t *testing.T, backend compute.Backend, sizes []int, axes ...string) *graph.Graph {
	mesh, err := distributed.NewDeviceMesh(sizes, axes)
	assert.NoError(t, err)
	g := graph.NewGraph(backend, t.Name())
	assert.NoError(t, g.SetSPMD(mesh))
	return g
}

// TestAllReduce runs the cases of GoMLX's own tests (TestCollective in core/graph) for three devices and all
// reductions.
func TestAllReduce(t *testing.T) {
	const devices = 3
	for op, want := range map[compute.ReduceOpType][3]any{
		compute.ReduceOpSum:     {float32(1 + 3 + 5), []int32{60, 63}, []float64{10.1 + 100, 100.2 + 100, 1000.3 + 100}},
		compute.ReduceOpProduct: {float32(1 * 3 * 5), []int32{10 * 20 * 30, 11 * 21 * 31}, []float64{100, 2000, 30000}},
		compute.ReduceOpMax:     {float32(5), []int32{30, 31}, []float64{100, 100, 1000}},
		compute.ReduceOpMin:     {float32(1), []int32{10, 11}, []float64{0.1, 0.2, 0.3}},
	} {
		t.Run(op.String(), func(t *testing.T) {
			onRanks(t, devices, func(backend compute.Backend, rank int) error {
				g := newGraph(t, backend, []int{devices}, "replica")
				x := graph.Parameter(g, "x", shapes.Make(dtypes.Float32))
				y := graph.Parameter(g, "y", shapes.Make(dtypes.Int32, 2))
				z := graph.Parameter(g, "z", shapes.Make(dtypes.Float64, 3))
				if err := g.Compile(g.Distributed().AllReduce([]*graph.Node{x, y, z}, op)...); err != nil {
					return err
				}
				outputs := g.Run(
					float32(1), []int32{10, 11}, []float64{0.1, 0.2, 0.3},
					float32(3), []int32{20, 21}, []float64{10, 100, 1000},
					float32(5), []int32{30, 31}, []float64{100, 100, 100})
				for i, output := range outputs {
					assert.EqualValues(t, want[i%3], output.Value(), "rank %d, output %d", rank, i)
				}
				return nil
			})
		})
	}
}

// Groups along the axes of a mesh reduce separately. Devices may be assigned in any order.
func TestMesh(t *testing.T) {
	const devices = 4
	for _, assignment := range [][]compute.DeviceNum{nil, {2, 0, 3, 1}} {
		onRanks(t, devices, func(backend compute.Backend, rank int) error {
			g := newGraph(t, backend, []int{2, 2}, "row", "column")
			place := rank
			if assignment != nil {
				assert.NoError(t, g.SetDeviceAssignment(assignment))
				for i, device := range assignment {
					if int(device) == rank {
						place = i
					}
				}
			}
			x := graph.Parameter(g, "x", shapes.Make(dtypes.Float32))
			along := func(axis string, x *graph.Node) *graph.Node {
				return g.Distributed().Along(axis).AllReduceOne(x, compute.ReduceOpSum)
			}
			rows := along("row", x)
			both := along("column", graph.MulScalar(rows, 10))
			if err := g.Compile(x, rows, along("column", x), both); err != nil {
				return err
			}
			values := []float32{1, 2, 4, 8} // of devices (row, column): (0, 0), (0, 1), (1, 0), (1, 1)
			outputs := g.Run(values[0], values[1], values[2], values[3])
			row, column := place/2, place%2
			own := outputs[place*4:]
			assert.Equal(t, values[place], own[0].Value())
			assert.Equal(t, values[column]+values[2+column], own[1].Value())
			assert.Equal(t, values[2*row]+values[2*row+1], own[2].Value())
			assert.Equal(t, float32(150), own[3].Value())
			return nil
		})
	}
}

// A rank outside a mesh compiles and runs the mesh's graphs and gets no results.
func TestOutsideOfMesh(t *testing.T) {
	onRanks(t, 3, func(backend compute.Backend, rank int) error {
		g := newGraph(t, backend, []int{2}, "replica")
		x := graph.Parameter(g, "x", shapes.Make(dtypes.Float32))
		if err := g.Compile(g.Distributed().AllReduceOne(x, compute.ReduceOpSum)); err != nil {
			return err
		}
		for i, output := range g.Run(float32(1), float32(3)) {
			if rank < 2 {
				assert.Equal(t, float32(4), output.Value())
				continue
			}
			_, err := output.ValueSafe()
			assert.ErrorContains(t, err, fmt.Sprintf("of device %d is on rank %d alone, this is rank 2", i, i))
		}
		return nil
	})
}

// TestDifferentReductions checks that a rank whose graph has another reduction is named on all ranks before any
// reduction.
func TestDifferentReductions(t *testing.T) {
	const devices, odd = 3, 1
	all := [][]int{{0, 1, 2}}
	type call struct {
		operands int
		shape    shapes.Shape
		op       compute.ReduceOpType
		groups   [][]int
	}
	vector := shapes.Make(dtypes.Float32, 4)
	usual := call{1, vector, compute.ReduceOpSum, all}
	other := call{1, vector, compute.ReduceOpMax, all}
	for name, calls := range map[string][]call{
		"one more":     {usual, other, usual},
		"one less":     {usual},
		"order":        {other, usual},
		"operation":    {usual, usual},
		"two operands": {usual, {2, vector, compute.ReduceOpMax, all}},
		"type":         {{1, shapes.Make(dtypes.Int32, 4), compute.ReduceOpSum, all}, other},
		"count":        {{1, shapes.Make(dtypes.Float32, 5), compute.ReduceOpSum, all}, other},
		"groups":       {{1, vector, compute.ReduceOpSum, [][]int{{0, 1}, {2}}}, other},
		"devices":      {{1, vector, compute.ReduceOpSum, [][]int{{2, 1, 0}}}, other},
	} {
		t.Run(name, func(t *testing.T) {
			onRanks(t, devices, func(backend compute.Backend, rank int) error {
				g := backend.Builder(t.Name())
				if err := g.DistributedSPMD(devices); err != nil {
					return err
				}
				series := []call{usual, other}
				if rank == odd {
					series = calls
				}
				var results []compute.Value
				for i, c := range series {
					x, err := g.Main().Parameter(fmt.Sprint("x", i), c.shape, nil)
					if err != nil {
						return err
					}
					operands := []compute.Value{x, x}[:c.operands]
					sums, err := g.Main().AllReduce(operands, c.op, c.groups)
					if err != nil {
						return err
					}
					results = append(results, sums...)
				}
				if err := g.Main().Return(results, nil); err != nil {
					return err
				}
				_, err := g.Compile()
				assert.ErrorIs(t, err, comm.ErrMismatch)
				assert.ErrorContains(t, err, "ranks [1] differ from those of rank 0")
				return nil
			})
		})
	}
}

// A graph without reductions is compiled and run by one rank alone.
func TestWithoutReductions(t *testing.T) {
	onRanks(t, 2, func(backend compute.Backend, rank int) error {
		if rank == 1 {
			return nil
		}
		g := newGraph(t, backend, []int{2}, "replica")
		if err := g.Compile(graph.Neg(graph.Parameter(g, "x", shapes.Make(dtypes.Float32)))); err != nil {
			return err
		}
		assert.Equal(t, float32(-1), g.Run(float32(1), float32(2))[0].Value())
		return nil
	})
}

// program is a random graph of vectors, as steps from earlier values, and its result in plain Go.
type program struct {
	steps   []step
	outputs []int
}

type step struct {
	kind string // parameter, replicated, constant, add, multiply, negate or reduce
	a, b int    // operands
	op   compute.ReduceOpType
	axis []string
}

const width = 5

// newProgram returns a random program.
func newProgram(r *rand.Rand, size int) program {
	p := program{steps: []step{{kind: "parameter"}, {kind: "replicated"}, {kind: "constant"}}}
	kinds := []string{
		"parameter", "replicated", "constant", "negate", "add", "add", "multiply", "multiply", "reduce", "reduce",
	}
	for len(p.steps) < size {
		s := step{
			kind: kinds[r.IntN(len(kinds))],
			a:    r.IntN(len(p.steps)),
			b:    r.IntN(len(p.steps)),
			op:   []compute.ReduceOpType{compute.ReduceOpSum, compute.ReduceOpMax}[r.IntN(2)],
			axis: [][]string{{"row"}, {"column"}, {"row", "column"}}[r.IntN(3)],
		}
		p.steps = append(p.steps, s)
	}
	for range 1 + r.IntN(4) {
		p.outputs = append(p.outputs, r.IntN(size))
	}
	return p
}

// data returns the value of a parameter or a constant.
func data(i, device int) []float32 {
	r := rand.New(rand.NewPCG(uint64(i), uint64(device)))
	values := make([]float32, width)
	for k := range values {
		values[k] = r.Float32()*2 - 1
	}
	return values
}

// reference computes the program for devices in 2 rows and 3 columns without GoMLX, with reductions in device order.
func (p program) reference() [][][]float32 {
	const rows, columns = 2, 3
	var all [][][]float32 // by step and device
	for i, s := range p.steps {
		values := make([][]float32, rows*columns)
		for device := range values {
			values[device] = make([]float32, width)
			for k := range width {
				switch s.kind {
				case "parameter":
					values[device][k] = data(i, device)[k]
				case "replicated", "constant":
					values[device][k] = data(i, 0)[k]
				case "add":
					values[device][k] = all[s.a][device][k] + all[s.b][device][k]
				case "multiply":
					values[device][k] = all[s.a][device][k] * all[s.b][device][k]
				case "negate":
					values[device][k] = -all[s.a][device][k]
				case "reduce":
					first := true
					for other := range values {
						sameColumn := other%columns == device%columns
						sameRow := other/columns == device/columns
						if len(s.axis) == 1 && (s.axis[0] == "row" && !sameColumn || s.axis[0] == "column" && !sameRow) {
							continue
						}
						v := all[s.a][other][k]
						switch {
						case first:
							values[device][k] = v
						case s.op == compute.ReduceOpSum:
							values[device][k] += v
						default:
							values[device][k] = max(values[device][k], v)
						}
						first = false
					}
				}
			}
		}
		all = append(all, values)
	}
	return all
}

// build adds the program to a graph and returns the steps that are parameters.
func (p program) build(g *graph.Graph, mesh *distributed.DeviceMesh) (values []*graph.Node, parameters []int) {
	shape := shapes.Make(dtypes.Float32, width)
	for i, s := range p.steps {
		var v *graph.Node
		switch s.kind {
		case "parameter":
			v = graph.Parameter(g, fmt.Sprint("p", i), shape)
			parameters = append(parameters, i)
		case "replicated":
			v = graph.ShardedParameter(g, fmt.Sprint("p", i), shape, distributed.NewReplicatedShardingSpec(mesh))
			parameters = append(parameters, i)
		case "constant":
			v = graph.Const(g, data(i, 0))
		case "add":
			v = graph.Add(values[s.a], values[s.b])
		case "multiply":
			v = graph.Mul(values[s.a], values[s.b])
		case "negate":
			v = graph.Neg(values[s.a])
		case "reduce":
			v = g.Distributed().Along(s.axis...).AllReduceOne(values[s.a], s.op)
		}
		values = append(values, v)
	}
	return values, parameters
}

// TestRandomGraphs checks random graphs against the reference. The results that a rank can read have its bits, also
// in a second run and with donated inputs, and each rank can read its device's results.
func TestRandomGraphs(t *testing.T) {
	const devices = 6
	for seed := range uint64(40) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			p := newProgram(rand.New(rand.NewPCG(seed, 51)), 4+int(seed)/2)
			want := p.reference()
			onRanks(t, devices, func(backend compute.Backend, rank int) error {
				mesh, err := distributed.NewDeviceMesh([]int{2, 3}, []string{"row", "column"})
				if err != nil {
					return err
				}
				g := graph.NewGraph(backend, t.Name())
				if err := g.SetSPMD(mesh); err != nil {
					return err
				}
				values, parameters := p.build(g, mesh)
				var outputs []*graph.Node
				for _, i := range p.outputs {
					outputs = append(outputs, values[i])
				}
				if err := g.Compile(outputs...); err != nil {
					return err
				}
				var inputs, kept []any
				for device := range devices {
					for _, i := range parameters {
						number := device
						if p.steps[i].kind == "replicated" {
							number = 0
						}
						inputs = append(inputs, data(i, number))
						kept = append(kept, tensors.FromValue(data(i, number)))
					}
				}
				for _, arguments := range [][]any{kept, inputs, kept} { // GoMLX donates arguments that are not tensors
					for i, output := range g.Run(arguments...) {
						device, place := i/len(p.outputs), p.outputs[i%len(p.outputs)]
						got, err := output.ValueSafe()
						if err == nil {
							assert.Equal(t, want[place][device], got, "rank %d, device %d, %+v", rank, device, p)
						} else if assert.NotEqual(t, rank, device) {
							assert.ErrorContains(t, err, fmt.Sprintf("is on rank %d alone", device))
						}
					}
				}
				return nil
			})
		})
	}
}

// Closures belong to the stage in which they are built: before a reduction, or after it with values of an earlier
// stage.
func TestClosures(t *testing.T) {
	const devices = 2
	onRanks(t, devices, func(backend compute.Backend, rank int) error {
		g := newGraph(t, backend, []int{devices}, "replica")
		x := graph.Parameter(g, "x", shapes.Make(dtypes.Float32, 3))
		early := graph.Sort(x, 0, true)
		sum := g.Distributed().AllReduceOne(early, compute.ReduceOpSum)
		late := graph.SortFunc(graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
			a := graph.Parameter(g, "a", shapes.Make(dtypes.Float32))
			b := graph.Parameter(g, "b", shapes.Make(dtypes.Float32))
			return []*graph.Node{graph.GreaterThan(a, b)}
		}), 0, true, sum)[0]
		chosen := graph.If(graph.GreaterThan(graph.ReduceAllSum(x), graph.Scalar(g, dtypes.Float32, 10)),
			graph.NewClosure(g, func(*graph.Graph) []*graph.Node { return []*graph.Node{graph.Add(x, sum)} }),
			graph.NewClosure(g, func(*graph.Graph) []*graph.Node { return []*graph.Node{sum} }))[0]
		if err := g.Compile(late, chosen); err != nil {
			return err
		}
		outputs := g.Run([]float32{3, 1, 2}, []float32{30, 10, 20})
		for device := range devices {
			assert.Equal(t, []float32{33, 22, 11}, outputs[2*device].Value())
		}
		want := [][]float32{{11, 22, 33}, {41, 32, 53}}
		assert.Equal(t, want[rank], outputs[2*rank+1].Value())
		_, err := outputs[2*(1-rank)+1].ValueSafe()
		assert.ErrorContains(t, err, "make it the same on all devices", "x differs between devices, so what If chose does")
		return nil
	})
}

// Building an impossible graph is an error with a reason.
func TestRefused(t *testing.T) {
	onRanks(t, 2, func(backend compute.Backend, rank int) error {
		for want, build := range map[string]func(g *graph.Graph, x *graph.Node){
			"AllReduce in a closure": func(g *graph.Graph, x *graph.Node) {
				graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
					return []*graph.Node{g.Distributed().AllReduceOne(x, compute.ReduceOpSum)}
				})
			},
			"build it after the AllReduce": func(g *graph.Graph, x *graph.Node) {
				double := graph.NewFunction(g, "double", func(g *graph.Graph) []*graph.Node {
					return []*graph.Node{graph.MulScalar(graph.Parameter(g, "a", shapes.Make(dtypes.Float32, 3)), 2)}
				})
				double.Call(g.Distributed().AllReduceOne(x, compute.ReduceOpSum))
			},
			"AllReduce by Undefined": func(g *graph.Graph, x *graph.Node) {
				g.Distributed().AllReduceOne(x, compute.ReduceOpUndefined)
			},
		} {
			g := newGraph(t, backend, []int{2}, "replica")
			x := graph.Parameter(g, "x", shapes.Make(dtypes.Float32, 3))
			err := recovered(func() { build(g, x) })
			if assert.ErrorContains(t, err, want) {
				assert.True(t, compute.IsNotImplemented(err), "%v", err)
			}
		}
		g := graph.NewGraph(backend, "wide")
		mesh, err := distributed.NewDeviceMesh([]int{3}, []string{"replica"})
		if err != nil {
			return err
		}
		assert.ErrorContains(t, g.SetSPMD(mesh), "exceeds the number of devices")
		err = backend.Builder("partitioned").DistributedAutoSharding()
		assert.True(t, compute.IsNotImplemented(err), "%v", err)
		_, err = backend.Builder("groups").Main().AllReduce(nil, compute.ReduceOpSum, [][]int{{0, 0}})
		assert.ErrorContains(t, err, "each of 1 devices once")
		_, err = backend.BufferFromFlatData(2, []float32{1}, shapes.Make(dtypes.Float32, 1))
		assert.ErrorContains(t, err, "device 2 of 2")
		return nil
	})
	_, err := spmd.New(t.Context(), nil, nil)
	assert.ErrorIs(t, err, comm.ErrArgument)
}

// recovered returns the value that f panics with.
func recovered(f func()) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = r.(error)
		}
	}()
	f()
	return nil
}

// A graph that is not distributed runs on each rank and on any device, also with axes whose sizes are known late.
func TestAlone(t *testing.T) {
	onRanks(t, 2, func(backend compute.Backend, rank int) error {
		double := graph.MustNewExec(backend, func(x *graph.Node) *graph.Node { return graph.Add(x, x) })
		double.WithDynamicAxes([]string{"batch"})
		for size := range 4 {
			for device := range 2 {
				// CallOnDevice of v0.28.1 ignores the device.
				outputs, _, err := double.CallWithGraphOnDevice(compute.DeviceNum(device), make([]float32, size+1))
				if err != nil {
					return err
				}
				assert.Len(t, outputs[0].Value(), size+1)
				where, err := outputs[0].Device()
				assert.NoError(t, err)
				assert.EqualValues(t, device, where)
			}
		}
		return nil
	})
}

// The error of ranks that reduce with a lost rank names it.
func TestLostRank(t *testing.T) {
	err := local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		inner, err := gobackend.New("")
		if err != nil {
			return err
		}
		backend, err := spmd.New(ctx, c, inner)
		if err != nil {
			return err
		}
		defer backend.Finalize()
		g := newGraph(t, backend, []int{3}, "replica")
		x := graph.Parameter(g, "x", shapes.Make(dtypes.Float32))
		if err := g.Compile(g.Distributed().AllReduceOne(x, compute.ReduceOpSum)); err != nil {
			return err
		}
		if c.Rank() == 1 {
			return fmt.Errorf("the disk is full")
		}
		err = recovered(func() { g.Run(float32(1), float32(2), float32(3)) })
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.ErrorContains(t, err, "rank 1")
		return err
	})
	assert.ErrorContains(t, err, "the disk is full")
}

// TestOfGoMLX runs GoMLX's own tests of collectives and of graphs for any device, from its package graph, on two
// processes. They run in a separate module, whose test backend comes from testdata.
func TestOfGoMLX(t *testing.T) {
	list := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Dir}}", "github.com/gomlx/gomlx/core/graph")
	out, err := list.Output()
	require.NoError(t, err)
	tests, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "distributed_test.go"))
	require.NoError(t, err)
	const module = "example.com/graph"
	utilities := []byte(`"github.com/gomlx/gomlx/support/testutil"`)
	require.Contains(t, string(tests), string(utilities))
	folder := t.TempDir()
	require.NoError(t, os.CopyFS(folder, os.DirFS("testdata")))
	for _, name := range []string{"go.mod", "go.sum"} {
		text, err := os.ReadFile(filepath.Join("..", name))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), text, 0o600))
	}
	tests = bytes.ReplaceAll(tests, utilities, []byte(`"`+module+`/testutil"`))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "distributed_test.go"), tests, 0o600))
	adapter, err := filepath.Abs("..")
	require.NoError(t, err)
	const tutti = "github.com/tutti-go/tutti"
	for _, args := range [][]string{
		{"mod", "edit", "-module", module, "-require", tutti + "/adapters/gomlx@v0.3.0",
			"-replace", tutti + "=" + filepath.Join(adapter, "..", ".."), "-replace", tutti + "/adapters/gomlx=" + adapter},
		{"test", "-mod=mod", "-c", "-o", "graph.test", "."},
	} {
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = folder
		cmd.Env = append(os.Environ(), "GOWORK=off")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "go %v: %s", args, out)
	}
	program := filepath.Join(folder, "graph.test")
	for _, out := range onProcesses(t, 2, program, "-test.v", "-test.run", "TestCollective|TestPortable") {
		assert.Contains(t, out, "--- PASS: TestCollective/AllReduce:multiple_values,_different_dtype")
		assert.Contains(t, out, "--- PASS: TestPortable/Exec")
		assert.NotContains(t, out, "--- SKIP")
	}
}

// onProcesses runs a program with one process per rank, over TCP, and returns their outputs.
func onProcesses(t *testing.T, ranks int, program string, args ...string) []string {
	host, port, err := net.SplitHostPort(jobtest.Address(t, 1))
	require.NoError(t, err)
	printed := make([]string, ranks)
	var all sync.WaitGroup
	for rank := range printed {
		all.Go(func() {
			cmd := exec.CommandContext(t.Context(), program, args...)
			cmd.Env = append(os.Environ(), fmt.Sprint("RANK=", rank), fmt.Sprint("WORLD_SIZE=", ranks), "MASTER_ADDR="+host,
				"MASTER_PORT="+port, "TUTTI_SECRET="+strings.Repeat("51", 16))
			out, err := cmd.CombinedOutput()
			assert.NoError(t, err, "%s", out)
			printed[rank] = string(out)
		})
	}
	all.Wait()
	return printed
}

// TestProcesses trains the digits with distributed graphs on three processes over TCP, and on four under each MPI.
// The result has the bits of goroutines in one process.
func TestProcesses(t *testing.T) {
	program := jobtest.Build(t, "./digits")
	want := jobtest.Output(t, program, "-ranks", "3", "-steps", "40")
	printed := onProcesses(t, 3, program, "-steps", "40")
	assert.Equal(t, want, strings.Join(printed, ""))
	jobtest.SameEverywhere(t, program, "-steps", "40")
}

// The operations match the GoMLX version that the module requires.
func TestGenerated(t *testing.T) {
	program := jobtest.Build(t, "./generate")
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Dir = t.TempDir()
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	want, err := os.ReadFile(filepath.Join(cmd.Dir, "operations.go"))
	require.NoError(t, err)
	got, err := os.ReadFile("operations.go")
	require.NoError(t, err)
	assert.Equal(t, string(want), string(got), "go generate ./spmd")
}
