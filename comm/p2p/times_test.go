package p2p

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/link"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// timesVariable asks for the measurements, which are not tests.
const timesVariable = "TUTTI_TEST_TIMES"

// perGraph is how many operations one captured graph holds.
const perGraph = 20

// timing is one rank's part of a measurement.
type timing struct {
	rt         *cuda.Runtime
	stream     *cuda.Stream
	start, end *cuda.Event
}

func newTiming(rt *cuda.Runtime, s *cuda.Stream) (m timing, err error) {
	start, err1 := rt.NewTimingEvent()
	end, err2 := rt.NewTimingEvent()
	return timing{rt, s, start, end}, errors.Join(err1, err2)
}

// microseconds returns the median time of one call of f, of some rounds of n
// calls, of which a graph holds perGraph if asked for.
func (m timing) microseconds(ctx context.Context, n int, graph bool, f func() error) (float64, error) {
	per := 1
	if graph {
		g, err := m.stream.Capture(func() error {
			for range perGraph {
				if err := f(); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
		defer g.Close() //nolint:errcheck
		f = func() error { return g.Launch(m.stream) }
		per, n = perGraph, max(n/perGraph, 1)
	}
	var all, host []float64
	for range 7 {
		began := time.Now()
		for i := range n + 2 {
			if i == 2 {
				if err := m.stream.Record(m.start); err != nil {
					return 0, err
				}
			}
			if err := f(); err != nil {
				return 0, err
			}
		}
		host = append(host, float64(time.Since(began).Nanoseconds())/1e3/float64(n*per))
		if err := errors.Join(m.stream.Record(m.end), m.stream.Synchronize(ctx)); err != nil {
			return 0, err
		}
		d, err := m.end.Since(m.start)
		if err != nil {
			return 0, err
		}
		all = append(all, float64(d.Nanoseconds())/1e3/float64(n*per))
	}
	if slices.Max(all) > 5*slices.Min(all) {
		fmt.Printf("[graph %t, rounds %.1f, host %.1f]\n", graph, all, host)
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

// calls is how often an operation of that size is timed in a round.
func calls(bytes int) int {
	switch {
	case bytes <= 1<<20:
		return 400
	case bytes <= 16<<20:
		return 100
	}
	return 20
}

// timeWorld times allreduces of float32 in place, the slowest rank.
func timeWorld(ctx context.Context, ends []*endpoint, bytes int, graph bool, reshape func(*plan)) (float64, error) {
	times := make([]float64, len(ends))
	err := each(ends, func(e *endpoint) error {
		m, err := newTiming(e.rt, e.rt.Stream())
		if err != nil {
			return err
		}
		buf, err := e.rt.Allocate(bytes)
		if err != nil {
			return err
		}
		defer e.rt.Deallocate(buf) //nolint:errcheck
		if err := e.rt.Fill(buf, bytes/4, dtype.F32, 0.5); err != nil {
			return err
		}
		p := e.planned(comm.AllReduceCall(buf, buf, bytes/4, dtype.F32, comm.Sum))
		if reshape != nil {
			reshape(&p)
		}
		times[e.rank], err = m.microseconds(ctx, calls(bytes), graph, func() error { return e.submit(m.stream, p) })
		return errors.Join(err, e.fault(ctx), m.start.Close(), m.end.Close())
	})
	return slices.Max(times), err
}

// timeNCCL does the same over package nccl.
func timeNCCL(ctx context.Context, world []*nccl.Comm, bytes int, graph, symmetric bool) (float64, error) {
	times := make([]float64, len(world))
	errs := make(chan error, len(world))
	for _, c := range world {
		go func() {
			errs <- func() error {
				rt := c.Runtime()
				m, err := newTiming(rt, c.Stream())
				if err != nil {
					return err
				}
				var buf uintptr
				if symmetric {
					buf, err = c.AllocateSymmetric(ctx, bytes)
				} else {
					buf, err = rt.Allocate(bytes)
				}
				if err != nil {
					return err
				}
				if err := errors.Join(rt.Fill(buf, bytes/4, dtype.F32, 0.5), rt.Synchronize(ctx)); err != nil {
					return err
				}
				times[c.Rank()], err = m.microseconds(ctx, calls(bytes), graph, func() error {
					return c.AllReduce(buf, buf, bytes/4, dtype.F32, comm.Sum)
				})
				if symmetric {
					err = errors.Join(err, c.FreeSymmetric(ctx, buf))
				} else {
					err = errors.Join(err, rt.Deallocate(buf))
				}
				return errors.Join(err, m.start.Close(), m.end.Close())
			}()
		}()
	}
	var err error
	for range world {
		err = errors.Join(err, <-errs)
	}
	return slices.Max(times), err
}

func sizeText(bytes int) string {
	switch {
	case bytes >= 1<<30:
		return fmt.Sprintf("%d GiB", bytes>>30)
	case bytes >= 1<<20:
		return fmt.Sprintf("%d MiB", bytes>>20)
	case bytes >= 1<<10:
		return fmt.Sprintf("%d KiB", bytes>>10)
	}
	return fmt.Sprintf("%d B", bytes)
}

// measuredGPUs opens all for a measurement, or one twice: then the ranks have few
// blocks, so that all find a place.
func measuredGPUs(t *testing.T, what string) (gpus []*cuda.Runtime, s sizes) {
	if !strings.Contains(os.Getenv(timesVariable), what) {
		t.Skipf("a measurement, made if %s has %q in it", timesVariable, what)
	}
	n, _ := cuda.Count()
	gpus = openGPUs(t, max(n, 2))
	s = defaults(len(gpus))
	if gpus[0].Device() == gpus[1].Device() {
		fmt.Println("both ranks on one GPU")
		s.blocks, s.ringBlocks = 32, 32
	}
	return gpus, s
}

// TestTimes prints the times of allreduces on all GPUs, beside NCCL's.
func TestTimes(t *testing.T) {
	gpus, s := measuredGPUs(t, "table")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	ends := world(t, gpus, len(gpus), s, 20*time.Second)
	var others []*nccl.Comm // which wants a GPU for each rank
	if gpus[0].Device() != gpus[1].Device() {
		var err error
		others, err = nccl.InProcess(ctx, gpus)
		require.NoError(t, err)
	}
	columns := []string{"p2p graph", "p2p eager", "nccl graph", "nccl eager", "window graph", "window eager"}
	fmt.Printf("%10s %13s\n", "float32", columns)
	for _, bytes := range []int{
		8, 256, 1 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10,
		1 << 20, 2 << 20, 8 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30,
	} {
		var row []float64
		for _, graph := range []bool{true, false} {
			us, err := timeWorld(ctx, ends, bytes, graph, nil)
			require.NoError(t, err)
			row = append(row, us)
		}
		for _, symmetric := range []bool{false, true} {
			for _, graph := range []bool{true, false} {
				if others == nil {
					continue
				}
				us, err := timeNCCL(ctx, others, bytes, graph, symmetric)
				require.NoError(t, err)
				row = append(row, us)
			}
		}
		fmt.Printf("%10s %13.2f\n", sizeText(bytes), row)
	}
	for _, c := range others {
		defer c.Close() //nolint:errcheck
	}
}

// timedKinds are an operation of each class of the table, on a buffer with the size of a rank's larger one.
var timedKinds = []struct {
	name string
	call func(buf uintptr, bytes, ranks int) comm.Call
}{
	{"sum f32", func(buf uintptr, bytes, _ int) comm.Call {
		return comm.AllReduceCall(buf, buf, bytes/4, dtype.F32, comm.Sum)
	}},
	{"sum bf16", func(buf uintptr, bytes, _ int) comm.Call {
		return comm.AllReduceCall(buf, buf, bytes/2, dtype.BF16, comm.Sum)
	}},
	{"max i32", func(buf uintptr, bytes, _ int) comm.Call {
		return comm.AllReduceCall(buf, buf, bytes/4, dtype.I32, comm.Max)
	}},
	{"sum i8", func(buf uintptr, bytes, _ int) comm.Call {
		return comm.AllReduceCall(buf, buf, bytes, dtype.I8, comm.Sum)
	}},
	{"broadcast f32", func(buf uintptr, bytes, _ int) comm.Call {
		return comm.BroadcastCall(buf, bytes/4, dtype.F32, 0)
	}},
	{"reduce-scatter f32", func(buf uintptr, bytes, ranks int) comm.Call {
		return comm.ReduceScatterCall(buf, buf+uintptr(bytes), bytes/4/ranks, dtype.F32, comm.Sum)
	}},
	{"reduce-scatter i8", func(buf uintptr, bytes, ranks int) comm.Call {
		return comm.ReduceScatterCall(buf, buf+uintptr(bytes), bytes/ranks, dtype.I8, comm.Sum)
	}},
	{"allgather f32", func(buf uintptr, bytes, ranks int) comm.Call {
		return comm.AllGatherCall(buf+uintptr(bytes), buf, bytes/4/ranks, dtype.F32)
	}},
	{"all-to-all f32", func(buf uintptr, bytes, ranks int) comm.Call {
		return comm.AllToAllCall(buf, buf+uintptr(bytes), bytes/4/ranks, dtype.F32)
	}},
}

// TestTimesOfTable prints what operations of all classes take over peer memory and over NCCL, captured, and marks
// those for which the table chooses the one that takes at least 5 % longer.
func TestTimesOfTable(t *testing.T) {
	gpus, s := measuredGPUs(t, "limits")
	ranks := len(gpus)
	ends := world(t, gpus, ranks, s, 20*time.Second)
	if gpus[0].Device() == gpus[1].Device() {
		t.Skip("NCCL needs a GPU for each rank")
	}
	others, err := nccl.InProcess(t.Context(), gpus)
	require.NoError(t, err)
	table := newOffloadTable(link.NVLink, ranks, reductionSet{})
	fmt.Println("| operation | bytes | peer memory µs | NCCL µs | table | |\n| --- | ---: | ---: | ---: | --- | --- |")
	for _, kind := range timedKinds {
		for bytes := 1 << 10; bytes <= 256<<20; bytes *= 4 {
			times := make([]float64, 2*ranks)
			require.NoError(t, each(ends, func(e *endpoint) error {
				return timeBoth(t.Context(), e, others[e.rank], bytes, kind.call, times[2*e.rank:])
			}))
			var peers, base float64
			for r := range ranks {
				peers = max(peers, times[2*r])
				base = max(base, times[2*r+1])
			}
			x := kind.call(0, bytes, ranks)
			chosen, slow := "NCCL", base > 1.05*peers
			if table.has(&x) {
				chosen, slow = "peer memory", peers > 1.05*base
			}
			mark := map[bool]string{true: "SLOW"}[slow]
			fmt.Printf("| %s | %s | %.2f | %.2f | %s | %s |\n", kind.name, sizeText(bytes), peers, base, chosen, mark)
		}
	}
	for _, c := range others {
		require.NoError(t, c.Close())
	}
}

// timeBoth times a call over peer memory and over a communicator of NCCL.
func timeBoth(ctx context.Context, e *endpoint, c *nccl.Comm, bytes int,
	call func(buf uintptr, bytes, ranks int) comm.Call, us []float64) error {
	buf, err := e.rt.Allocate(2 * bytes)
	if err != nil {
		return err
	}
	defer e.rt.Deallocate(buf) //nolint:errcheck
	x := call(buf, bytes, c.WorldSize())
	if err := errors.Join(e.rt.Fill(buf, 2*bytes, dtype.U8, 0), e.rt.Synchronize(ctx)); err != nil {
		return err
	}
	m, err := newTiming(e.rt, e.rt.Stream())
	if err != nil {
		return err
	}
	p := e.planned(x)
	us[0], err = m.microseconds(ctx, calls(bytes), true, func() error { return e.submit(m.stream, p) })
	if err := errors.Join(err, e.fault(ctx), c.Barrier(ctx)); err != nil {
		return err
	}
	// Its calls are captured on its own stream.
	n, err := newTiming(e.rt, c.Stream())
	if err != nil {
		return err
	}
	us[1], err = n.microseconds(ctx, calls(bytes), true, func() error { return x.Make(c) })
	return errors.Join(err, c.Barrier(ctx), m.start.Close(), m.end.Close(), n.start.Close(), n.end.Close())
}

// timedSources are without a residual, with one, and with a gradient of two types.
var timedSources = []kernel.Source{
	{},
	{Take: true},
	{Take: true, DType: dtype.F32},
	{Take: true, DType: dtype.BF16},
}

// TestTimesOfRounded prints those of allreduces rounded to i8 and fp8, alone, with what is lost, and with a gradient
// as well, as planned, and with the blocks, threads and tiles of TUTTI_ROUNDED, as 256x320x32.
func TestTimesOfRounded(t *testing.T) {
	gpus, s := measuredGPUs(t, "rounded")
	ends := world(t, gpus, len(gpus), s, 20*time.Second)
	rng := rand.New(rand.NewPCG(1, 2))
	random := make([]float32, 1<<20)
	for i := range random {
		// The rounding error is lost again, and is 1/254 of it each time. Two gradients in 16 bits as well.
		bits := math.Float32bits(float32(rng.NormFloat64()*0x1p120)) >> 16
		random[i] = math.Float32frombits(bits<<16 | bits)
	}
	launches := append([]string{"planned"}, strings.Fields(os.Getenv("TUTTI_ROUNDED"))...)
	for _, n := range []int{1 << 20, 5 << 20, 25 << 20, 100 << 20} {
		for _, codec := range []kernel.Codec{kernel.CodecI8, kernel.CodecFP8} {
			for _, src := range timedSources {
				copies := 1
				if src.Take && n < 100<<20 {
					copies = perGraph
				}
				fmt.Printf("%10d values as %v, lost %t, gradient %v:", n, codec, src.Take, src.DType)
				for _, launch := range launches {
					times := make([]float64, len(ends))
					require.NoError(t, each(ends, func(e *endpoint) error {
						m, err := newTiming(e.rt, e.rt.Stream())
						if err != nil {
							return err
						}
						buf, err := e.rt.Allocate(4 * n * (2*copies + 1)) // values, gradients, sums
						if err == nil {
							err = e.rt.CopyIn(buf, hostmem.Bytes(random))
						}
						for at := len(random); err == nil && at < 2*n*copies; at += len(random) {
							err = e.rt.Copy(buf+uintptr(4*at), buf, 4*len(random))
						}
						p, call := plan{}, 0
						if err == nil {
							times[e.rank], err = m.microseconds(t.Context(), calls(4*n), true, func() error {
								src := src
								if src.X, src.N = buf+uintptr(4*n*(call%copies)), n; src.DType != dtype.Invalid {
									src.Grad = src.X + uintptr(4*n*copies)
								}
								p, _ = e.rounded(src, buf+uintptr(8*n*copies), codec, comm.Sum)
								fmt.Sscanf(launch, "%dx%dx%d", &p.blocks, &p.width, &p.call.tiles) //nolint:errcheck
								call++
								return e.submit(m.stream, p)
							})
						}
						return errors.Join(err, e.fault(t.Context()), m.start.Close(), m.end.Close(), e.rt.Deallocate(buf))
					}))
					fmt.Printf(" %s %.1f", launch, slices.Max(times))
				}
				fmt.Println(" µs")
			}
		}
	}
}

// TestTimesOfRoundedLengths prints those of rounded allreduces of lengths that do and do not cut into
// pieces which begin at packs.
func TestTimesOfRoundedLengths(t *testing.T) {
	gpus, s := measuredGPUs(t, "lengths")
	ends := world(t, gpus, len(gpus), s, 20*time.Second)
	const most = 26_214_404
	for _, src := range timedSources {
		fmt.Printf("lost %-5t gradient %-7v", src.Take, src.DType)
		for n := most - 4; n < most; n++ {
			times := make([]float64, len(ends))
			require.NoError(t, each(ends, func(e *endpoint) error {
				m, err := newTiming(e.rt, e.rt.Stream())
				if err != nil {
					return err
				}
				buf, err := e.rt.Allocate(3 * 4 * most) // values, gradients, sums
				if err == nil {
					err = e.rt.Fill(buf, 2*most, dtype.F32, 0.5)
				}
				if err == nil {
					src := src
					src.X, src.N = buf, n
					if src.DType != dtype.Invalid {
						src.Grad = buf + 4*most
					}
					times[e.rank], err = m.microseconds(t.Context(), calls(4*n), true, func() error {
						p, _ := e.rounded(src, buf+8*most, kernel.CodecI8, comm.Sum)
						return e.submit(m.stream, p)
					})
				}
				return errors.Join(err, e.fault(t.Context()), m.start.Close(), m.end.Close(), e.rt.Deallocate(buf))
			}))
			fmt.Printf("  %d: %.1f", n, slices.Max(times))
		}
		fmt.Println(" µs")
	}
}

// TestGeometries prints which grids are best for what goes at once.
func TestGeometries(t *testing.T) {
	gpus, s := measuredGPUs(t, "geometry")
	ends := world(t, gpus, len(gpus), s, 20*time.Second)
	for bytes := 256; bytes <= 8<<20; bytes *= 2 {
		type result struct {
			us            float64
			blocks, width int
		}
		var all []result
		for blocks := 1; blocks <= maxBlocks; blocks *= 2 {
			for _, width := range []int{64, 128, 256, 512} {
				if n := blocks * width; n > max(2*packsOf(bytes), 64) || n*64 < packsOf(bytes) {
					continue
				}
				us, err := timeWorld(t.Context(), ends, bytes, true, func(p *plan) { p.blocks, p.width = blocks, width })
				require.NoError(t, err)
				all = append(all, result{us, blocks, width})
			}
		}
		slices.SortFunc(all, func(a, b result) int { return int((a.us - b.us) * 1e4) })
		fmt.Printf("%10s", sizeText(bytes))
		for _, r := range all[:min(6, len(all))] {
			fmt.Printf("  %3d x %3d %7.2f", r.blocks, r.width, r.us)
		}
		fmt.Println()
	}
}

// TestPaths prints what allreduces take in one step, in two and through rings, which
// tells where each should begin.
func TestPaths(t *testing.T) {
	gpus, most := measuredGPUs(t, "paths")
	most.words = 64 << 20
	worlds := map[string][]*endpoint{}
	for _, path := range []struct {
		name        string
		once, twice int
	}{{"once", 1 << 30, 0}, {"twice", 0, 1 << 30}, {"rings", 0, 0}} {
		s := most
		s.oneStep, s.twoSteps = path.once, path.twice
		worlds[path.name] = world(t, gpus, len(gpus), s, 20*time.Second)
	}
	for bytes := 16 << 10; bytes <= 16<<20; bytes *= 2 {
		fmt.Printf("%10s", sizeText(bytes))
		for _, path := range []string{"once", "twice", "rings"} {
			us, err := timeWorld(t.Context(), worlds[path], bytes, true, nil)
			require.NoError(t, err)
			fmt.Printf("  %s %8.2f", path, us)
		}
		fmt.Println()
	}
}

// TestRings prints which rings are best for large messages.
func TestRings(t *testing.T) {
	gpus, most := measuredGPUs(t, "rings")
	for _, blocks := range []int{64, 96, 128} {
		for _, chunk := range []int{128, 256, 512} {
			s := most
			s.ringBlocks, s.chunk, s.oneStep, s.twoSteps = min(blocks, most.blocks), chunk, 0, 0
			t.Run(fmt.Sprintf("%d blocks of %d packs", blocks, chunk), func(t *testing.T) {
				ends := world(t, gpus, len(gpus), s, 20*time.Second)
				fmt.Printf("%4d x %4d", blocks, chunk)
				for _, bytes := range []int{1 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20, 1 << 30} {
					us, err := timeWorld(t.Context(), ends, bytes, false, nil)
					require.NoError(t, err)
					fmt.Printf("  %s %8.2f", sizeText(bytes), us)
				}
				fmt.Println()
			})
		}
	}
}

// TestStalls repeats what once took a thousand times as long as it should.
func TestStalls(t *testing.T) {
	gpus, s := measuredGPUs(t, "stalls")
	for _, bytes := range []int{256 << 10, 16 << 20} {
		ends := world(t, gpus, len(gpus), s, 20*time.Second)
		for range 12 {
			us, err := timeWorld(t.Context(), ends, bytes, false, nil)
			require.NoError(t, err)
			fmt.Printf("%s %.1f\n", sizeText(bytes), us)
		}
	}
}

// TestHostCost prints what a submission costs the host.
func TestHostCost(t *testing.T) {
	gpus, s := measuredGPUs(t, "host")
	ends := world(t, gpus, len(gpus), s, 20*time.Second)
	require.NoError(t, each(ends, func(e *endpoint) error {
		buf, err := e.rt.Allocate(1024)
		if err != nil {
			return err
		}
		p := e.planned(comm.AllReduceCall(buf, buf, 256, dtype.F32, comm.Sum))
		p.call.idle = 1
		const n = 500
		for range 3 {
			began := time.Now()
			for range n {
				if err := e.submit(e.rt.Stream(), p); err != nil {
					return err
				}
			}
			took := time.Since(began)
			if err := e.rt.Synchronize(t.Context()); err != nil {
				return err
			}
			fmt.Printf("rank %d: %v a submission, %v an idle kernel\n", e.rank, took/n, time.Since(began)/n)
		}
		return e.rt.Deallocate(buf)
	}))
}
