// Command bits prints hashes of results that the order contract makes the same on every machine and over every
// backend, one line for each configuration:
//
//	go run ./.ci/bits                                     # three ranks of this process
//	tutti launch -n 3 bits                                # processes over TCP
//	mpirun -n 3 bits                                      # over MPI
//	bits -reproducible                                    # sums for any number of ranks (ddp.Config.Reproducible)
//	bits -reproducible -inputs 1000                       # with as many random inputs beside big integers
//	TUTTI_BACKEND=nccl tutti launch -n 2 bits -p2p        # over the memory of the other GPUs of the machine
//	mpirun -n 4 bits -probe                               # how many results one sum has, by the length of the message
//	tutti launch -n 2 bits -costs                         # what reproducible steps take beside those without
//
// CI compares the output of builds for amd64 and arm64, and of worlds of both. -probe shows the results of libraries
// that promise no order, such as MPI with TUTTI_MPI_COLLECTIVES=native.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"os"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("bits: ")
	fixed := flag.Bool("reproducible", false, "print hashes that do not depend on the number of ranks")
	inputs := flag.Int("inputs", 5, "`number` of random inputs of a type that -reproducible compares with big integers")
	peers := flag.Bool("p2p", false, "communicate over the memory of peers, on GPUs")
	probe := flag.Bool("probe", false, "print how many results one sum has")
	costs := flag.Bool("costs", false, "print what reproducible steps take")
	var cost costing
	flag.IntVar(&cost.steps, "steps", 60, "`number` of steps of each kind that -costs times")
	flag.StringVar(&cost.kinds, "kinds", "plain,NoUndo,clip,shard,mesh", "kinds of steps that -costs times")
	flag.StringVar(&cost.bytes, "kib", "64,1024,16384", "lengths of gradients in KiB that -costs times")
	flag.Parse()
	var out bytes.Buffer
	body := func(ctx context.Context, r tutti.Rank) (err error) {
		if *peers {
			r.Comm, err = overPeers(ctx, r)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, r.Comm.Close()) }()
		}
		b := &bits{Rank: r, ctx: ctx, out: &out}
		if r.Comm.Rank() > 0 {
			b.out = new(bytes.Buffer)
		}
		switch {
		case *probe:
			return b.probe()
		case *costs:
			return b.costs(cost)
		case *fixed:
			return b.reproducible(*inputs)
		}
		return b.all()
	}
	if err := (tutti.Config{Ranks: ranks()}).Run(context.Background(), body); err != nil {
		log.Fatal(err)
	}
	os.Stdout.Write(out.Bytes())
}

// overPeers returns a communicator over peer memory. Closing it leaves the rank's own communicator open.
func overPeers(ctx context.Context, r tutti.Rank) (comm.Communicator, error) {
	rt, ok := r.Runtime.(*cuda.Runtime)
	if !ok {
		return nil, fmt.Errorf("%T is no runtime of a GPU: set TUTTI_BACKEND=nccl", r.Runtime)
	}
	return p2p.New(ctx, lent{r.Comm}, rt)
}

// lent is a communicator that its users cannot close.
type lent struct{ comm.Communicator }

func (l lent) Close() error              { return nil }
func (l lent) Unwrap() comm.Communicator { return l.Communicator }

// ranks is the default number of ranks in this process.
func ranks() int {
	for _, name := range []string{"TUTTI_RANK", "TUTTI_RANKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} {
		if os.Getenv(name) != "" {
			return 0
		}
	}
	return 3
}

// bits is a rank's part of the program.
type bits struct {
	tutti.Rank
	ctx context.Context
	out *bytes.Buffer
}

// length is the length of the vectors: no block size divides it.
const length = 20011

// print prints a line with a hash of data.
func (b *bits) print(name string, data ...[]byte) {
	fmt.Fprintf(b.out, "%-40s %s\n", name, hash(data...))
}

// hash returns the hash of data.
func hash(data ...[]byte) string {
	h := sha256.New()
	for _, d := range data {
		h.Write(d)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

// numbers returns f32 numbers of a rank with full mantissas, over 8 powers of 2.
func (b *bits) numbers(rank int, seed uint64) []byte {
	random := rand.New(rand.NewPCG(seed, uint64(rank)))
	values := make([]float64, length)
	for i := range values {
		values[i] = math.Ldexp(random.Float64()-0.5, random.IntN(8))
	}
	return reference.Encode(dtype.F32, values...)
}

// on runs f on a tensor and returns the tensor's data afterwards.
func (b *bits) on(dt dtype.DType, data []byte, f func(t *runtime.Tensor) error) ([]byte, error) {
	t, err := runtime.New(b.Runtime, dt, len(data)/dt.Size())
	if err != nil {
		return nil, err
	}
	defer t.Free() //nolint:errcheck // the program ends
	if err := b.write(t, data); err != nil {
		return nil, err
	}
	if err := f(t); err != nil {
		return nil, err
	}
	if err := b.Comm.Sync(b.ctx); err != nil {
		return nil, err
	}
	return b.read(t)
}

func (b *bits) write(t *runtime.Tensor, data []byte) error {
	p, err := t.Ptr()
	if err != nil {
		return err
	}
	if err := b.Runtime.CopyIn(p, data); err != nil {
		return err
	}
	return b.Runtime.Synchronize(b.ctx)
}

func (b *bits) read(t *runtime.Tensor) ([]byte, error) {
	data := make([]byte, t.Bytes())
	p, err := t.Ptr()
	if err != nil {
		return nil, err
	}
	return data, b.Runtime.CopyOut(data, p)
}

func (b *bits) all() error {
	for _, part := range []func() error{b.dense, b.sparse, b.outer} {
		if err := part(); err != nil {
			return err
		}
	}
	return nil
}

func (b *bits) dense() error {
	for _, dt := range dtype.All() {
		for _, op := range reductions.All() {
			if !op.Defined(dt) {
				continue
			}
			period := reference.Rough(dt, op, b.Comm.Rank(), b.Comm.WorldSize())
			after, err := b.on(dt, reference.Tile(period, 0, length*dt.Size()), func(t *runtime.Tensor) error {
				return distributed.AllReduce(b.ctx, b.Comm, t, op)
			})
			if err != nil {
				return err
			}
			after, err = oneNaN(dt, after)
			if err != nil {
				return err
			}
			b.print(fmt.Sprintf("dense %v %v", dt, op), after)
		}
	}
	return nil
}

// oneNaN makes all NaNs the same: their bits are not in the contract.
func oneNaN(dt dtype.DType, data []byte) ([]byte, error) {
	if !dt.IsFloat() {
		return data, nil
	}
	size := dt.Size()
	for i := 0; i < len(data); i += size {
		var element uint64
		for j := range size {
			element |= uint64(data[i+j]) << (8 * j)
		}
		v, err := dtype.ToFloat64(dt, element)
		if err != nil {
			return nil, err
		}
		if math.IsNaN(v) {
			copy(data[i:], reference.Encode(dt, math.NaN()))
		}
	}
	return data, nil
}

func (b *bits) sparse() error {
	const steps = 3
	for _, pattern := range sparsity.Patterns() {
		for _, values := range sparsity.Values() {
			for _, momentum := range []float64{0, 0.9} {
				cfg := sparse.Config{Pattern: pattern, Values: values, Density: 0.02, Momentum: momentum}
				cfg.ClipNorm = 2 * momentum
				s, err := sparse.New(b.Runtime, b.Comm, length, cfg)
				if err != nil {
					return err
				}
				var results [][]byte
				for step := range uint64(steps) {
					gradient := b.numbers(b.Comm.Rank(), step)
					after, err := b.on(dtype.F32, gradient, func(t *runtime.Tensor) error { return s.AllReduce(b.ctx, t) })
					if err != nil {
						return err
					}
					results = append(results, after)
				}
				b.print(fmt.Sprintf("%s %s momentum %v", pattern, values, momentum), results...)
				if err := s.Close(); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (b *bits) outer() error {
	for _, cfg := range []outer.Config{
		{Every: 2},
		{Every: 2, LearningRate: 0.7, Momentum: 0.9, Nesterov: true},
		{Every: 4, Fragments: 2, Delay: 1, Mix: 0.5, LearningRate: 0.8, Momentum: 0.9},
	} {
		after, err := b.on(dtype.F32, b.numbers(0, 9), func(t *runtime.Tensor) error {
			loop, err := outer.New(b.ctx, b.Runtime, b.Comm, []*runtime.Tensor{t}, cfg)
			if err != nil {
				return err
			}
			for step := range uint64(8) {
				if err := b.train(t, step); err != nil {
					return err
				}
				if err := loop.Step(b.ctx); err != nil {
					return err
				}
			}
			return loop.Close()
		})
		if err != nil {
			return err
		}
		b.print(fmt.Sprintf("outer every %d momentum %v mix %v", cfg.Every, cfg.Momentum, cfg.Mix), after)
	}
	return nil
}

// train subtracts a step of this rank: an eighth of random numbers.
func (b *bits) train(t *runtime.Tensor, step uint64) error {
	weights, err := b.read(t)
	if err != nil {
		return err
	}
	change := b.numbers(b.Comm.Rank(), 100+step)
	values := make([]float32, 2*length)
	w := values[:length]
	d := values[length:]
	if err := dtype.ToFloat32(w, weights, dtype.F32); err != nil {
		return err
	}
	if err := dtype.ToFloat32(d, change, dtype.F32); err != nil {
		return err
	}
	for i := range w {
		w[i] -= float32(d[i] / 8) // exact, so fusing changes nothing
	}
	if err := dtype.FromFloat32(weights, dtype.F32, w); err != nil {
		return err
	}
	return b.write(t, weights)
}

// probe sums the same 64 numbers of each rank in messages of many lengths, at several places, and prints the number
// of different results.
func (b *bits) probe() error {
	const width = 64
	random := rand.New(rand.NewPCG(7, uint64(b.Comm.Rank())))
	values := make([]float64, width)
	for i := range values {
		values[i] = math.Ldexp(random.NormFloat64(), random.IntN(12))
	}
	numbers := reference.Encode(dtype.F32, values...)
	results := map[[sha256.Size]byte]string{} // the first message with each result
	calls := 0
	for _, n := range []int{64, 65, 1000, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20} {
		for _, place := range []int{0, n/3 - 20, n / 2, n - width} {
			if place < 0 || place+width > n {
				continue
			}
			message := make([]byte, 4*n)
			copy(message[4*place:], numbers)
			after, err := b.on(dtype.F32, message, func(t *runtime.Tensor) error {
				return distributed.AllReduce(b.ctx, b.Comm, t, comm.Sum)
			})
			if err != nil {
				return err
			}
			calls++
			sum := sha256.Sum256(after[4*place : 4*(place+width)])
			if results[sum] == "" {
				results[sum] = fmt.Sprintf("%d elements, at %d", n, place)
			}
		}
	}
	fmt.Fprintf(b.out, "%d ranks, %d messages: %d different results; fixed order: %v\n",
		b.Comm.WorldSize(), calls, len(results), comm.FixedOrder(b.Comm))
	for sum, where := range results {
		fmt.Fprintf(b.out, "  %x  first with %s\n", sum[:4], where)
	}
	return nil
}
