package delta

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	gort "runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Tensor is a named array of elements in row-major order, in memory of any kind.
type Tensor struct {
	Name   string      // unique in the set
	DType  dtype.DType // of the elements
	Shape  []int       // sizes, the slowest dimension first; nil for a scalar
	Memory Memory      // holds the elements

	elements int // number of elements, from Shape
}

// Memory holds the bytes of a tensor from offset 0 on. Several goroutines access it at once, but not the same bytes.
// If it has a method Sequential(), Diff reads it as a target, and Apply writes it, from beginning to end.
type Memory interface {
	io.ReaderAt
	io.WriterAt
}

// Of returns a named tensor in the memory of a runtime. It refuses tensors that are not contiguous
// ([runtime.ErrShape]); Contiguous makes a copy.
func Of(name string, t *runtime.Tensor) (Tensor, error) {
	if t == nil {
		return Tensor{}, fmt.Errorf("delta: tensor %q is nil: %w", name, runtime.ErrArgument)
	}
	if !t.IsContiguous() {
		return Tensor{}, fmt.Errorf("delta: tensor %q has shape %v and strides %v, want it contiguous: %w",
			name, t.Shape(), t.Strides(), runtime.ErrShape)
	}
	return Tensor{
		Name:   name,
		DType:  t.DType(),
		Shape:  t.Shape(),
		Memory: device{t, false},
	}, nil
}

// Runtime returns the runtime's tensor if t is in the memory of a runtime, and nil otherwise.
func (t Tensor) Runtime() *runtime.Tensor {
	d, _ := t.Memory.(device)
	return d.Tensor
}

// Host is the memory of a Go slice.
type Host []byte

// ReadAt implements [io.ReaderAt].
func (h Host) ReadAt(p []byte, offset int64) (int, error) {
	return copy(p, h[offset:]), nil
}

// WriteAt implements [io.WriterAt].
func (h Host) WriteAt(p []byte, offset int64) (int, error) {
	return copy(h[offset:], p), nil
}

// device is memory of a runtime.
type device struct {
	*runtime.Tensor
	allocated bool // by a subscriber
}

// release frees memory that a subscriber has allocated.
func release(m Memory) {
	if d, ok := m.(device); ok && d.allocated {
		_ = d.Free()
	}
}

func (d device) ReadAt(p []byte, offset int64) (int, error) {
	from, err := d.Ptr()
	if err != nil {
		return 0, err
	}
	return len(p), d.Runtime().CopyOut(p, from+uintptr(offset))
}

func (d device) WriteAt(p []byte, offset int64) (int, error) {
	to, err := d.Ptr()
	if err != nil {
		return 0, err
	}
	return len(p), d.Runtime().CopyIn(to+uintptr(offset), p)
}

// place returns the location of a tensor. Kernels can access memory of the host and of GPUs.
func (t Tensor) place() (place, error) {
	switch m := t.Memory.(type) {
	case Host:
		return hostPlace(m), nil
	case device:
		addr, err := m.Ptr()
		if err != nil {
			return place{}, err
		}
		if m.Device().Kind == runtime.CPU {
			return place{rt: host, addr: addr, keep: m}, nil
		}
		if rt, ok := m.Runtime().(*cuda.Runtime); ok {
			kernels, err := openGPU(rt)
			return place{
				rt:   rt,
				gpu:  kernels,
				addr: addr,
				keep: m,
			}, err
		}
	}
	return place{}, nil
}

// replica is a set of tensors at a version.
type replica struct {
	version uint64     // 0 means that the tensors have no version
	tensors []Tensor   // by name
	sums    [][]uint32 // checksums of their blocks
	lost    error      // the reason why the tensors have no version
	hook    hook       // called at each stage of an update; nil outside tests
}

// hook is called before each access to memory and before each message; tests inject failures with it.
type hook func() error

func (h hook) step() error {
	if h == nil {
		return nil
	}
	return h()
}

// newReplica checks and sorts tensors.
func newReplica(version uint64, tensors []Tensor) (*replica, error) {
	r := &replica{version: version, tensors: slices.Clone(tensors)}
	slices.SortFunc(r.tensors, func(a, b Tensor) int {
		return cmp.Compare(a.Name, b.Name)
	})
	for i := range r.tensors {
		t := &r.tensors[i]
		if err := t.check(); err != nil {
			return nil, err
		}
		if i > 0 && t.Name == r.tensors[i-1].Name {
			return nil, fmt.Errorf("delta: two tensors have the name %q", t.Name)
		}
		if h, ok := t.Memory.(Host); t.Memory == nil || ok && len(h) != t.elements*t.DType.Size() {
			return nil, fmt.Errorf("delta: tensor %q has %d elements of %v, and memory of another length",
				t.Name, t.elements, t.DType)
		}
		r.sums = append(r.sums, make([]uint32, t.blocks()))
	}
	return r, nil
}

// memorySpan is the address range of a tensor.
type memorySpan struct {
	name     string  // of the tensor
	from, to uintptr // first address, and the address after the last
	written  bool    // an update writes it
}

// separate returns an error if a tensor to be written shares memory with another one, written or read.
func separate(written, read []Tensor) error {
	var spans []memorySpan
	for i, t := range slices.Concat(written, read) {
		p, err := t.place()
		if err != nil {
			return err
		}
		bytes := t.elements * t.DType.Size()
		if p.addr != 0 && bytes > 0 {
			spans = append(spans, memorySpan{
				t.Name,
				p.addr,
				p.addr + uintptr(bytes),
				i < len(written),
			})
		}
	}
	slices.SortFunc(spans, func(a, b memorySpan) int {
		return cmp.Compare(a.from, b.from)
	})
	var farthest, farthestWritten memorySpan
	for _, s := range spans {
		before := farthestWritten
		if s.written {
			before = farthest
		}
		if before.to > s.from {
			return fmt.Errorf("delta: tensors %q and %q share memory: %w", before.name, s.name, runtime.ErrArgument)
		}
		if s.to > farthest.to {
			farthest = s
		}
		if s.written && s.to > farthestWritten.to {
			farthestWritten = s
		}
	}
	return nil
}

// measure computes the checksums of all blocks.
func (r *replica) measure(ctx context.Context, tick func(done, total int)) error {
	return parallel(ctx, r.blocks(), tick, r.measureBlock)
}

func (r *replica) measureBlock(c *coder, tensor, block int) error {
	p, _, err := r.load(tensor, block, &c.new)
	if err != nil {
		return err
	}
	data, err := p.bytes(r.tensors[tensor].length(block), &c.new)
	r.sums[tensor][block] = crc32.Checksum(data, castagnoli)
	return err
}

// blocks returns the number of blocks of each tensor.
func (r *replica) blocks() (counts []int) {
	for i := range r.tensors {
		counts = append(counts, r.tensors[i].blocks())
	}
	return counts
}

// parallel runs work items on all processors, until one fails or ctx ends. counts[i] items are (i, 0), (i, 1) and so
// on.
func parallel(
	ctx context.Context, counts []int, tick func(done, total int), work func(c *coder, i, j int) error,
) error {
	return spread(ctx, gort.GOMAXPROCS(0), runs(counts, nil), tick, work)
}

// run is a sequence of blocks of a tensor.
type run struct {
	tensor   int // its index
	from, to int // blocks
}

// sequential is memory whose blocks are read or written in order, by one goroutine.
type sequential interface{ Sequential() }

// runs returns the blocks of tensors as runs of one block each, or of all blocks of a tensor in sequential memory.
func runs(counts []int, tensors []Tensor) (all []run) {
	for i, n := range counts {
		step := 1
		if i < len(tensors) {
			if _, ok := tensors[i].Memory.(sequential); ok {
				step = max(n, 1)
			}
		}
		for from := 0; from < n; from += step {
			all = append(all, run{i, from, from + step})
		}
	}
	return all
}

// spread processes runs with at most this many workers. It reports blocks to tick.
func spread(
	ctx context.Context, workers int, all []run, tick func(done, total int), work func(c *coder, i, j int) error,
) error {
	total := 0
	for _, r := range all {
		total += r.to - r.from
	}
	group, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	var telling sync.Mutex
	done := 0
	blocks := func(c *coder, r run) error {
		for j := r.from; j < r.to; j++ {
			if err := cmp.Or(context.Cause(ctx), context.Cause(group)); err != nil {
				return err
			}
			if err := work(c, r.tensor, j); err != nil {
				return err
			}
			if tick != nil {
				telling.Lock()
				done++
				tick(done, total)
				telling.Unlock()
			}
		}
		return nil
	}
	for range min(workers, len(all)) {
		wg.Go(func() {
			c := coders.Get().(*coder)
			defer coders.Put(c)
			for i := next.Add(1) - 1; i < int64(len(all)); i = next.Add(1) - 1 {
				if err := blocks(c, all[i]); err != nil {
					fail(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(group)
}

// load returns the location of a block: in place, or a copy in buf, which store writes back.
func (r *replica) load(tensor, block int, buf *[]byte) (p place, direct bool, err error) {
	if err := r.hook.step(); err != nil {
		return p, false, err
	}
	t := &r.tensors[tensor]
	if p, err = t.place(); err != nil {
		return p, false, fmt.Errorf("delta: tensor %q: %w", t.Name, err)
	}
	if p.rt != nil {
		from, _ := t.bounds(block)
		p.addr += uintptr(from)
		return p, true, nil
	}
	if err := t.read(block, buf); err != nil {
		return p, false, err
	}
	return hostPlace(*buf), false, nil
}

// read copies a block into buf.
func (t *Tensor) read(block int, buf *[]byte) error {
	from, to := t.bounds(block)
	*buf = grown(*buf, to-from)
	if n, err := t.Memory.ReadAt(*buf, int64(from)); n < to-from {
		return fmt.Errorf("delta: read tensor %q: %w", t.Name, cmp.Or(err, io.ErrUnexpectedEOF))
	}
	return nil
}

func (r *replica) store(tensor, block int, data []byte) error {
	t := &r.tensors[tensor]
	from, _ := t.bounds(block)
	if _, err := t.Memory.WriteAt(data, int64(from)); err != nil {
		return fmt.Errorf("delta: write tensor %q: %w", t.Name, err)
	}
	return nil
}

// digest returns a hash of layout and content.
func (r *replica) digest() uint32 {
	var sums []byte
	for _, s := range r.sums {
		sum := sumOf(s)
		sums = append(sums, byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24))
	}
	return crc32.Update(crc32.Checksum(appendLayout(nil, r.tensors), castagnoli), castagnoli, sums)
}

// bytes returns the total size of all tensors.
func (r *replica) bytes() (total int) {
	for _, t := range r.tensors {
		total += t.elements * t.DType.Size()
	}
	return total
}

// copied returns a copy with separate checksums and, if requested, separate Go memory.
func (r *replica) copied(memory bool) (to *replica, err error) {
	to = &replica{
		version: r.version,
		tensors: slices.Clone(r.tensors),
		hook:    r.hook,
	}
	for i, sums := range r.sums {
		to.sums = append(to.sums, slices.Clone(sums))
		if t := &to.tensors[i]; memory && err == nil {
			b := make(Host, t.elements*t.DType.Size())
			if len(b) > 0 {
				_, err = t.Memory.ReadAt(b, 0)
			}
			t.Memory = b
		}
	}
	return to, err
}

// sameLayout reports whether the tensors of both have the same layout.
func (r *replica) sameLayout(target *replica) bool {
	return slices.EqualFunc(r.tensors, target.tensors, func(a, b Tensor) bool {
		return a.like(&b)
	})
}

// minimumCode returns the minimum length of the code of a new tensor's block, so that no message makes a receiver
// allocate more than 1024 times its length.
func minimumCode(bytes int) int { return bytes / 1024 }

// errTooLong means that a delta would be longer than allowed.
var errTooLong = errors.New("delta: longer than another one")

// diff returns the delta from r to next, and computes the checksums of next's blocks. From version 0 it is a full
// copy. It fails with errTooLong once codes are longer than limit.
func diff(
	ctx context.Context,
	r, next *replica,
	small bool,
	limit int,
	tick func(done, total int),
) (*Delta, error) {
	d := &Delta{Base: r.version, Target: next.version}
	if r.version != 0 {
		d.digest = r.digest()
	}
	source := r
	from := r.counterparts(next.tensors)
	if r.version == 0 || !r.sameLayout(next) {
		var err error
		if small && r.version != 0 {
			source, err = d.packLayout(ctx, r, next, from)
		} else {
			d.listLayout(next)
		}
		if err != nil {
			return nil, err
		}
	}
	codes := make([][][]byte, len(next.tensors))
	for i := range next.tensors {
		codes[i] = make([][]byte, next.tensors[i].blocks())
		d.weights += uint64(next.tensors[i].elements)
	}
	var coded atomic.Int64
	work := func(c *coder, t, b int) error {
		code, err := source.diffBlock(c, next, from[t], t, b, small)
		if err != nil {
			return err
		}
		codes[t][b] = code
		if coded.Add(int64(len(code))) > int64(limit) {
			return errTooLong
		}
		return nil
	}
	if err := spread(ctx, gort.GOMAXPROCS(0), runs(next.blocks(), next.tensors), tick, work); err != nil {
		return nil, err
	}
	for t, blocks := range codes {
		c := change{tensor: t, sum: sumOf(next.sums[t])}
		for b, code := range blocks {
			if code != nil {
				c.blocks = append(c.blocks, block{b, code})
			}
		}
		if c.blocks != nil {
			d.tensors = append(d.tensors, c)
		}
	}
	return d, nil
}

// listLayout stores the layout of next's tensors in d.
func (d *Delta) listLayout(next *replica) {
	d.layout = []Tensor{}
	for _, t := range next.tensors {
		t.Memory = nil
		d.layout = append(d.layout, t)
	}
}

// diffBlock returns the code of a block of next, nil if nothing in it has changed, and computes its checksum. from is
// the index of the tensor in r, or -1 for a new tensor, whose blocks are coded as changes from zeros.
func (r *replica) diffBlock(c *coder, next *replica, from, tensor, block int, small bool) ([]byte, error) {
	t := &next.tensors[tensor]
	bytes := t.length(block)
	elements := bytes / t.DType.Size()
	now, _, err := next.load(tensor, block, &c.new)
	if err != nil {
		return nil, err
	}
	if from < 0 {
		code, sum, err := c.encodeFull(now, t.DType, elements)
		if code != nil || err != nil {
			next.sums[tensor][block] = sum
			return code, err
		}
	}
	var old place // zero for a new tensor
	var sum uint32
	shortest := 0 // bytes
	if from >= 0 {
		old, _, err = r.load(from, block, &c.old)
		sum = r.sums[from][block]
	} else {
		sum = sumOfZeros(bytes)
		shortest = minimumCode(bytes)
	}
	if err != nil {
		return nil, err
	}
	if old.rt != now.rt && old.rt != nil {
		err := errors.Join(old.fetch(bytes, &c.old), now.fetch(bytes, &c.new))
		if err != nil {
			return nil, err
		}
	}
	sum, err = c.compare(old, now, t.DType, elements, sum)
	next.sums[tensor][block] = sum
	if err != nil {
		return nil, err
	}
	if len(c.idx) == 0 && from >= 0 {
		return nil, nil
	}
	return c.encode(nil, old, now, t.DType, elements, shortest, small && from >= 0)
}

// Diff returns the delta from the tensors of a base, version 1, to those of a target, version 2, in any order. It
// reports progress to tick, unless that is nil. It makes shorter deltas than publishers, by 0.3 bytes for each changed
// weight, but more slowly.
func Diff(ctx context.Context, base, target []Tensor, tick func(done, total int)) (*Delta, error) {
	from, err := newReplica(1, base)
	if err != nil {
		return nil, err
	}
	to, err := newReplica(2, target)
	if err != nil {
		return nil, err
	}
	first, second := halves(tick)
	if err := from.measure(ctx, first); err != nil {
		return nil, err
	}
	return diff(ctx, from, to, true, math.MaxInt, second)
}

// halves returns the callbacks for the first and the second half of some work.
func halves(tick func(done, total int)) (first, second func(done, total int)) {
	if tick == nil {
		return nil, nil
	}
	first = func(done, total int) { tick(done, 2*total) }
	second = func(done, total int) { tick(total+done, 2*total) }
	return first, second
}

// Apply makes the tensors of the delta's target from those of its base, each in the memory that target returns for it.
// Other base tensors are a [VersionError]. The base is only read, so the target needs separate memory. Apply reports
// progress to tick, unless that is nil. It reads the base once, and needs memory for a few blocks. After an error, the
// target's content is undefined.
func (d *Delta) Apply(
	ctx context.Context, base []Tensor, target func(Tensor) (Memory, error), tick func(done, total int),
) error {
	r, err := newReplica(d.Base, base)
	if err != nil {
		return err
	}
	m := &making{
		base:   r,
		source: r,
		next:   &replica{version: d.Target},
	}
	if err := m.place(d, target); err != nil {
		if errors.Is(err, ErrDelta) && r.measure(ctx, nil) == nil { // the base may be wrong
			err = cmp.Or(d.checkBase(r), err)
		}
		return err
	}
	if err := spread(ctx, m.workers(), runs(m.counts(), m.next.tensors), tick, m.block); err != nil {
		return err
	}
	if err := d.checkBase(r); err != nil { // checked first: a wrong base may be the cause
		return err
	}
	if m.err != nil {
		return m.err
	}
	return d.checkSums(m.next)
}

// making is the state of Apply, which reads and checks the base while it makes the target.
type making struct {
	base   *replica   // the given tensors
	source *replica   // the base, plus one tensor for each origin
	next   *replica   // the tensors to make
	from   []int      // index in source of each tensor of next; -1: it is new
	codes  [][][]byte // by tensor of next and block; nil: unchanged
	unread []int      // tensors of the base without a counterpart, which are only checked

	mu  sync.Mutex // guards err; nothing is called under it
	err error      // a code does not fit its block, possibly because the base is wrong; guarded by mu
}

// place gets memory for all tensors.
func (m *making) place(d *Delta, target func(Tensor) (Memory, error)) error {
	layout, blocks, err := m.layout(d)
	if err != nil {
		return err
	}
	m.next.tensors = slices.Clone(layout)
	read := make([]bool, len(m.source.tensors))
	for i := range m.next.tensors {
		t := &m.next.tensors[i]
		switch from := m.from[i]; {
		case from >= 0:
			read[from] = true
		case blocks[i] != t.blocks():
			return errDamaged
		}
		if t.Memory, err = target(*t); err != nil {
			return fmt.Errorf("delta: tensor %q: %w", t.Name, err)
		}
		m.next.sums = append(m.next.sums, make([]uint32, t.blocks()))
		m.codes = append(m.codes, make([][]byte, t.blocks()))
	}
	for i := range m.base.tensors {
		if !read[i] {
			m.unread = append(m.unread, i)
		}
	}
	for _, c := range d.tensors {
		for _, b := range c.blocks {
			m.codes[c.tensor][b.index] = b.code
		}
	}
	return separate(m.next.tensors, m.base.tensors)
}

// layout returns the layout of the target, and the number of coded blocks of each tensor.
func (m *making) layout(d *Delta) (layout []Tensor, blocks []int, err error) {
	if d.packed != nil {
		layout, m.from, m.source, err = d.unpackLayout(m.base)
	} else {
		layout = d.layout
		if layout == nil {
			layout = m.base.tensors
		}
		m.from = m.base.counterparts(layout)
	}
	if err != nil {
		return nil, nil, err
	}
	blocks, err = d.countBlocks(layout)
	return layout, blocks, err
}

// counts returns the numbers of blocks to make, by tensor, and of blocks to check only.
func (m *making) counts() []int {
	counts := m.next.blocks()
	for _, i := range m.unread {
		counts = append(counts, m.base.tensors[i].blocks())
	}
	return counts
}

// makingBytes is the approximate memory of a making, on any number of processors.
const makingBytes = 24 << 20

// workers returns how many blocks are made at once, so that they and the search structures of their elements need at
// most makingBytes.
func (m *making) workers() int {
	largest := 0
	for i := range m.next.tensors {
		if t := &m.next.tensors[i]; t.blocks() > 0 {
			largest = max(largest, t.length(0)+2*t.length(0)/t.DType.Size())
		}
	}
	return min(gort.GOMAXPROCS(0), makingBytes/max(largest, 1)+1)
}

// block makes a block, or checks one from which no other is made.
func (m *making) block(c *coder, i, b int) error {
	if made := len(m.next.tensors); i >= made {
		return m.base.measureBlock(c, m.unread[i-made], b)
	}
	if m.failed() { // it only remains to check the base
		if m.from[i] < 0 {
			return nil
		}
		return m.source.measureBlock(c, m.from[i], b)
	}
	err := m.source.make(c, m.next, i, m.from[i], b, m.codes[i][b])
	if !errors.Is(err, ErrDelta) {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = cmp.Or(m.err, err)
	return nil
}

// failed reports whether a code did not fit its block.
func (m *making) failed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err != nil
}

// checkBase checks that d applies to the version and the tensors of r.
func (d *Delta) checkBase(r *replica) error {
	if d.Base == 0 {
		return nil
	}
	if d.Base != r.version || r.lost != nil {
		return &VersionError{Have: r.version, Need: d.Base}
	}
	if d.digest != r.digest() {
		return &VersionError{
			Have:   r.version,
			Need:   d.Base,
			Differ: true,
		}
	}
	return nil
}

// targetLayout returns the tensors that d makes from those of r, and the number of coded blocks of each.
func (d *Delta) targetLayout(r *replica) (layout []Tensor, blocks []int, err error) {
	if d.packed != nil {
		return nil, nil, fmt.Errorf("%w: its tensors are made of others in other memory, by Apply alone", ErrDelta)
	}
	layout = d.layout
	if layout == nil {
		layout = r.tensors
	}
	blocks, err = d.countBlocks(layout)
	return layout, blocks, err
}

// countBlocks returns the number of blocks of each tensor whose code is long enough for a new tensor.
func (d *Delta) countBlocks(layout []Tensor) (blocks []int, err error) {
	blocks = make([]int, len(layout))
	for _, c := range d.tensors {
		if c.tensor >= len(layout) || len(c.blocks) == 0 ||
			c.blocks[len(c.blocks)-1].index >= layout[c.tensor].blocks() {
			return nil, errDamaged
		}
		for _, b := range c.blocks {
			if from, to := layout[c.tensor].bounds(b.index); len(b.code) >= minimumCode(to-from) {
				blocks[c.tensor]++
			}
		}
	}
	return blocks, nil
}

// checkSums checks that the tensors that change have the content from which d was made.
func (d *Delta) checkSums(next *replica) error {
	for _, c := range d.tensors {
		if sumOf(next.sums[c.tensor]) != c.sum {
			return fmt.Errorf("%w: tensor %q has another checksum", ErrDelta, next.tensors[c.tensor].Name)
		}
	}
	return nil
}

// make makes a block of a tensor of next, either from the tensor at index from of r, whose block it checks, or from
// zeros if from is -1.
func (r *replica) make(c *coder, next *replica, tensor, from, block int, code []byte) error {
	t := &next.tensors[tensor]
	bytes := t.length(block)
	var sum uint32
	if from >= 0 {
		if err := r.tensors[from].read(block, &c.new); err != nil {
			return err
		}
		sum = crc32.Checksum(c.new, castagnoli)
		r.sums[from][block] = sum
	} else {
		c.new = grown(c.new, bytes)
		clear(c.new)
		sum = sumOfZeros(bytes)
	}
	data := c.new
	if code != nil {
		var err error
		if sum, err = c.apply(code, hostPlace(data), t.DType, bytes/t.DType.Size(), sum, false); err != nil {
			return err
		}
	}
	next.sums[tensor][block] = sum
	return next.store(tensor, block, data)
}

// update is a delta that was checked against a replica. It is applied, and then committed or rolled back.
type update struct {
	replica   *replica // the replica to change
	next      *replica // the replica at the delta's version
	source    *replica // blocks are copied from it; nil: their codes are applied
	base      []int    // index in the replica of each tensor of next; -1: it is new
	allocated []Memory // for new tensors
	delta     *Delta   // the delta that was checked
	undos     [][]undo // by change and block
}

// undo is the information that restores a block.
type undo struct {
	touched bool   // the block may have changed
	saved   []byte // the former block; nil: differences are subtracted
}

// prepare checks a delta, and allocates new tensors. If source is not nil, blocks are copied from it. prepare changes
// no tensor.
func (r *replica) prepare(d *Delta, source *replica, alloc func(Tensor) (Memory, error)) (*update, error) {
	if err := d.checkBase(r); err != nil {
		return nil, err
	}
	u := &update{
		replica: r,
		source:  source,
		delta:   d,
		next:    &replica{version: d.Target, hook: r.hook},
	}
	if err := u.place(alloc); err != nil {
		u.free()
		return nil, err
	}
	for _, c := range d.tensors {
		u.undos = append(u.undos, make([]undo, len(c.blocks)))
	}
	return u, nil
}

// place finds or allocates the memory of all tensors, and checks the numbers of blocks.
func (u *update) place(alloc func(Tensor) (Memory, error)) error {
	layout, blocks, err := u.delta.targetLayout(u.replica)
	if err != nil {
		return err
	}
	u.next.tensors = slices.Clone(layout)
	u.base = make([]int, len(layout))
	for i := range layout {
		t := &u.next.tensors[i]
		base := find(u.replica.tensors, t)
		u.base[i] = base
		if base >= 0 && u.delta.Base != 0 {
			t.Memory = u.replica.tensors[base].Memory
			u.next.sums = append(u.next.sums, slices.Clone(u.replica.sums[base]))
			continue
		}
		if blocks[i] != t.blocks() {
			return errDamaged
		}
		u.next.sums = append(u.next.sums, make([]uint32, t.blocks()))
		if base >= 0 {
			t.Memory = u.replica.tensors[base].Memory
			continue
		}
		m, err := alloc(*t)
		if err != nil {
			return fmt.Errorf("delta: new tensor %q: %w", t.Name, err)
		}
		t.Memory = m
		u.allocated = append(u.allocated, m)
	}
	return separate(u.next.tensors, nil)
}

// apply changes the tensors in place, and saves the information for a rollback. It rolls back before it returns an
// error.
func (u *update) apply(ctx context.Context, tick func(done, total int)) error {
	err := parallel(ctx, u.delta.blocks(), tick, u.block)
	if err == nil {
		err = u.delta.checkSums(u.next)
	}
	if err == nil {
		err = u.replica.hook.step()
	}
	if err != nil {
		return errors.Join(err, u.rollback())
	}
	return nil
}

// block changes a block.
func (u *update) block(c *coder, i, b int) error {
	change := &u.delta.tensors[i]
	tensor := change.tensor
	index := change.blocks[b].index
	t := &u.next.tensors[tensor]
	p, direct, err := u.next.load(tensor, index, &c.new)
	if err != nil {
		return err
	}
	form := byte(formDense)
	if u.source == nil {
		form, err = c.decode(
			change.blocks[b].code,
			t.DType,
			t.length(index)/t.DType.Size(),
		)
		if err != nil {
			return err
		}
	}
	existed := u.base[tensor] >= 0
	overwritten := u.delta.Base == 0 || !existed
	undo := &u.undos[i][b]
	if existed && (overwritten || form == formSorted) {
		data, err := p.bytes(t.length(index), &c.old)
		if err != nil {
			return err
		}
		undo.saved = slices.Clone(data)
	}
	var from place
	if u.source != nil {
		from, err = u.source.copyable(c, tensor, index, p)
		if err != nil {
			return err
		}
	}

	// If an access to memory fails from here on, the content of the block is unknown.
	undo.touched = existed && direct
	sum := u.next.sums[tensor][index]
	if u.source != nil {
		sum = u.source.sums[tensor][index]
		err = from.copyTo(p, t.length(index))
	} else {
		sum, err = u.add(c, form, p, tensor, index, sum, overwritten)
	}
	if err != nil {
		return err
	}
	u.next.sums[tensor][index] = sum
	if err := u.next.hook.step(); err != nil {
		return err
	}
	if direct {
		return nil
	}
	undo.touched = existed
	return u.next.store(tensor, index, c.new)
}

// add adds the decoded code to a block, or to zeros, and returns the block's checksum.
func (u *update) add(c *coder, form byte, p place, tensor, block int, sum uint32, zeros bool) (uint32, error) {
	t := &u.next.tensors[tensor]
	bytes := t.length(block)
	if zeros && isFlat(form) {
		return crc32.Checksum(c.xor, castagnoli), p.rt.CopyIn(p.addr, c.xor)
	}
	if zeros {
		if err := p.rt.Fill(p.addr, bytes, dtype.U8, 0); err != nil {
			return 0, err
		}
		sum = sumOfZeros(bytes)
	}
	return c.add(form, p, t.DType, bytes/t.DType.Size(), sum, false)
}

// copyable returns a block, in the memory of p or of the host.
func (r *replica) copyable(c *coder, tensor, block int, p place) (place, error) {
	from, _, err := r.load(tensor, block, &c.old)
	if err == nil && from.rt != p.rt {
		err = from.fetch(r.tensors[tensor].length(block), &c.old)
	}
	return from, err
}

// copyTo copies a place to another, in the same memory or on the host.
func (p place) copyTo(to place, bytes int) error {
	defer gort.KeepAlive([2]any{p.keep, to.keep})
	if p.rt == to.rt {
		return to.rt.Copy(to.addr, p.addr, bytes)
	}
	return to.rt.CopyIn(to.addr, hostmem.Slice[byte](p.addr, bytes))
}

// rollback restores the tensors from before apply, and frees new ones. If it fails, the tensors have no version. A
// second rollback does nothing.
func (u *update) rollback() error {
	err := parallel(context.Background(), u.delta.blocks(), nil, func(c *coder, i, b int) error {
		undo := &u.undos[i][b]
		if !undo.touched {
			return nil
		}
		undo.touched = false
		change := &u.delta.tensors[i]
		return u.restore(c, change, &change.blocks[b], undo.saved)
	})
	u.free()
	if err != nil {
		u.replica.version = 0
		u.replica.lost = fmt.Errorf("delta: roll back: %w", err)
	}
	return err
}

// restore restores a block.
func (u *update) restore(c *coder, change *change, block *block, saved []byte) error {
	t := &u.next.tensors[change.tensor]
	p, direct, err := u.next.load(change.tensor, block.index, &c.new)
	if err != nil {
		return err
	}
	var sum uint32
	if saved != nil {
		sum = crc32.Checksum(saved, castagnoli)
		err = p.rt.CopyIn(p.addr, saved)
	} else {
		elements := t.length(block.index) / t.DType.Size()
		sum, err = c.apply(block.code, p, t.DType, elements, u.next.sums[change.tensor][block.index], true)
	}
	if err != nil {
		return err
	}
	if sum != u.replica.sums[u.base[change.tensor]][block.index] {
		return fmt.Errorf("tensor %q has another checksum than before", t.Name)
	}
	if direct {
		return nil
	}
	return u.next.store(change.tensor, block.index, c.new)
}

// free frees newly allocated memory.
func (u *update) free() {
	for _, m := range u.allocated {
		release(m)
	}
	u.allocated = nil
}

// commit sets the replica to the next version, and frees the subscriber's memory of tensors that are gone.
func (u *update) commit() {
	for _, t := range u.replica.tensors {
		if find(u.next.tensors, &t) < 0 {
			release(t.Memory)
		}
	}
	*u.replica = *u.next
}
