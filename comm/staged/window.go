package staged

import (
	"context"
	"errors"
	"log/slog"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/window"
	"github.com/tutti-go/tutti/runtime"
)

const (
	longPiece  = 8 << 20 // bytes of a piece of a call, at most
	fewPieces  = 8       // of a call whose pieces are neither short nor long
	shareAlign = 256     // bytes of which a share is a multiple
)

// Tests lower these.
var (
	windowBytes = 64 << 20 // of the parts of all ranks, at most
	windowCall  = 2 << 20  // bytes of a call that goes through the window, at least
	shortPiece  = 4 << 20  // bytes of a piece of a call that is cut, at least
)

// sharer is a communicator whose ranks may share memory of the host.
type sharer interface {
	// ShareMemory returns memory of this many bytes, all zero at first, that all ranks have mapped, or nil on all ranks
	// alike if they share none. It is collective: all ranks pass the same number, with nothing in flight.
	ShareMemory(ctx context.Context, bytes int) ([]byte, error)
	// UnshareMemory unmaps memory of ShareMemory on this rank. It may follow Close.
	UnshareMemory(memory []byte)
}

// windowState is whether there is a window, the same on all ranks.
//
//	windowUntried ── first long call ──→ windowOpen
//	                                ╰──→ windowRefused
type windowState uint8

const (
	windowUntried windowState = iota
	windowOpen
	windowRefused // ranks share no memory, or a device does not access it
)

// passages is memory that all ranks share and their devices access. Long allreduces go through it.
//
// A call is cut into pieces, and a piece into a share for each rank, which reduces it. In step t a rank's device
//
//   - copies its operands of the others' shares of piece t to the window,
//   - reduces its own share of piece t-1, and copies the result to the window,
//   - copies the others' shares of piece t-2 from the window.
//
// Then all ranks come together (agree). A rank writes into its own part of the window alone: in a step into one half
// of it, while the others read what it has written in the step before from the other half. Nobody reads what has not
// been written completely, since a rank comes when its device is done, and a rank that does not come ends the call.
type passages struct {
	access   window.Window // of this rank's device; nil if there is no window
	memory   []byte        // parts of all ranks
	share    int           // bytes of the longest share
	operands []uintptr     // of a reduction, by rank
}

// fitsWindow reports whether a call would go through a window. All ranks find the same.
func (s *stage) fitsWindow(c *comm.Call) bool {
	if s.windowState == windowRefused || s.host.Device().Kind != runtime.CPU {
		return false
	}
	return c.Op == comm.OpAllReduce && c.Reduce.Defined(c.DType) && c.Count*c.DType.Size() >= windowCall
}

// hasWindow opens the window, unless that was tried, and reports whether it is open. All ranks call it together.
func (s *stage) hasWindow() (bool, error) {
	if err := s.growAround(0); err != nil {
		return false, err
	}
	if s.windowState != windowUntried {
		return s.windowState == windowOpen, nil
	}
	ranks := s.base.WorldSize()
	opener, accesses := s.device.(window.Opener)
	base, shares := comm.As[sharer](s.base)
	s.windowState = windowRefused
	able, err := s.allAre(accesses && shares && ranks > 1 && ranks <= window.MaxOperands)
	if err != nil || !able {
		return false, err
	}
	share := min(longPiece, windowBytes/(2*ranks)) / ranks / shareAlign * shareAlign
	memory, err := base.ShareMemory(context.Background(), 2*ranks*ranks*share) // Leave ends it
	if err != nil || memory == nil {
		return false, err
	}
	s.window = passages{
		memory:   memory,
		share:    share,
		operands: make([]uintptr, ranks),
	}
	access, failure := opener.OpenWindow(memory)
	if failure == nil {
		s.window.access = access
	} else {
		slog.Warn("staged: the device does not access memory that ranks share", "rank", s.base.Rank(), "cause", failure)
	}
	able, err = s.allAre(failure == nil)
	if err != nil || !able {
		return false, errors.Join(err, s.closeWindow())
	}
	s.windowState = windowOpen
	return true, nil
}

// allAre reports whether a condition holds on all ranks.
func (s *stage) allAre(condition bool) (bool, error) {
	vote := int64(0)
	if condition {
		vote = 1
	}
	votes, err := s.exchange(vote)
	return err == nil && !slices.Contains(votes, 0), err
}

// closeWindow closes the window, if there is one.
func (s *stage) closeWindow() (err error) {
	w := s.window
	s.window = passages{}
	s.windowState = windowRefused
	if w.access != nil {
		err = w.access.Close()
	}
	if base, ok := comm.As[sharer](s.base); ok && w.memory != nil {
		base.UnshareMemory(w.memory)
	}
	return err
}

// passage is a call that goes through the window.
type passage struct {
	*stage
	call   *comm.Call // of the device's memory
	size   int        // bytes of an element
	share  int        // elements of a rank's share of a piece; the last piece may have fewer
	pieces int        // of the call
}

// workInWindow does an allreduce.
func (s *stage) workInWindow(call *comm.Call) error {
	p := s.passage(call)
	if err := s.window.access.Begin(); err != nil {
		return err
	}
	for step := range p.pieces + 2 {
		err := p.submit(step)
		if err := errors.Join(err, s.window.access.Wait()); err != nil {
			return err
		}
		if step > p.pieces { // the others read nothing more
			return nil
		}
		if err := s.agree(call); err != nil {
			return err
		}
	}
	return nil
}

// passage cuts a call. All ranks find the same.
func (s *stage) passage(call *comm.Call) passage {
	ranks := s.base.WorldSize()
	size := call.DType.Size()
	bytes := call.Count * size
	piece := min(max(bytes/fewPieces, shortPiece), ranks*s.window.share)
	share := ceilDiv(ceilDiv(bytes, ceilDiv(bytes, piece)), ranks)
	share = min(ceilDiv(share, shareAlign)*shareAlign, s.window.share) / size
	return passage{
		stage:  s,
		call:   call,
		size:   size,
		share:  share,
		pieces: ceilDiv(call.Count, share*ranks),
	}
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// submit submits the work of a step.
func (p *passage) submit(step int) error {
	if step < p.pieces {
		if err := p.send(step, step); err != nil {
			return err
		}
	}
	if piece := step - 1; piece >= 0 && piece < p.pieces {
		if err := p.reduce(step, piece); err != nil {
			return err
		}
	}
	if piece := step - 2; piece >= 0 {
		return p.receive(step, piece)
	}
	return nil
}

// elements returns where a rank's share of a piece begins, and its length, which is 0 behind the end of the call.
func (p *passage) elements(piece, rank int) (first, n int) {
	first = min((piece*p.base.WorldSize()+rank)*p.share, p.call.Count)
	return first, min(p.share, p.call.Count-first)
}

// place returns the place of n elements of a share in a rank's part that are written in a step. It is the same in all
// calls: ranks may read results of the call before while operands of this one are written.
func (p *passage) place(step, part, share, n int) []byte {
	half := 2*part + step%2
	offset := (half*p.base.WorldSize() + share) * p.window.share
	return p.window.memory[offset : offset+n*p.size]
}

// send copies this rank's operands of the others' shares of a piece to the window.
func (p *passage) send(step, piece int) error {
	self := p.base.Rank()
	for rank := range p.base.WorldSize() {
		first, n := p.elements(piece, rank)
		if rank == self || n == 0 {
			continue
		}
		if err := p.window.access.CopyOut(p.place(step, self, rank, n), p.call.Send+uintptr(first*p.size)); err != nil {
			return err
		}
	}
	return nil
}

// reduce reduces this rank's share of a piece, whose operands were sent in the step before, and sends the result.
func (p *passage) reduce(step, piece int) error {
	rank := p.base.Rank()
	first, n := p.elements(piece, rank)
	if n == 0 {
		return nil
	}
	offset := uintptr(first * p.size)
	for part := range p.window.operands {
		p.window.operands[part] = p.call.Send + offset
		if part != rank {
			p.window.operands[part] = hostmem.Addr(p.place(step-1, part, rank, n))
		}
	}
	result := p.call.Recv + offset
	access := p.window.access
	if err := access.Reduce(result, p.window.operands, n, p.call.DType, p.call.Reduce); err != nil {
		return err
	}
	return access.CopyOut(p.place(step, rank, rank, n), result)
}

// receive copies the other ranks' shares of a piece, which were sent in the step before.
func (p *passage) receive(step, piece int) error {
	for rank := range p.base.WorldSize() {
		first, n := p.elements(piece, rank)
		if rank == p.base.Rank() || n == 0 {
			continue
		}
		if err := p.window.access.CopyIn(p.call.Recv+uintptr(first*p.size), p.place(step-1, rank, rank, n)); err != nil {
			return err
		}
	}
	return nil
}
