package p2p

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// roundedStep is an allreduce of rounded values, what each rank has before it, and what it has to have
// afterwards.
type roundedStep struct {
	n                 int
	codec             runtime.Codec
	op                comm.ReduceOp
	lost              bool
	values, residuals [][]float32
	sums              []float32
}

func (s *roundedStep) String() string {
	return fmt.Sprintf("%d values, %v, %v, lost %t", s.n, s.codec, s.op, s.lost)
}

// randomRounded makes a step by the kernels of the host: see comm.Rounder.
func randomRounded(t *testing.T, rng *rand.Rand, k runtime.Kernels, ranks, most int) *roundedStep {
	s := &roundedStep{n: 1 + rng.IntN(most), codec: []runtime.Codec{runtime.CodecI8, runtime.CodecFP8}[rng.IntN(2)], lost: rng.IntN(4) > 0, op: []comm.ReduceOp{comm.Sum, comm.Avg}[rng.IntN(2)]}
	special := []float32{0, float32(math.Copysign(0, -1)), 1e-42, 3e38, -3e38, float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())}
	for range ranks {
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
		s.values = append(s.values, v)
		s.residuals = append(s.residuals, append([]float32(nil), v...))
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

// checkRounded compares what a rank has with what it should have.
func (s *roundedStep) check(rank int, values, sums []float32) error {
	want := s.values[rank]
	if s.lost {
		want = s.residuals[rank]
	}
	if err := same(sums, s.sums); err != nil {
		return fmt.Errorf("%v, rank %d: sums: %w", s, rank, err)
	}
	if err := same(values, want); err != nil {
		return fmt.Errorf("%v, rank %d: values: %w", s, rank, err)
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
				w := &emulated{planner: planner{sizes: roundedSizes(ranks), ranks: ranks}, seed: seed, first: 1 + rng.Uint64N(1<<40)}
				launch := w.begin(steps, time.Minute)
				var all []*roundedStep
				var values, sums [][]uintptr
				for i := range steps {
					s := randomRounded(t, rng, rt.Kernels(), ranks, size)
					all = append(all, s)
					values, sums = append(values, make([]uintptr, ranks)), append(sums, make([]uintptr, ranks))
					skew, planned := uintptr(rng.IntN(2)*4), rng.IntN(2) == 0
					blocks, width, tiles := 1+rng.IntN(2), lineWidth*(1+rng.IntN(3)), 1+rng.IntN(4)
					for r := range ranks {
						values[i][r], sums[i][r] = w.allocate(4*s.n+8)+skew, w.allocate(4*s.n+8)+skew
						copy(w.at(values[i][r], 4*s.n), hostmem.Bytes(s.values[r]))
						p, ok := w.rounded(values[i][r], sums[i][r], s.n, s.codec, s.op, s.lost)
						require.True(t, ok)
						if !planned {
							p.blocks, p.width, p.call.tiles = blocks, width, uint32(tiles)
						}
						require.LessOrEqual(t, int(p.call.tiles), w.roundedRoom(p.blocks))
						launch(r, i, p)
					}
				}
				require.NoError(t, w.run(t, emulator))
				floats := func(p uintptr, n int) []float32 { return hostmem.Slice[float32](hostmem.Addr(w.at(p, 4*n)), n) }
				for i, s := range all {
					for r := range ranks {
						require.NoError(t, s.check(r, floats(values[i][r], s.n), floats(sums[i][r], s.n)), "seed %d, step %d", seed, i)
						require.Equal(t, make([]byte, 4), w.at(sums[i][r]+uintptr(4*s.n), 4), "seed %d, step %d: written beside the sums", seed, i)
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
		for name, s := range map[string]sizes{"small": roundedSizes(ranks), "default": defaults(ranks, tested())} {
			t.Run(fmt.Sprint(ranks, " ranks, ", name), func(t *testing.T) {
				const seed, most = 5, 3 << 20
				rng := rand.New(rand.NewPCG(seed, uint64(ranks)))
				ends := world(t, openGPUs(t, ranks), ranks, s, 20*time.Second)
				for range 12 {
					step, skew := randomRounded(t, rng, host.Kernels(), ranks, 1+rng.IntN(most)), uintptr(rng.IntN(2)*4)
					require.NoError(t, each(ends, func(e *endpoint) error {
						buf, err := e.rt.Allocate(8*step.n + 64)
						if err != nil {
							return err
						}
						values, sums, stream := buf+skew, buf+uintptr(4*step.n+31)/16*16+skew, e.rt.Stream()
						p, ok := e.rounded(values, sums, step.n, step.codec, step.op, step.lost)
						if !ok {
							return fmt.Errorf("no kernel for %v", step)
						}
						got, total := make([]float32, step.n), make([]float32, step.n)
						return errors.Join(e.rt.CopyIn(values, hostmem.Bytes(step.values[e.rank])), e.submit(stream, p), e.wait(t.Context(), stream),
							e.rt.CopyOut(hostmem.Bytes(got), values), e.rt.CopyOut(hostmem.Bytes(total), sums), e.rt.Deallocate(buf), step.check(e.rank, got, total))
					}), "seed %d, %v", seed, step)
				}
			})
		}
	}
}
