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
	Name   string      // of no other tensor of the set
	DType  dtype.DType // of the elements
	Shape  []int       // sizes, the slowest dimension first; nil for a scalar
	Memory Memory      // where the elements lie

	elements int // their number, by Shape
}

// Memory holds the bytes of a tensor from offset 0 on. Several goroutines read and write it, not the same bytes. Where
// it has a method Sequential(), Diff reads it as a target, and Apply writes it, from its beginning to its end.
type Memory interface {
	io.ReaderAt
	io.WriterAt
}

// Of returns a tensor in the memory of a runtime, with a name. Tensors that are not contiguous are
// refused ([runtime.ErrShape]): Contiguous makes a copy.
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

// Runtime returns the tensor of a runtime in whose memory t lies; nil if it is other memory.
func (t Tensor) Runtime() *runtime.Tensor {
	d, _ := t.Memory.(device)
	return d.Tensor
}

// Host is memory of a Go slice.
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

// place returns where a tensor is. Kernels reach memory of the host and of GPUs.
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
	version uint64     // 0 if the tensors are of none
	tensors []Tensor   // by name
	sums    [][]uint32 // of their blocks
	lost    error      // why the tensors are of no version
	hook    hook       // called at each stage of an update; nil outside tests
}

// hook is called before each access to memory, and each message, where tests make them fail.
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

// memorySpan is where a tensor lies.
type memorySpan struct {
	name     string  // the tensor's
	from, to uintptr // first address, and the one behind the last
	written  bool    // an update changes it
}

// separate refuses tensors to be written that share memory with each other, or with tensors that are only read.
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

// measure takes the checksums of all blocks.
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

// blocks returns how many blocks each tensor has.
func (r *replica) blocks() (counts []int) {
	for i := range r.tensors {
		counts = append(counts, r.tensors[i].blocks())
	}
	return counts
}

// parallel does pieces of work, of which counts[i] are (i, 0), (i, 1) and so on, on all processors, until one fails
// or ctx ends.
func parallel(
	ctx context.Context, counts []int, tick func(done, total int), work func(c *coder, i, j int) error,
) error {
	return spread(ctx, gort.GOMAXPROCS(0), runs(counts, nil), tick, work)
}

// run is of blocks of a tensor, one after the other.
type run struct {
	tensor   int // its index
	from, to int // blocks
}

// sequential is memory of which blocks are read or written in their order, by one goroutine.
type sequential interface{ Sequential() }

// runs returns the blocks of tensors, one by one, or all of a tensor in sequential memory.
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

// spread does runs with that many workers at most. tick is told of blocks.
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

// load returns where a block is: in place, or a copy in buf, which store writes back.
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

// digest identifies layout and content.
func (r *replica) digest() uint32 {
	var sums []byte
	for _, s := range r.sums {
		sum := sumOf(s)
		sums = append(sums, byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24))
	}
	return crc32.Update(crc32.Checksum(appendLayout(nil, r.tensors), castagnoli), castagnoli, sums)
}

// bytes returns the size of all tensors.
func (r *replica) bytes() (total int) {
	for _, t := range r.tensors {
		total += t.elements * t.DType.Size()
	}
	return total
}

// copied returns a copy, with other checksums; if asked for, with memory of Go.
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

// sameLayout reports whether the tensors of both are like each other.
func (r *replica) sameLayout(target *replica) bool {
	return slices.EqualFunc(r.tensors, target.tensors, func(a, b Tensor) bool {
		return a.like(&b)
	})
}

// minimumCode returns how short the code of a block of a new tensor may be, so that no message makes
// a receiver allocate more than 1024 times its length.
func minimumCode(bytes int) int { return bytes / 1024 }

// errTooLong means that a delta would take more bytes than allowed.
var errTooLong = errors.New("delta: longer than another one")

// diff returns the delta from r to next, of whose blocks it takes the checksums. From version 0 it is a full copy. It
// fails with errTooLong as soon as codes are longer than limit.
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

// listLayout sets the layout of d to the tensors of next.
func (d *Delta) listLayout(next *replica) {
	d.layout = []Tensor{}
	for _, t := range next.tensors {
		t.Memory = nil
		d.layout = append(d.layout, t)
	}
}

// diffBlock returns the code of a block of next, nil if nothing in it has changed, and takes its checksum. from is the
// index of the tensor in r, -1 for a new one, whose blocks are coded as changes of zeros.
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

// Diff returns the delta from the tensors of a base, version 1, to those of a target, version 2, in any order. tick, if
// not nil, is told of progress. It makes shorter deltas than publishers, with which fewer go into a second: 0.3 bytes
// less a changed weight.
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

// halves returns what to call in the first half of a work, and in the second.
func halves(tick func(done, total int)) (first, second func(done, total int)) {
	if tick == nil {
		return nil, nil
	}
	first = func(done, total int) { tick(done, 2*total) }
	second = func(done, total int) { tick(total+done, 2*total) }
	return first, second
}

// Apply makes the tensors of the delta's target, each in the memory that target returns for it, from the tensors of
// the delta's base: a [VersionError] if they are others. The base is only read, so the target needs other memory.
// tick, if not nil, is told of progress. It reads the base once, and takes memory for a few blocks. After an error,
// the target's content is unusable.
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
		if errors.Is(err, ErrDelta) && r.measure(ctx, nil) == nil { // the base may be another
			err = cmp.Or(d.checkBase(r), err)
		}
		return err
	}
	if err := spread(ctx, m.workers(), runs(m.counts(), m.next.tensors), tick, m.block); err != nil {
		return err
	}
	if err := d.checkBase(r); err != nil { // before what it may be the reason of
		return err
	}
	if m.err != nil {
		return m.err
	}
	return d.checkSums(m.next)
}

// making is the making of tensors of others, which are read and measured at once.
type making struct {
	base   *replica   // of which the tensors are made
	source *replica   // the base, with a tensor more for each origin
	next   *replica   // what is made
	from   []int      // by tensor of next: the one of source; -1: it is new
	codes  [][][]byte // by tensor of next and block; nil: nothing changes
	unread []int      // tensors of the base that have no counterpart, of which checksums are all that is needed

	mu  sync.Mutex // guards err; nothing is called under it
	err error      // why a code is none of these blocks, which may be those of another base; guarded by mu
}

// place gets the memory of all tensors.
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

// layout returns the layout of the target, and of each tensor how many blocks have codes.
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

// counts returns the blocks to be made, by tensor, and those to be measured only.
func (m *making) counts() []int {
	counts := m.next.blocks()
	for _, i := range m.unread {
		counts = append(counts, m.base.tensors[i].blocks())
	}
	return counts
}

// makingBytes is about how much memory a making takes, on any number of processors.
const makingBytes = 24 << 20

// workers returns how many blocks are made at once, so that they and what finds their elements are no more than
// makingBytes.
func (m *making) workers() int {
	largest := 0
	for i := range m.next.tensors {
		if t := &m.next.tensors[i]; t.blocks() > 0 {
			largest = max(largest, t.length(0)+2*t.length(0)/t.DType.Size())
		}
	}
	return min(gort.GOMAXPROCS(0), makingBytes/max(largest, 1)+1)
}

// block makes a block, or measures one that no other is made of.
func (m *making) block(c *coder, i, b int) error {
	if made := len(m.next.tensors); i >= made {
		return m.base.measureBlock(c, m.unread[i-made], b)
	}
	if m.failed() { // what is left is whether the base is another
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

// failed reports whether a code was none of its block.
func (m *making) failed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err != nil
}

// checkBase checks that d is for the version and the tensors of r.
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

// targetLayout returns the tensors that d makes of those of r, and of each how many blocks have codes.
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

// countBlocks returns how many blocks of each tensor have a code that is not too short for a new tensor.
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

// checkSums checks that the tensors that change have become those that d was made of.
func (d *Delta) checkSums(next *replica) error {
	for _, c := range d.tensors {
		if sumOf(next.sums[c.tensor]) != c.sum {
			return fmt.Errorf("%w: tensor %q has another checksum", ErrDelta, next.tensors[c.tensor].Name)
		}
	}
	return nil
}

// make makes a block of a tensor of next, from the one at index from of r, which it measures, or from zeros if from is
// -1.
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
	replica   *replica // which it changes
	next      *replica // the replica at the delta's version
	source    *replica // blocks are copied from it; nil: their codes are applied
	base      []int    // the index in the replica of each tensor of next; -1: it is new
	allocated []Memory // for new tensors
	delta     *Delta   // that was checked against it
	undos     [][]undo // by change and block
}

// undo is what takes a block back.
type undo struct {
	touched bool   // the block may have changed
	saved   []byte // the block before; nil: differences are subtracted
}

// prepare checks a delta, or one whose blocks are those of source if it is not nil, and allocates new tensors. It
// changes no tensor.
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

// place finds or allocates the memory of all tensors, and checks which blocks there are.
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

// apply changes the tensors in place, and keeps what it takes to roll back. After an error it has rolled back.
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

	// If an access to memory fails from here on, nobody knows what the block is.
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

// add adds the code that was decoded to a block, or to zeros, and returns its checksum.
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

// copyable returns a block in the memory of p, or of the host.
func (r *replica) copyable(c *coder, tensor, block int, p place) (place, error) {
	from, _, err := r.load(tensor, block, &c.old)
	if err == nil && from.rt != p.rt {
		err = from.fetch(r.tensors[tensor].length(block), &c.old)
	}
	return from, err
}

// copyTo copies a place of the same memory, or of the host.
func (p place) copyTo(to place, bytes int) error {
	defer gort.KeepAlive([2]any{p.keep, to.keep})
	if p.rt == to.rt {
		return to.rt.Copy(to.addr, p.addr, bytes)
	}
	return to.rt.CopyIn(to.addr, hostmem.Slice[byte](p.addr, bytes))
}

// rollback makes the tensors what they were before apply, and frees what was allocated. If it fails, they are of no
// version. To roll back again does nothing.
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

// restore makes a block what it was.
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

// free frees what was allocated.
func (u *update) free() {
	for _, m := range u.allocated {
		release(m)
	}
	u.allocated = nil
}

// commit makes the replica the next version, and frees what a subscriber has allocated for tensors that are gone.
func (u *update) commit() {
	for _, t := range u.replica.tensors {
		if find(u.next.tensors, &t) < 0 {
			release(t.Memory)
		}
	}
	*u.replica = *u.next
}
