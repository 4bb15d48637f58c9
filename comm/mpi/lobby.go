package mpi

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// lobby is MPI_COMM_WORLD as the place where ranks without native collectives meet before
// they duplicate it, which hangs, or fails in strange ways, when a rank with them stays
// away. They do so by the messages of a dissemination barrier (Hensgen, Finkel and Manber,
// "Two algorithms for barrier synchronization", 1988), with a tag that nobody else uses. A
// rank with native collectives begins nothing that other programs would not expect: it only
// looks for such a greeting, and answers it. The rank that gets the answer tells all.
type lobby struct {
	lib        *library
	rank, size int
	tag        int
	table      requests // of greetings that are being sent,
	owner      op       // whose messages they are,
	memory     uintptr  // and where they lie
	said       int
}

// greeting is the message: its writer, and a rank with native collectives, noRank as long
// as none is known, and one without them.
type greeting struct{ from, native, other int32 }

const noRank = -1

var greetingBytes = len(hostmem.Bytes(make([]greeting, 1)))

// lobby returns the lobby, nil if the library has no tag that is not for users.
func (s *state) lobby() (*lobby, error) {
	if s.tagLimit <= comm.MaxTag {
		return nil, nil
	}
	lib := s.lib
	if err := lib.must(lib.CommSetErrhandler, lib.handles.world, lib.handles.errorsReturn); err != nil {
		return nil, err
	}
	rank, size, err := lib.place(lib.handles.world)
	if err != nil {
		return nil, err
	}
	table := requests{rank: rank, calls: dl.NewSequence(), handleSize: lib.abi.handleSize, statusSize: lib.abi.statusSize}
	return &lobby{lib: lib, rank: rank, size: size, tag: s.tagLimit, table: table}, nil
}

// meet returns when all ranks are here without native collectives.
func (l *lobby) meet(ctx context.Context) error {
	if l == nil {
		return nil
	}
	heard := make(map[int]bool)
	for step := 1; step < l.size; step *= 2 {
		if err := l.send((l.rank+step)%l.size, greeting{int32(l.rank), noRank, int32(l.rank)}); err != nil {
			return err
		}
		from := (l.rank - step + l.size) % l.size
		for pace := (pause{}); !heard[from]; pace.next() {
			g, err := l.read()
			switch {
			case err != nil:
				return err
			case g != nil && g.native != noRank:
				return l.tell(ctx, g)
			case g != nil:
				heard[int(g.from)] = true
			case ctx.Err() != nil:
				return fmt.Errorf("nothing from rank %d: %w", from, comm.ContextError(ctx))
			}
		}
	}
	if err := l.deliver(ctx); err != nil {
		return err
	}
	l.release()
	return nil
}

// tell passes on what a rank with native collectives has told, and returns it as an error.
func (l *lobby) tell(ctx context.Context, g *greeting) error {
	if g.from == g.native { // otherwise all are being told
		for r := range l.size {
			if r == l.rank || r == int(g.native) {
				continue
			}
			if err := l.send(r, greeting{int32(l.rank), g.native, g.other}); err != nil {
				return err
			}
		}
		l.deliverSoon(ctx)
	}
	return g.disagreement()
}

// watch is for a rank with native collectives: it returns an error if one without them has
// come.
func (l *lobby) watch() error {
	if l == nil {
		return nil
	}
	g, err := l.read()
	if g == nil || err != nil {
		return err
	}
	if g.native == noRank {
		g = &greeting{int32(l.rank), int32(l.rank), g.from}
		if err := l.send(int(g.other), *g); err != nil {
			return err
		}
		l.deliverSoon(context.Background())
	}
	return g.disagreement()
}

func (g *greeting) disagreement() error {
	return fmt.Errorf("%w: rank %d works with native collectives and rank %d without; set %s=%s, or mpi.WithNativeCollectives, on all ranks or on none",
		comm.ErrMismatch, g.native, g.other, CollectivesVariable, nativeCollectives)
}

// send starts sending a greeting.
func (l *lobby) send(dest int, g greeting) error {
	if l.memory == 0 {
		const steps = 32 // of meet, at most
		var err error
		if l.memory, err = host.Allocate((l.size + steps) * greetingBytes); err != nil {
			return err
		}
	}
	address := l.memory + uintptr(l.said*greetingBytes)
	l.said++
	hostmem.Slice[greeting](address, 1)[0] = g
	slot, err := l.table.add(l.lib, &l.owner, dest, sent)
	if err != nil {
		return err
	}
	l.table.calls.Add(l.lib.Isend, address, uintptr(greetingBytes), l.lib.handles.bytes, uintptr(dest), uintptr(l.tag), l.lib.handles.world, slot)
	return l.table.flush(l.lib)
}

// deliverSoon is deliver with a short deadline; whom it does not reach has one as well.
func (l *lobby) deliverSoon(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	_ = l.deliver(ctx)
}

// deliver waits until MPI has taken what is being sent.
func (l *lobby) deliver(ctx context.Context) error {
	for pace := (pause{}); len(l.table.list) > 0; pace.next() {
		if _, err := l.table.test(l.lib, false, 1); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return comm.ContextError(ctx)
		}
	}
	return nil
}

// read returns a greeting that has come, nil if there is none.
func (l *lobby) read() (*greeting, error) {
	t, lib, world := &l.table, l.lib, l.lib.handles.world
	t.reserve(1)
	if code := lib.call(lib.Iprobe, uintptr(lib.abi.anySource), uintptr(l.tag), world, t.flag, t.statuses); code != success {
		return nil, translate(lib, lib.error(lib.Iprobe, code))
	}
	if hostmem.Slice[int32](t.flag, 1)[0] == 0 {
		return nil, nil
	}
	g := make([]greeting, 1)
	code := lib.call(lib.Recv, hostmem.Addr(g), uintptr(greetingBytes), lib.handles.bytes, uintptr(lib.abi.anySource), uintptr(l.tag), world, t.statuses)
	if code != success {
		return nil, translate(lib, lib.error(lib.Recv, code))
	}
	return &g[0], nil
}

// release frees what the lobby holds when nothing is being sent.
func (l *lobby) release() {
	if l != nil && len(l.table.list) == 0 {
		l.table.release()
		_ = host.Deallocate(l.memory)
		l.memory, l.said = 0, 0
	}
}
