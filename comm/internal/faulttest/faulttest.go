// Package faulttest is the fault matrix: faults by backend, with the promised errors and whether they come at once or
// at a deadline. The table (table.go) is data: [Run] makes a backend's ranks run through its column, and
// docs/faults.md has the same table as text.
//
//	func TestFaults(t *testing.T) {
//		faulttest.Run(t, "local", faulttest.Backend{Each: …})
//	}
package faulttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/runtime"
)

// Rank is one participant.
type Rank struct {
	Comm    comm.Communicator // of the world, which no fault aborts
	Runtime runtime.Runtime
	// Two buffers of BufferBytes that nobody else uses. A fault may leave data in them.
	Send, Recv uintptr
}

// BufferBytes is the size of a rank's buffers.
const BufferBytes = 64 << 10

// NewRank allocates a rank's buffers in the runtime.
func NewRank(c comm.Communicator, rt runtime.Runtime) (Rank, error) {
	send, err := rt.Allocate(BufferBytes)
	if err != nil {
		return Rank{}, err
	}
	recv, err := rt.Allocate(BufferBytes)
	return Rank{c, rt, send, recv}, errors.Join(err, rt.CopyIn(send, make([]byte, BufferBytes)))
}

// Free frees the buffers.
func (r Rank) Free() error {
	return errors.Join(r.Runtime.Deallocate(r.Send), r.Runtime.Deallocate(r.Recv))
}

// Backend is the information that a column needs to run.
type Backend struct {
	// Each calls body on every rank of a world of 3, or of as many as there are, and joins the errors.
	Each func(ctx context.Context, body func(context.Context, Rank) error) error
	// Keeps is the number of bytes that the library behind the backend is known to keep for each operation ([Soak]).
	Keeps int
	// Elsewhere has the tests, by name, of the faults that this package cannot cause: the cells of the column that say
	// so.
	Elsewhere map[string]func(*testing.T)
	// Bubble runs each fault in a bubble of [synctest], where deadlines take no time. Ranks are goroutines, and share
	// nothing that was made outside.
	Bubble bool
	// Also has other errors that ranks may get, by name of the fault. The text of the error is not checked then.
	Also map[string]error
}

// Run makes a backend's ranks run through its column of the table.
func Run(t *testing.T, column string, b Backend) {
	t.Helper()
	CheckElsewhere(t, column, b.Elsewhere)
	for i := range Table {
		f := &Table[i]
		cell, ok := f.Cells[column]
		if !ok || f.play == nil || cell.Elsewhere {
			continue
		}
		play := func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := b.Each(ctx, func(ctx context.Context, r Rank) error {
				return f.Play(ctx, column, r, b.Also[f.Name])
			}); err != nil {
				t.Error(err)
			}
		}
		t.Run(f.Name, func(t *testing.T) {
			if b.Bubble {
				synctest.Test(t, play)
			} else {
				play(t)
			}
		})
	}
}

// CheckElsewhere checks that the tests are those named by the table.
func CheckElsewhere(t *testing.T, column string, tests map[string]func(*testing.T)) {
	t.Helper()
	if !slices.Contains(Columns, column) {
		t.Fatalf("there is no column %q", column)
	}
	for i := range Table {
		f := &Table[i]
		cell, ok := f.Cells[column]
		if want, got := ok && (cell.Elsewhere || f.play == nil), tests[f.Name] != nil; want != got {
			t.Errorf("%q in the column of %s: a test for it alone is %v, want %v", f.Name, column, got, want)
		}
	}
}

const (
	// patience is the time that a world may take for one fault. An error that is promised at once comes within half of
	// it, and a hang does not.
	patience = 60 * time.Second
	// deadline is the deadline of waits that must fail.
	deadline = 250 * time.Millisecond
)

// Cell is the promise of a backend.
type Cell struct {
	Others, Self Outcome // for the ranks that did nothing wrong, and for the one that did
	Elsewhere    bool    // a test of the backend shows it
	Note         string
	says         string // part of the others' ErrPeerFailed, or their only error
}

// Outcome is one of several errors; nil is success.
type Outcome struct {
	Errors []error
	Late   bool // the error comes at this rank's deadline
}

func (o Outcome) allows(err error) bool {
	return slices.ContainsFunc(o.Errors, func(want error) bool {
		return want == nil && err == nil || want != nil && errors.Is(err, want)
	})
}

// Fault is a row of the table.
type Fault struct {
	Name, What string
	// says is the text that the error must contain if ranks disagree.
	says []string
	// play does the rank's part and returns the error that it gets. The last rank is odd: it causes the fault.
	play  func(p *player) error
	Cells map[string]Cell // by column
}

// player is a rank in a fault.
type player struct {
	Rank
	c    comm.Communicator // a sub-communicator of the world, which may be aborted
	ctx  context.Context   // ends with patience
	wait time.Duration     // duration of waits that must fail
	odd  bool
	last int // rank of the odd one
}

// Play does one rank's part of a fault, on a sub-communicator of the world, and returns the difference from the
// column's promise, or from also.
func (f *Fault) Play(ctx context.Context, column string, r Rank, also error) (err error) {
	c, err := r.Comm.Split(ctx, 0, r.Comm.Rank())
	if err != nil {
		return err
	}
	cell := f.Cells[column]
	if column == Checked {
		k, err := checked.New(ctx, c, r.Runtime, 4*deadline)
		if err != nil {
			return err
		}
		c = k
	}
	p := &player{
		Rank: r,
		c:    c,
		ctx:  ctx,
		last: r.Comm.WorldSize() - 1,
	}
	p.odd = r.Comm.Rank() == p.last
	want := cell.Others
	if p.odd {
		want = cell.Self
	}
	if also != nil {
		want.Errors = append(slices.Clip(want.Errors), also)
	}
	// A rank that must notice at once has no deadline.
	p.wait = patience / 2
	if want.Late {
		p.wait = deadline
	}
	// A fault must not end the setup of a slower rank.
	if err := r.Comm.Barrier(ctx); err != nil {
		return err
	}
	start := time.Now()
	got := f.play(p)
	took := time.Since(start)
	fail := func(format string, args ...any) {
		err = errors.Join(err, fmt.Errorf("rank %d: %s: "+format, append([]any{r.Comm.Rank(), f.Name}, args...)...))
	}
	switch {
	case got == errAside:
	case !want.allows(got):
		fail("got %v, want one of %v, at its deadline: %v", got, want.Errors, want.Late)
	case got != nil && !want.Late && took > patience/2:
		fail("%v took %v", got, took)
	case !p.odd && (errors.Is(got, comm.ErrPeerFailed) || len(want.Errors) == 1 && got != nil) &&
		!strings.Contains(got.Error(), cell.says):
		fail("%q does not say %q", got, cell.says)
	case also == nil && errors.Is(got, comm.ErrMismatch):
		for _, text := range f.says {
			if !strings.Contains(got.Error(), text) {
				fail("%q does not say %q", got, text)
			}
		}
	}
	err = errors.Join(err, r.Comm.Barrier(ctx))
	if closed := c.Close(); got != nil || !want.allows(closed) { // Close reports what no call had noticed
		err = errors.Join(err, closed)
	}
	if cell.Others.broken() { // the world is not affected
		err = errors.Join(err, r.Comm.Barrier(ctx))
	}
	return err
}

func (o Outcome) broken() bool { return !slices.Contains(o.Errors, nil) }
