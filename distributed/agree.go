package distributed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// termsBytes is the most that terms take when they travel.
const termsBytes = 2 << 10

// module is this library's, whose version all ranks are to have.
const module = "github.com/tutti-go/tutti"

var version = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if m.Path == module {
			return m.Version
		}
	}
	return "unknown"
})

// terms are what all ranks of a step have to agree on, one to a line.
func (s *Sparse) terms(dt dtype.DType) string {
	lines := []string{"version " + version(), fmt.Sprintf("%d elements", s.n), dt.String(), s.scheduled()}
	cfg := reflect.ValueOf(s.cfg)
	for i := range cfg.NumField() {
		lines = append(lines, fmt.Sprintf("%s %v", cfg.Type().Field(i).Name, cfg.Field(i)))
	}
	return strings.Join(lines, "\n")
}

// scheduled says where in its schedule the next step is: where a step has failed on some
// ranks alone, the others are one ahead.
func (s *Sparse) scheduled() string {
	if s.cfg.Schedule.over(s.steps) {
		return "no schedule any more"
	}
	return fmt.Sprintf("step %d of the schedule", s.steps)
}

// agree compares terms between the ranks, once for each communicator: their hash,
// which is one element of each rank, and only if that differs themselves. An error
// is the same on every rank, and names the first difference to rank 0.
func (e *engine) agree(ctx context.Context, terms string) {
	if e.agreed || e.err != nil {
		return
	}
	h := fnv.New64a()
	h.Write([]byte(terms))
	hashes := e.exchange(ctx, h.Sum(nil), dtype.I64)
	if e.err == nil && slices.ContainsFunc(hashes, func(h []byte) bool { return !bytes.Equal(h, hashes[0]) }) {
		text := make([]byte, termsBytes)
		copy(text, terms)
		e.check(difference(e.exchange(ctx, text, dtype.U8)))
	}
	e.agreed = e.err == nil
}

// agree is that for all buckets, before the first step with a communicator.
func (g *GradientSync) agree(ctx context.Context) error {
	if g.agreed || g.meter.WorldSize() == 1 {
		return nil
	}
	e := g.handshake
	switch {
	case g.joint != nil:
		e = g.joint.engine
	case e == nil:
		var err error
		if e, err = newEngine(g.rt, nil, g.meter, 0, Config{}); err != nil {
			return errors.Join(err, e.close())
		}
		g.handshake = e
	}
	e.agree(ctx, g.terms())
	g.agreed = e.agreed
	g.before = g.meter.Totals() // what the step sends comes now
	if err := e.failure(); err != nil {
		return err
	}
	return g.endHandshake()
}

// endHandshake gives back what plain buckets have needed to agree.
func (g *GradientSync) endHandshake() error {
	if g.handshake == nil {
		return nil
	}
	err := g.handshake.close()
	if err == nil {
		g.handshake = nil
	}
	return err
}

// terms are those of all buckets. What does not fit is in the hash alone.
func (g *GradientSync) terms() string {
	terms := fmt.Sprintf("version %s\n%d gradients\n%v, uneven %v, rebuild %v, views %v",
		version(), len(g.lens), g.op, g.cfg.Uneven, g.cfg.Rebuild && g.steps == 0, g.cfg.BucketViews)
	h := fnv.New64a()
	fmt.Fprintln(h, g.lens)
	for i, b := range g.buckets {
		terms += fmt.Sprintf("\nbucket %d: %d of %v as %v, %s, density %v", i, b.bytes/b.dt.Size(), b.dt, b.wire, b.cfg.Pattern, b.cfg.Density)
		if b.sparse != nil {
			terms += ", " + b.sparse.scheduled()
		}
		fmt.Fprintf(h, "%v %+v\n", b.params, b.cfg)
	}
	if g.joint != nil {
		terms += fmt.Sprintf("\n%+v", g.joint.cfg)
	}
	h.Write([]byte(terms))
	return fmt.Sprintf("%.*s\nhash %x", termsBytes-32, terms, h.Sum64())
}

// exchange has every rank know every rank's bytes, which are elements of a type.
func (e *engine) exchange(ctx context.Context, mine []byte, dt dtype.DType) [][]byte {
	size := len(mine)
	var memory buffer
	e.allocate(&memory, (e.size+1)*size)
	if e.err == nil {
		e.check(e.rt.CopyIn(memory.ptr, mine))
	}
	first := memory.ptr + uintptr(size)
	e.communicate(ctx, comm.AllGatherCall(memory.ptr, first, size/dt.Size(), dt))
	if e.err == nil {
		e.check(e.order.hostAfterAll(ctx))
	}
	all := make([]byte, e.size*size)
	if e.err == nil {
		e.check(e.rt.CopyOut(all, first))
		e.release(len(e.buffers) - 1) // after an error, somebody may still write it
	}
	return slices.Collect(slices.Chunk(all, size))
}

// difference names what the first rank that differs from rank 0 has.
func difference(texts [][]byte) error {
	if len(texts) == 0 {
		return nil
	}
	lines := func(rank int) []string {
		return strings.Split(string(bytes.TrimRight(texts[rank], "\x00")), "\n")
	}
	zero := lines(0)
	for rank := range texts {
		other := lines(rank)
		for i := range max(len(zero), len(other)) {
			line := func(of []string) string {
				if i < len(of) {
					return of[i]
				}
				return "nothing"
			}
			if a, b := line(zero), line(other); a != b {
				return fmt.Errorf("%w: rank 0 has %q, rank %d has %q", comm.ErrMismatch, a, rank, b)
			}
		}
	}
	return fmt.Errorf("%w: the ranks' configurations differ", comm.ErrMismatch)
}
