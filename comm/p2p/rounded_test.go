package p2p

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// roundedStep is an allreduce of rounded values, what each rank has before it, and what it has to have
// afterwards.
type roundedStep struct {
	n           int
	codec       kernel.Codec
	op          comm.ReduceOp
	lost        bool
	grad        dtype.DType // Invalid: none is added
	factor      []float32   // nil: 1
	apart, over bool        // the gradient is added to values beside X; the sums are written over it
	skew        [5]int      // elements by which buffers are not aligned

	before, values, residuals [][]float32 // values: with the gradient
	grads                     [][]byte
	sums                      []float32
}

func (s *roundedStep) String() string {
	return fmt.Sprintf("%d values, %v, %v, lost %t, gradient %v, factor %v, apart %t, over %t, skew %v",
		s.n, s.codec, s.op, s.lost, s.grad, s.factor, s.apart, s.over, s.skew)
}

// randomRounded makes a step by the kernels of the host: see backend.Rounder.
func randomRounded(t *testing.T, rng *rand.Rand, k kernel.Kernels, ranks, most int) *roundedStep {
	s := &roundedStep{
		n:     1 + rng.IntN(most),
		codec: []kernel.Codec{kernel.CodecI8, kernel.CodecFP8}[rng.IntN(2)],
		lost:  rng.IntN(4) > 0,
		op:    []comm.ReduceOp{comm.Sum, comm.Avg}[rng.IntN(2)],
	}
	if rng.IntN(4) > 0 {
		s.grad, s.apart = []dtype.DType{dtype.F32, dtype.F16, dtype.BF16}[rng.IntN(3)], rng.IntN(2) == 0
		s.over = s.grad == dtype.F32 && rng.IntN(2) == 0
		if rng.IntN(2) == 0 {
			s.factor = []float32{float32(rng.NormFloat64())}
		}
	}
	for i, most := 0, 1+rng.IntN(2); i < len(s.skew); i++ { // half of the steps have aligned buffers
		s.skew[i] = rng.IntN(most)
	}
	infinity := float32(math.Inf(1))
	special := []float32{
		0, float32(math.Copysign(0, -1)), 1e-42, 3e38, -3e38, infinity, -infinity, float32(math.NaN()),
	}
	random := func() []float32 {
		v := make([]float32, s.n)
		scale := float32(0)
		for i := range v {
			if i%50 == 0 {
				scale = float32(math.Exp2(float64(rng.IntN(60) - 40)))
			}
			v[i] = float32(rng.NormFloat64()) * scale
			if rng.IntN(200) == 0 {
				v[i] = special[rng.IntN(len(special))]
			}
		}
		return v
	}
	for range ranks {
		v := random()
		s.before = append(s.before, slices.Clone(v))
		if s.grad != dtype.Invalid {
			g := make([]byte, s.n*s.grad.Size())
			src := kernel.Source{X: hostmem.Addr(v), N: s.n, Grad: hostmem.Addr(g), DType: s.grad}
			if s.factor != nil {
				src.Factor = hostmem.Addr(s.factor)
			}
			terms := random()
			require.NoError(t, errors.Join(k.Store(src.Grad, s.grad, hostmem.Addr(terms), s.n, 1, 0), k.Accumulate(src)))
			runtime.KeepAlive(terms)
			s.grads = append(s.grads, g)
		}
		s.values = append(s.values, v)
		s.residuals = append(s.residuals, slices.Clone(v))
	}
	share := (s.n + ranks - 1) / ranks
	s.sums = make([]float32, s.n)
	codes := make([]uint32, s.codec.Size(share)/4)
	round := func(from []float32, lost []float32, to []float32, add bool) {
		p := uintptr(0)
		if s.lost {
			p = hostmem.Addr(lost)
		}
		require.NoError(t, k.Quantize(hostmem.Addr(codes), s.codec, hostmem.Addr(from), len(from), p))
		require.NoError(t, k.Dequantize(hostmem.Addr(to), s.codec, hostmem.Addr(codes), len(from), add))
		runtime.KeepAlive(from)
		runtime.KeepAlive(lost)
		runtime.KeepAlive(to)
		runtime.KeepAlive(codes)
	}
	for owner := range ranks {
		first := min(owner*share, s.n)
		last := min(first+share, s.n)
		sum := make([]float32, last-first)
		for r := range ranks {
			if r != owner {
				round(s.values[r][first:last], s.residuals[r][first:last], sum, true)
				continue
			}
			for i := range sum {
				sum[i] += s.values[r][first+i]
			}
		}
		round(sum, s.residuals[owner][first:last], s.sums[first:last], false)
		for i := first; s.op == comm.Avg && i < last; i++ {
			s.sums[i] *= 1 / float32(ranks)
		}
	}
	return s
}

func same(got, want []float32) error {
	for i, w := range want {
		if g := got[i]; math.Float32bits(g) != math.Float32bits(w) && (g == g || w == w) {
			return fmt.Errorf("element %d of %d is %v, not %v", i, len(want), g, w)
		}
	}
	return nil
}

// roundedRank is where a rank has its buffers of a step.
type roundedRank struct {
	src  kernel.Source
	sums uintptr
}

// place puts what a rank has before a step into memory.
func (s *roundedStep) place(rank int, allocate func(bytes int) uintptr, put func(to uintptr, data []byte)) (at roundedRank) {
	skews := s.skew[:]
	place := func(data []byte, size int) uintptr {
		p := allocate(len(data)+2*size) + uintptr(size*skews[0])
		put(p, data)
		skews = skews[1:]
		return p
	}
	before := hostmem.Bytes(s.before[rank])
	at.src = kernel.Source{X: place(before, 4), N: s.n, Take: s.lost}
	at.sums = place(make([]byte, 4*s.n), 4)
	if s.grad == dtype.Invalid {
		return at
	}
	at.src.DType = s.grad
	if at.src.Grad = place(s.grads[rank], s.grad.Size()); s.over {
		at.sums = at.src.Grad
	}
	if s.apart {
		at.src.From = place(before, 4)
		put(at.src.X, make([]byte, 4*s.n))
	}
	if s.factor != nil {
		at.src.Factor = place(hostmem.Bytes(s.factor), 4)
	}
	return at
}

// check compares what a rank has with what it should have.
func (s *roundedStep) check(rank int, at roundedRank, get func(from uintptr, n int) []byte) error {
	floats := func(p uintptr) []float32 { return hostmem.Slice[float32](hostmem.Addr(get(p, 4*s.n)), s.n) }
	x := s.before[rank]
	switch {
	case s.lost:
		x = s.residuals[rank]
	case s.apart:
		x = make([]float32, s.n)
	}
	if err := same(floats(at.sums), s.sums); err != nil {
		return fmt.Errorf("%v, rank %d: sums: %w", s, rank, err)
	}
	if err := same(floats(at.src.X), x); err != nil {
		return fmt.Errorf("%v, rank %d: values: %w", s, rank, err)
	}
	if s.apart {
		if err := same(floats(at.src.From), s.before[rank]); err != nil {
			return fmt.Errorf("%v, rank %d: what the gradient is added to: %w", s, rank, err)
		}
	}
	if s.grads != nil && !s.over && !bytes.Equal(get(at.src.Grad, len(s.grads[rank])), s.grads[rank]) {
		return fmt.Errorf("%v, rank %d: another gradient", s, rank)
	}
	return nil
}

func roundedSizes(ranks int) sizes {
	s := small(ranks)
	s.chunk = 80 // two tiles, one of two ranks
	return s
}

// Rounded allreduces give the bits that the host's kernels do, on the host.
func TestEmulatedRounded(t *testing.T) {
	seed := emulatorSeed(t)
	rt := cpu.New()
	defer rt.Close() //nolint:errcheck
	for name, flags := range map[string][]string{"fast": nil, "race detector": {"-fsanitize=thread", "-g"}} {
		t.Run(name, func(t *testing.T) {
			emulator, err := buildEmulator(t, ".", flags...)
			require.NoError(t, err)
			worlds, steps, size := []int{2, 3, maxRanks, 4, 5, 6, 7}, 12, 20000
			switch {
			case flags != nil || testing.Short():
				worlds, steps, size = worlds[:2], 4, 6000
			case os.Getenv("TUTTI_EXTENDED") == "":
				worlds = worlds[:3]
			}
			for _, ranks := range worlds {
				rng := rand.New(rand.NewPCG(seed, uint64(ranks)))
				p := planner{sizes: roundedSizes(ranks), ranks: ranks}
				w := &emulated{planner: p, seed: seed, first: 1 + rng.Uint64N(1<<40)}
				launch := w.begin(steps, time.Minute)
				var all []*roundedStep
				var places [][]roundedRank
				for i := range steps {
					s := randomRounded(t, rng, rt.Kernels(), ranks, size)
					all = append(all, s)
					places = append(places, make([]roundedRank, ranks))
					planned := rng.IntN(2) == 0
					blocks, width, tiles := 1+rng.IntN(2), lineWidth*(1+rng.IntN(3)), 1+rng.IntN(4)
					for r := range ranks {
						at := s.place(r, w.allocate, func(to uintptr, data []byte) { copy(w.at(to, len(data)), data) })
						places[i][r] = at
						p, ok := w.rounded(at.src, at.sums, s.codec, s.op)
						require.True(t, ok)
						if !planned {
							p.blocks, p.width, p.call.tiles = blocks, width, uint32(tiles)
						}
						require.LessOrEqual(t, int(p.call.tiles), w.roundedRoom(p.blocks))
						launch(r, i, p)
					}
				}
				require.NoError(t, w.run(t, emulator))
				for i, s := range all {
					for r, at := range places[i] {
						require.NoError(t, s.check(r, at, w.at), "seed %d, step %d", seed, i)
						require.Equal(t, make([]byte, 4), w.at(at.sums+uintptr(4*s.n), 4),
							"seed %d, step %d: written beside the sums", seed, i)
					}
				}
			}
		})
	}
}

// The same between ranks on GPUs.
func TestRounded(t *testing.T) {
	host := cpu.New()
	defer host.Close() //nolint:errcheck
	for _, ranks := range []int{2, 3, 4} {
		for name, s := range map[string]sizes{"small": roundedSizes(ranks), "default": defaults(ranks)} {
			t.Run(fmt.Sprint(ranks, " ranks, ", name), func(t *testing.T) {
				const seed, most = 5, 3 << 20
				rng := rand.New(rand.NewPCG(seed, uint64(ranks)))
				ends := world(t, openGPUs(t, ranks), ranks, s, 20*time.Second)
				for range 12 {
					step := randomRounded(t, rng, host.Kernels(), ranks, 1+rng.IntN(most))
					require.NoError(t, each(ends, func(e *endpoint) error {
						stream := e.rt.Stream()
						buf, err := e.rt.Allocate(20*step.n + 1024)
						if err != nil {
							return err
						}
						next := buf
						at := step.place(e.rank, func(bytes int) uintptr {
							p := next
							next += uintptr(bytes+31) / 16 * 16
							return p
						}, func(to uintptr, data []byte) { err = errors.Join(err, e.rt.CopyIn(to, data)) })
						p, ok := e.rounded(at.src, at.sums, step.codec, step.op)
						if !ok {
							return fmt.Errorf("no kernel for %v", step)
						}
						err = errors.Join(err, e.submit(stream, p), e.wait(t.Context(), stream))
						wrong := step.check(e.rank, at, func(from uintptr, n int) []byte {
							got := make([]byte, n)
							err = errors.Join(err, e.rt.CopyOut(got, from))
							return got
						})
						return errors.Join(err, wrong, e.rt.Deallocate(buf))
					}), "seed %d, %v", seed, step)
				}
			})
		}
	}
}
