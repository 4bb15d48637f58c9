// Command characters trains a small transformer of GoMLX to predict each character of a text, its
// own source, from those before it, on several ranks.
//
//	go run ./characters -ranks 2                         # goroutines of one process
//	tutti launch -n 2 ./characters                       # a process per rank, the same bits
//	mpirun --bind-to none -n 2 ./characters              # the same over MPI
//	torchrun --nproc-per-node 2 --no-python ./characters -backend nccl # the same over NCCL, a GPU per process
//	tutti launch -n 3 --min 1 --restarts 9 ./characters -backend elastic # kill any of them: it joins again
//	go run ./characters -checkpoint DIR -steps 60        # goes on from there, if it exists
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	_ "github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/attention"
	"github.com/gomlx/gomlx/ml/layers/attention/pos"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/checkpoint"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/adapters/gomlx"
	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// The windows of a step, over all ranks, and the model: characters, and those of a window, entries of
// a vector, heads, and blocks.
const batch, characters, window, width, heads, blocks = 16, 128, 32, 32, 2, 2

//go:embed main.go
var source string

// settings are the same on all ranks.
type settings struct {
	steps      int             // with which to end
	pattern    string          // what is sent
	checkpoint string          // directory, none if empty
	elastic    *elastic.Config // nil: the world is fixed
}

func main() {
	var s settings
	var world tutti.Config
	flag.StringVar(&world.Backend, "backend", "", "local, tcp, mpi, nccl or elastic; unset: as the launcher says")
	flag.IntVar(&world.Ranks, "ranks", 0, "ranks of the local backend; 0 is 4")
	flag.IntVar(&s.steps, "steps", 40, "the step with which to end")
	flag.StringVar(&s.pattern, "pattern", sparse.Dense, "what is sent: dense, or a tenth by topkA and others")
	flag.StringVar(&s.checkpoint, "checkpoint", "", "`directory` to go on from, and to write at the end")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if s.steps < 1 {
		log.Fatalf("-steps is %d, want 1 or more", s.steps)
	}
	err := start(context.Background(), world, s)
	if err != nil {
		log.Fatal(err)
	}
}

// start runs the ranks of this process, or the member of an elastic job that it is.
func start(ctx context.Context, world tutti.Config, s settings) error {
	if world.Backend == "elastic" {
		return join(ctx, s)
	}
	return world.Run(ctx, func(ctx context.Context, r tutti.Rank) error {
		name := fmt.Sprint("world size ", r.Comm.WorldSize())
		if _, host := r.Runtime.(*cpu.Runtime); host {
			return report(ctx, r.Comm, name, s)
		}
		// GoMLX computes on the host here, so gradients pass through a GPU's memory.
		c, err := staged.New(r.Comm, cpu.New(), r.Runtime)
		if err != nil {
			return err
		}
		return errors.Join(report(ctx, c, name, s), c.Close())
	})
}

// join takes part in an elastic job, whose members form communicators of their own.
func join(ctx context.Context, s settings) error {
	cfg, err := elastic.FromEnv(elastic.Config{Terms: fmt.Sprintf("characters %+v", s)})
	if err != nil {
		return err
	}
	cfg.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		return tcp.New(ctx, kv, tcp.Config{
			Rank:      p.Rank,
			WorldSize: p.Size,
			World:     p.World,
			TLS:       cfg.TLS,
			Silence:   elastic.DefaultSilence,
		})
	}
	s.elastic = &cfg
	err = report(ctx, noop.New(cpu.New()), cfg.Name, s)
	if errors.Is(err, elastic.ErrEnded) {
		log.Print(err) // the others have the parameters
		return nil
	}
	return err
}

// report runs a rank, and has the first one print what it came to.
func report(ctx context.Context, c comm.Communicator, name string, s settings) error {
	sum, last, err := run(ctx, c, s)
	if err == nil && c.Rank() == 0 {
		fmt.Printf("%s, step %d: loss %.4f; checksum of the parameters %08x\n", name, s.steps, last, sum)
	}
	return err
}

// run is one rank. It returns a checksum of the parameters, and the rank's last loss.
func run(ctx context.Context, c comm.Communicator, s settings) (sum uint32, last float32, err error) {
	backend, err := compute.NewWithConfig("go")
	if err != nil {
		return 0, 0, err
	}
	variables := model.NewStore()
	variables.SetParam(optimizer.ParamLearningRate, 0.01)
	if err := variables.SetRNGStateFromSeed(1); err != nil {
		return 0, 0, err
	}
	var saved *checkpoint.Handler
	if s.checkpoint != "" {
		if saved, err = checkpoint.Build(variables).Dir(s.checkpoint).Immediate().Done(); err != nil {
			return 0, 0, err
		}
	}
	inputs, labels := windows(source)
	sampling := distributed.SamplerConfig{Seed: 1}
	data, err := gomlx.NewDataset(c, "text", inputs, labels, batch/c.WorldSize(), sampling)
	if err != nil {
		return 0, 0, err
	}
	reduction := ddp.Config{Config: sparse.Config{Pattern: s.pattern, Density: 0.1}}
	averaging, err := gomlx.New(ctx, c, optimizer.Adam().Done(), reduction)
	if err != nil {
		return 0, 0, err
	}
	defer averaging.Close()
	loop := train.NewLoop(train.NewTrainer(
		backend,
		variables,
		transformer,
		loss.SparseCategoricalCrossEntropyLogits,
		averaging,
		nil,
		nil,
	))
	averaging.Attach(loop)
	if err := resume(s.checkpoint, c, averaging, data, loop.LoopStep); err != nil {
		return 0, 0, err
	}
	var metrics []*tensors.Tensor
	if s.elastic == nil {
		metrics, err = loop.RunToGlobalStep(data.Infinite(true), s.steps)
	} else {
		metrics, err = averaging.RunElastic(ctx, *s.elastic, loop, data, s.steps)
	}
	if err != nil {
		return 0, 0, err
	}
	if err := save(ctx, saved, c, averaging); err != nil {
		return 0, 0, err
	}
	sum, err = checksum(variables)
	return sum, tensors.ToScalar[float32](metrics[0]), err
}

// checksum is that of the parameters, in the order of their paths: a loaded variable has another place in the store.
func checksum(variables *model.Store) (uint32, error) {
	byPath := func(v, w *model.Variable) int {
		return strings.Compare(v.Path(), w.Path())
	}
	h := crc32.NewIEEE()
	for _, v := range slices.SortedFunc(variables.IterVariables(), byPath) {
		if !isParameter(v.Path()) {
			continue
		}
		err := v.MustValue().ConstBytes(func(data []byte) { h.Write(data) })
		if err != nil {
			return 0, err
		}
	}
	return h.Sum32(), nil
}

// isParameter reports whether a variable is one of the transformer's. Whether it is trainable does not tell, as any
// loaded variable is.
func isParameter(path string) bool {
	for _, prefix := range []string{"/embedding", "/block", "/logits"} {
		if strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}

// save writes the variables, and beside them what the ranks' reductions keep.
func save(ctx context.Context, saved *checkpoint.Handler, c comm.Communicator, averaging *gomlx.Optimizer) error {
	if saved == nil {
		return nil
	}
	rt := cpu.New()
	defer rt.Close()
	state, err := averaging.State()
	if err != nil {
		return err
	}
	states, err := distributed.GatherBytes(ctx, rt, c, state, 0)
	if err != nil || c.Rank() != 0 {
		return err
	}
	if err := saved.Save(); err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(saved.Dir(), "ranks"), func(w io.Writer) error {
		return json.NewEncoder(w).Encode(states)
	})
}

// resume goes on at a step with what [save] wrote, on any number of ranks.
func resume(dir string, c comm.Communicator, averaging *gomlx.Optimizer, data *gomlx.Dataset, step int) error {
	if step == 0 {
		return nil
	}
	file, err := os.ReadFile(filepath.Join(dir, "ranks"))
	if err != nil {
		return err
	}
	var states, entries [][]byte
	if err := json.Unmarshal(file, &states); err != nil {
		return err
	}
	if len(states) == 0 {
		return fmt.Errorf("%s has the state of no rank", filepath.Join(dir, "ranks"))
	}
	for _, rank := range sparse.RestoreRanks(len(states), c.WorldSize(), c.Rank()) {
		entries = append(entries, states[rank])
	}
	return errors.Join(
		averaging.Restore(entries...),
		data.Seek(step/data.Batches(), step%data.Batches()),
	)
}

// windows cuts a text: the labels are the inputs, one character later.
func windows(text string) (inputs, labels []*tensors.Tensor) {
	n := (len(text) - 1) / window
	in := make([]int32, n*window)
	out := make([]int32, n*window)
	for i := range in {
		in[i] = int32(text[i] & 127)
		out[i] = int32(text[i+1] & 127)
	}
	return []*tensors.Tensor{tensors.FromFlatDataAndDimensions(in, n, window)},
		[]*tensors.Tensor{tensors.FromFlatDataAndDimensions(out, n, window, 1)}
}

// transformer returns the logits of the character that follows each one.
func transformer(scope *model.Scope, tokens *graph.Node) *graph.Node {
	x := layers.Embedding(scope.In("embedding"), tokens, dtypes.Float32, characters, width)
	for i := range blocks {
		s := scope.In("block-%d", i)
		a := norm.LayerNorm(s.In("norm-1"), x, -1).Done()
		attend := attention.SelfAttention(s.In("attention"), a, heads, width/heads)
		attend = attend.WithCausalMask(true).WithPositionalEncoder(pos.NewRoPE(10000))
		x = graph.Add(x, attend.Done())
		h := norm.LayerNorm(s.In("norm-2"), x, -1).Done()
		h = activation.Relu(layers.Dense(s.In("wide"), h, true, 4*width))
		x = graph.Add(x, layers.Dense(s.In("narrow"), h, true, width))
	}
	return layers.Dense(scope.In("logits"), x, true, characters)
}
