package p2p

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// inRows changes the kernels so that one launch runs all ranks, each of them a row
// of blocks: they read their parameters from an array in memory, whose address is
// their own parameter. All else stays.
func inRows(ptx []byte) []byte {
	declared := regexp.MustCompile(`\.param \.align 8 \.b8 (\w+_param_0)\[\d+\]`)
	parts := strings.Split(string(ptx), ".visible .entry ")
	for i, entry := range parts[1:] {
		parameter := declared.FindStringSubmatch(entry)[1]
		head, body, _ := strings.Cut(entry, "{")
		head = declared.ReplaceAllString(head, ".param .u64 $1")
		end := strings.Index(body, "\n}") // functions may follow
		own := body[:end]
		own = strings.ReplaceAll(own, ", "+parameter+";", ", %row_parameters;")
		own = strings.ReplaceAll(own, "["+parameter, "[%row_parameters")
		own = fromParameters.ReplaceAllString(own, "ld.global$1$2[%r")
		parts[i+1] = head + "{\n\t.reg .b64 %row_parameters;\n\t.reg .b32 %row;" + fmt.Sprintf(`
	mov.u32 %%row, %%ctaid.y;
	ld.param.u64 %%row_parameters, [%s];
	mad.wide.u32 %%row_parameters, %%row, %d, %%row_parameters;
`, parameter, unsafe.Sizeof(launchParameters{})) + own + body[end:]
	}
	return []byte(strings.Join(parts, ".visible .entry "))
}

// fromParameters is a load from a kernel's parameters, not from those of a call.
var fromParameters = regexp.MustCompile(`ld\.param(\S*)([^\[]*)\[%r`)

// openGPUs opens a GPU for each rank, one for several where there are fewer, or skips
// the test.
func openGPUs(t testing.TB, ranks int) []*cuda.Runtime {
	t.Helper()
	n, err := cuda.Count()
	if err != nil {
		t.Skipf("needs NVIDIA GPUs: %v", err)
	}
	gpus := make([]*cuda.Runtime, ranks)
	for r := range gpus {
		gpus[r], err = cuda.Open(r % n)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, gpus[r].Close()) })
	}
	return gpus
}

// small are sizes with which little data takes every path.
func small(ranks int) sizes {
	s := sizes{
		words:      48 << 10,
		tagged:     24 << 10,
		ringBlocks: 2,
		chunk:      48,
		oneStep:    8 << 10,
		twoSteps:   32 << 10,
		blocks:     4,
	}
	if ranks == 2 {
		s.oneStep, s.twoSteps = 24<<10, 0
	}
	return s
}

// step is one operation of a test.
type step struct {
	operation      comm.Op
	dt             dtype.DType
	op             comm.ReduceOp
	count, root    int // elements of a piece
	inPlace        bool
	sendAt, recvAt int // bytes by which the buffers are off 256
	seed           uint64
}

func (s step) String() string {
	return fmt.Sprintf("%s of %d %v, %v, root %d, in place %t, offsets %d and %d, seed %d",
		s.operation, s.count, s.dt, s.op, s.root, s.inPlace, s.sendAt, s.recvAt, s.seed)
}

// lengths returns the elements of the send and the receive buffer.
func (s step) lengths(ranks int) (send, recv int) {
	send, recv = s.count, s.count
	switch s.operation {
	case comm.OpReduceScatter:
		send *= ranks
	case comm.OpAllGather:
		recv *= ranks
	case comm.OpAllToAll:
		send, recv = send*ranks, recv*ranks
	}
	return send, recv
}

// offset returns where, in bytes, one buffer starts in the other if they are in place.
func (s step) offset(rank int) (send, recv int) {
	switch s.operation {
	case comm.OpReduceScatter:
		return 0, rank * s.count * s.dt.Size()
	case comm.OpAllGather:
		return rank * s.count * s.dt.Size(), 0
	}
	return 0, 0
}

var stepOps = []comm.Op{
	comm.OpAllReduce, comm.OpReduce, comm.OpReduceScatter, comm.OpAllGather, comm.OpAllToAll, comm.OpBroadcast,
}

// told returns the receive buffer that a rank names in its call. Ranks that get no result of a Reduce
// may name none: every second one does.
func (s step) told(rank int, recv uintptr) uintptr {
	if s.operation == comm.OpReduce && rank != s.root && rank%2 == 1 {
		return 0
	}
	return recv
}

// randomStep draws an operation on up to most bytes.
func randomStep(rng *rand.Rand, ranks, most int) step {
	types := dtype.All()
	s := step{
		operation: stepOps[rng.IntN(len(stepOps))],
		dt:        types[rng.IntN(len(types))],
		root:      rng.IntN(ranks),
		seed:      rng.Uint64(),
	}
	if rng.IntN(2) == 0 {
		s.operation = comm.OpAllReduce
	}
	for s.op = comm.ReduceOp(rng.IntN(5)); !s.op.Defined(s.dt); s.op = comm.ReduceOp(rng.IntN(5)) {
	}
	// As many small ones as large ones.
	limit := 1 << (1 + rng.IntN(24))
	s.count = 1 + rng.IntN(max(min(limit, most)/s.dt.Size(), 1))
	s.inPlace = s.operation == comm.OpBroadcast || s.operation != comm.OpAllToAll && rng.IntN(2) == 0
	switch rng.IntN(3) {
	case 0:
		s.sendAt, s.recvAt = rng.IntN(16)*s.dt.Size(), rng.IntN(16)*s.dt.Size()
	case 1:
		s.sendAt, s.recvAt = rng.IntN(64)*4, rng.IntN(64)*4
	}
	return s
}

// input returns what a rank sends: random patterns, among them all kinds of NaNs
// and those that the wires treat in special ways, and numbers of one magnitude,
// whose sums depend on their order.
func (s step) input(rank, n int) []byte {
	rng := rand.New(rand.NewPCG(s.seed, uint64(rank)))
	b := make([]byte, n*s.dt.Size())
	special := [][]byte{
		bytes.Repeat([]byte{0xff}, 8),
		bytes.Repeat([]byte{0}, 8),
		{0, 0, 0, 0x80, 0, 0, 0, 0x80},
		{0, 0, 0x80, 0x7f, 0, 0, 0xf0, 0x7f},
		{1, 0, 0x80, 0x7f, 0xff, 0xff, 0xff, 0xff},
		{0xff, 0xff, 0xff, 0x7f, 1, 0, 0, 0},
		{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xf7, 0xff},
	}
	size := s.dt.Size()
	if s.dt.IsFloat() && rng.IntN(2) == 0 {
		values := make([]float32, n)
		for i := range values {
			values[i] = float32(rng.NormFloat64())
		}
		_ = dtype.FromFloat32(b, s.dt, values)
	} else {
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
	}
	for range n / 50 {
		i := rng.IntN(n)
		copy(b[i*size:(i+1)*size], special[rng.IntN(len(special))])
	}
	return b
}

// reference runs the steps over package local and returns what each rank received.
func reference(t testing.TB, ranks int, steps []step) [][][]byte {
	results := make([][][]byte, len(steps))
	for i := range results {
		results[i] = make([][]byte, ranks)
	}
	require.NoError(t, local.Run(context.Background(), ranks, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close() //nolint:errcheck
		for i, s := range steps {
			ns, nr := s.lengths(ranks)
			size := s.dt.Size()
			send, err := rt.Allocate(ns * size)
			if err != nil {
				return err
			}
			recv, err := rt.Allocate(nr * size)
			if err != nil {
				return err
			}
			in := s.input(c.Rank(), ns)
			copy(hostmem.Slice[byte](send, len(in)), in)
			rest := hostmem.Slice[byte](recv, nr*size)
			for j := range rest {
				rest[j] = untouched
			}
			out := recv
			switch s.operation {
			case comm.OpAllReduce:
				err = c.AllReduce(send, recv, s.count, s.dt, s.op)
			case comm.OpReduce:
				err = c.Reduce(send, recv, s.count, s.dt, s.op, s.root)
				if s.inPlace && c.Rank() != s.root {
					out = send
				}
			case comm.OpReduceScatter:
				err = c.ReduceScatter(send, recv, s.count, s.dt, s.op)
			case comm.OpAllGather:
				err = c.AllGather(send, recv, s.count, s.dt)
			case comm.OpAllToAll:
				err = c.AllToAll(send, recv, s.count, s.dt)
			case comm.OpBroadcast:
				err = c.Broadcast(send, s.count, s.dt, s.root)
				out = send
			}
			if err = errors.Join(err, c.Sync(ctx)); err != nil {
				return fmt.Errorf("%v: %w", s, err)
			}
			results[i][c.Rank()] = bytes.Clone(hostmem.Slice[byte](out, nr*size))
			if err := errors.Join(rt.Deallocate(send), rt.Deallocate(recv)); err != nil {
				return err
			}
		}
		return nil
	}))
	return results
}

// buffers are a rank's device memory for steps.
type buffers struct {
	rt         *cuda.Runtime
	send, recv uintptr
	bytes      int
}

const (
	guard     = 1024 // bytes on both sides
	untouched = 0x5a // what buffers hold that nobody has written
)

func newBuffers(rt *cuda.Runtime, bytes int) (b buffers, err error) {
	b = buffers{rt: rt, bytes: bytes + 2*guard}
	if b.send, err = rt.Allocate(b.bytes); err == nil {
		b.recv, err = rt.Allocate(b.bytes)
	}
	return b, err
}

func (b buffers) free() error { return errors.Join(b.rt.Deallocate(b.send), b.rt.Deallocate(b.recv)) }

// prepare fills the buffers and returns the arguments of a step.
func (b buffers) prepare(s step, rank, ranks int) (send, recv uintptr, err error) {
	ns, nr := s.lengths(ranks)
	size := s.dt.Size()
	skew := rank * int(s.seed%3) * 4 // so that ranks' buffers are aligned differently
	send, recv = b.send+guard+uintptr(s.sendAt+skew), b.recv+guard+uintptr(s.recvAt+skew)
	err = errors.Join(b.rt.Fill(b.send, b.bytes, dtype.U8, untouched), b.rt.Fill(b.recv, b.bytes, dtype.U8, untouched))
	if s.inPlace {
		sendOff, recvOff := s.offset(rank)
		send, recv = b.recv+guard+uintptr(s.recvAt+skew+sendOff), b.recv+guard+uintptr(s.recvAt+skew+recvOff)
	}
	return send, recv, errors.Join(err, b.rt.CopyIn(send, s.input(rank, ns)[:ns*size]), b.checkSize(max(ns, nr)*size))
}

func (b buffers) checkSize(n int) error {
	if n+guard > b.bytes-guard {
		return fmt.Errorf("%d bytes do not fit in %d", n, b.bytes)
	}
	return nil
}

// verify compares what a step left with what it should.
func (b buffers) verify(s step, rank, ranks int, recv uintptr, want []byte) error {
	_, nr := s.lengths(ranks)
	n := nr * s.dt.Size()
	got := make([]byte, n+2)
	if err := b.rt.CopyOut(got, recv-1); err != nil {
		return err
	}
	if !s.inPlace && (got[0] != untouched || got[n+1] != untouched) {
		return fmt.Errorf("%v: rank %d wrote beside its buffer", s, rank)
	}
	return s.compare(rank, got[1:n+1], want)
}

// compare compares a result with what it should be.
func (s step) compare(rank int, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	size := s.dt.Size()
	reduces := s.operation.Reduces()
	for i := range len(want) / size {
		g, w := got[i*size:(i+1)*size], want[i*size:(i+1)*size]
		if bytes.Equal(g, w) {
			continue
		}
		// Which NaN arithmetic gives is the processor's.
		if reduces && s.dt.IsFloat() && s.op != comm.Min && s.op != comm.Max && isNaN(s.dt, g) && isNaN(s.dt, w) {
			continue
		}
		return fmt.Errorf("%v: rank %d, element %d of %d is % x, want % x", s, rank, i, len(want)/size, g, w)
	}
	return nil
}

func isNaN(dt dtype.DType, b []byte) bool {
	var word [8]byte
	copy(word[:], b)
	bits := uint64(0)
	for i := range word {
		bits |= uint64(word[i]) << (8 * i)
	}
	v, err := dtype.ToFloat64(dt, bits)
	return err == nil && v != v
}

// planOf plans a step.
func (p *planner) planOf(s step, send, recv uintptr) plan {
	return p.planned(comm.Call{
		Op: s.operation, DType: s.dt, Reduce: s.op, Count: s.count, Peer: s.root, Send: send, Recv: recv,
	})
}

// planned is plan of a call that has no address.
func (p *planner) planned(x comm.Call) plan { return p.plan(&x) }

// together is a world on one GPU, whose ranks are rows of blocks of one launch.
type together struct {
	planner
	rt   *cuda.Runtime
	ends []*endpoint
	at   uintptr // of the parameters
}

// readPTX returns the kernels' PTX as text.
func readPTX() ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(r)
}

func newTogether(t testing.TB, rt *cuda.Runtime, ranks int, s sizes, limit time.Duration) *together {
	w := &together{planner: planner{sizes: s, ranks: ranks}, rt: rt}
	text, err := readPTX()
	require.NoError(t, err)
	m, err := rt.LoadModule(inRows(text))
	require.NoError(t, err)
	w.kernels, err = load(m, false)
	require.NoError(t, err)
	for r := range ranks {
		e, err := newEndpoint(t.Context(), rt, r, ranks, s, limit)
		require.NoError(t, err)
		w.ends = append(w.ends, e)
	}
	for _, e := range w.ends {
		for p, peer := range w.ends {
			e.parameters[0].world.scratch[p] = uint64(peer.scratch.Address())
		}
	}
	w.at, err = rt.Allocate(4096)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, rt.Synchronize(context.Background()))
		assert.NoError(t, rt.Deallocate(w.at))
		for _, e := range w.ends {
			assert.NoError(t, e.close())
		}
		assert.NoError(t, m.Close())
	})
	return w
}

// run launches an operation of all ranks by one kernel: the kernel of a rank whose buffers are not aligned, if there
// is one, which works for all.
func (w *together) run(plans []plan) error {
	var all []launchParameters
	kernel := plans[0].kernel
	for r, p := range plans {
		if p.call.aligned == 0 {
			kernel = p.kernel
		}
		l := w.ends[r].parameters[0]
		l.call = p.call
		all = append(all, l)
	}
	if err := w.rt.CopyIn(w.at, hostmem.Bytes(all)); err != nil {
		return err
	}
	g := cuda.Geometry{
		Grid:        cuda.Dim{X: plans[0].blocks, Y: w.ranks},
		Block:       cuda.Dim{X: plans[0].width},
		Cooperative: true,
	}
	return kernel.Launch(w.rt.Stream(), g, uint64(w.at))
}

// Every rank gets the bits that package local gives, of every type, by every path.
func TestRanksOfOneLaunch(t *testing.T) {
	for _, ranks := range []int{2, 3, 4, 8} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			rt := openGPUs(t, 1)[0]
			const most = 40 << 10
			number := 400
			if testing.Short() { // for tools that make kernels slow
				number = 40
			}
			w := newTogether(t, rt, ranks, small(ranks), 20*time.Second)
			seed := uint64(ranks)
			rng := rand.New(rand.NewPCG(seed, 0))
			var steps []step
			for range number {
				steps = append(steps, randomStep(rng, ranks, most))
			}
			wanted := reference(t, ranks, steps)
			bufs := make([]buffers, ranks)
			for r := range bufs {
				var err error
				bufs[r], err = newBuffers(rt, ranks*most+4096)
				require.NoError(t, err)
				defer bufs[r].free() //nolint:errcheck
			}
			paths := map[*function]int{}
			for i, s := range steps {
				plans := make([]plan, ranks)
				recvs := make([]uintptr, ranks)
				for r := range plans {
					send, recv, err := bufs[r].prepare(s, r, ranks)
					require.NoError(t, err)
					recvs[r] = recv
					plans[r] = w.planOf(s, send, s.told(r, recv))
				}
				paths[plans[0].kernel]++
				require.NoError(t, w.run(plans), "seed %d, step %d: %v", seed, i, s)
				require.NoError(t, w.ends[0].wait(t.Context(), rt.Stream()))
				for r := range plans {
					require.NoError(t, w.ends[r].fault(t.Context()))
					require.NoError(t, bufs[r].verify(s, r, ranks, recvs[r], wanted[i][r]), "seed %d, step %d", seed, i)
				}
			}
			t.Logf("%d kernels of %d ran", len(paths), len(w.kernels.all()))
		})
	}
}

// world makes endpoints of this number of ranks over the GPUs given, in turn.
func world(t testing.TB, gpus []*cuda.Runtime, ranks int, s sizes, limit time.Duration) []*endpoint {
	ends := make([]*endpoint, ranks)
	require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) (err error) {
		ends[c.Rank()], _, err = connect(ctx, c, gpus[c.Rank()], s, limit, byTable)
		return err
	}))
	t.Cleanup(func() {
		for _, e := range ends {
			assert.NoError(t, e.rt.Synchronize(context.Background()))
		}
		for _, e := range ends {
			assert.NoError(t, e.close())
		}
	})
	return ends
}

// wait drains the stream. If ctx ends first, the kernels that wait for peers are aborted.
func (e *endpoint) wait(ctx context.Context, s *cuda.Stream) error {
	done := e.stopWith(ctx)
	err := s.Synchronize(context.Background())
	done()
	return errors.Join(err, e.fault(ctx))
}

// each runs f for all endpoints at once.
func each(ends []*endpoint, f func(e *endpoint) error) error {
	errs := make([]error, len(ends))
	var wg sync.WaitGroup
	for i, e := range ends {
		wg.Go(func() { errs[i] = f(e) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// The same over all GPUs, one rank and two ranks on each.
func TestRanksOfSeveralLaunches(t *testing.T) {
	for _, ranks := range []int{2, 3, 4} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			gpus := openGPUs(t, ranks)
			n, err := cuda.Count()
			require.NoError(t, err)
			steps, most := 600, 200<<10
			s := small(ranks)
			if ranks == n {
				s, most = defaults(ranks), 24<<20
				steps = 300
			}
			ends := world(t, gpus, ranks, s, 20*time.Second)
			seed := uint64(100 + ranks)
			rng := rand.New(rand.NewPCG(seed, 0))
			list := make([]step, steps)
			for i := range list {
				list[i] = randomStep(rng, ranks, most)
			}
			wanted := reference(t, ranks, list)
			require.NoError(t, each(ends, func(e *endpoint) error {
				b, err := newBuffers(e.rt, ranks*most+4096)
				if err != nil {
					return err
				}
				for i, s := range list {
					send, recv, err := b.prepare(s, e.rank, ranks)
					if err == nil {
						err = e.submit(e.rt.Stream(), e.planOf(s, send, s.told(e.rank, recv)))
					}
					if err == nil {
						err = e.wait(t.Context(), e.rt.Stream())
					}
					if err == nil {
						err = b.verify(s, e.rank, ranks, recv, wanted[i][e.rank])
					}
					if err != nil {
						return fmt.Errorf("seed %d, step %d: %w", seed, i, err)
					}
				}
				return b.free()
			}))
		})
	}
}

func runLocal(t *testing.T, n int, f func(ctx context.Context, c comm.Communicator) error) error {
	return local.Run(t.Context(), n, f)
}
