package commtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
)

// guard is the number of bytes kept before and behind every buffer, filled
// with poison: who writes beyond its buffer is found out.
const guard = 64

// poisonBlock is what buffers hold that nobody has written.
var poisonBlock = reference.Payload(4093, 0xdead)

// label names a call in messages; it is only formatted when there is one.
type label struct {
	call    string
	dt      dtype.DType
	op      comm.ReduceOp
	count   int
	root    int
	variant string
}

// plain is the label of a call without a reduction or a root.
func plain(call, variant string, count int, dt dtype.DType) label {
	return label{
		call:    call,
		variant: variant,
		count:   count,
		dt:      dt,
		root:    noRoot,
		op:      noOp,
	}
}

// noOp and noRoot mark a label without a reduction or a root.
const (
	noOp   = comm.ReduceOp(255)
	noRoot = -1
)

func (l label) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s of %d %v", l.call, l.count, l.dt)
	if l.op != noOp {
		fmt.Fprintf(&b, ", %v", l.op)
	}
	if l.root != noRoot {
		fmt.Fprintf(&b, ", root %d", l.root)
	}
	if l.variant != "" {
		fmt.Fprintf(&b, ", %s", l.variant)
	}
	return b.String()
}

// batch is a list of operations that are submitted one after the other, waited
// for once, and then verified: each output against what it must hold, each
// input and everything around the buffers against what it held before.
type batch struct {
	p      *probe
	c      comm.Communicator
	steps  []step
	views  []view
	digest []byte
}

// step is one submission: a call, or several as a group.
type step struct {
	label label
	calls []comm.Call
}

func (s step) submit(c comm.Communicator) error {
	var err error
	if len(s.calls) == 1 {
		err = s.calls[0].Make(c)
	} else {
		err = c.Group(s.calls...)
	}
	if err != nil {
		return fmt.Errorf("%v: %w", s.label, err)
	}
	return nil
}

// view is a buffer and what must be in it afterwards.
type view struct {
	label label
	ptr   uintptr
	front int // guard bytes before ptr
	bytes int
	check func(got []byte) error
	// identical says that the content must be the same bits on every rank.
	identical bool
}

// batch starts a list of operations on c.
func (p *probe) batch(c comm.Communicator) *batch { return &batch{p: p, c: c} }

// input makes a buffer with the given content, which must not change.
func (b *batch) input(l label, content []byte) uintptr {
	return b.buffer(
		l,
		content,
		len(content),
		func(got []byte) error {
			if !bytes.Equal(got, content) {
				return fmt.Errorf("input has changed: %w", diff(got, content, l.dt))
			}
			return nil
		},
		false,
	)
}

// output makes a buffer of n bytes that nobody has written yet.
func (b *batch) output(l label, n int, check func(got []byte) error) uintptr {
	return b.buffer(l, nil, n, check, false)
}

// untouched makes a buffer that the operation has no business with.
func (b *batch) untouched(l label, n int) uintptr {
	return b.input(l, poison(n))
}

// unused is the address for a buffer that only the root uses: nil, or memory
// that must stay as it is.
func (b *batch) unused(l label, n int) uintptr {
	if l.count%2 == 0 {
		return 0
	}
	return b.untouched(l, n)
}

// want returns the check for exactly these bytes.
func want(content []byte, dt dtype.DType) func([]byte) error {
	return func(got []byte) error { return diff(got, content, dt) }
}

// diff returns an error if two encoded arrays differ.
func diff(got, want []byte, dt dtype.DType) error {
	wrong, err := reference.Differences(got, want, dt.Size())
	if err != nil {
		err = fmt.Errorf("%w (%d of %d elements differ)", err, wrong, len(want)/dt.Size())
	}
	return err
}

// buffer makes a guarded buffer of n bytes that starts with content and is
// verified when the batch ends. Buffers start at changing distances from the
// allocator's alignment, as slices of larger tensors do.
func (b *batch) buffer(l label, content []byte, n int, check func([]byte) error, identical bool) uintptr {
	front := guard + len(b.views)%4*l.dt.Size()
	base := b.p.alloc(b.p.image(front, content, n))
	b.views = append(b.views, view{
		label:     l,
		ptr:       base + uintptr(front),
		front:     front,
		bytes:     n,
		check:     check,
		identical: identical,
	})
	return base + uintptr(front)
}

// call adds a call, or several as a group.
func (b *batch) call(l label, calls ...comm.Call) {
	b.steps = append(b.steps, step{l, calls})
}

// run submits everything, waits once, and verifies.
func (b *batch) run() {
	b.submit()
	b.p.must(b.c.Sync(b.p.ctx))
	b.verify()
}

// submit submits everything.
func (b *batch) submit() {
	b.p.awaitCopies()
	for _, s := range b.steps {
		b.p.must(s.submit(b.c))
	}
	b.steps = nil
}

// verify checks all buffers and gives them back.
func (b *batch) verify() {
	for _, v := range b.views {
		base := v.ptr - uintptr(v.front)
		total := v.front + v.bytes + guard
		unwritten := poison(total)
		image := b.p.scratch[:total]
		b.p.must(b.p.rt.CopyOut(image, base))
		got := image[v.front : v.front+v.bytes]
		if err := v.check(got); err != nil {
			b.p.errorf("%v: %w", v.label, err)
		}
		if !bytes.Equal(image[:v.front], unwritten[:v.front]) {
			b.p.errorf("%v: wrote before its buffer", v.label)
		}
		if tail := v.front + v.bytes; !bytes.Equal(image[tail:], unwritten[tail:]) {
			b.p.errorf("%v: wrote behind its buffer", v.label)
		}
		if v.identical {
			sum := crc32.Checksum(got, castagnoli)
			b.digest = binary.LittleEndian.AppendUint32(b.digest, sum)
		}
		b.p.free(base)
	}
	b.compareDigests()
	b.views = b.views[:0]
	b.digest = b.digest[:0]
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// compareDigests checks that results marked so are bit-identical on all ranks.
func (b *batch) compareDigests() {
	if len(b.digest) == 0 {
		return
	}
	all := b.p.exchange(b.c, b.digest)
	for r, digest := range all {
		if bytes.Equal(digest, b.digest) {
			continue
		}
		n := -1
		for _, v := range b.views {
			if !v.identical {
				continue
			}
			n++
			if !bytes.Equal(digest[4*n:4*n+4], b.digest[4*n:4*n+4]) {
				b.p.errorf("%v: result differs in bits from rank %d's", v.label, r)
			}
		}
	}
}
