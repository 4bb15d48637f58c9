package mpi

import (
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// sent is expected by a request that receives nothing;
// headed means that the message is a user's first, with the head.
const (
	sent   = -1
	headed = -2
)

// request is a message in flight.
type request struct {
	owner    *op
	expected int   // bytes to be received, sent or headed
	rank     int32 // at the other end
}

// requests are the messages in flight: MPI's requests in one dense array, as
// MPI_Testall and MPI_Testsome want it, and whose they are.
type requests struct {
	list   []request
	calls  *dl.Sequence // that are to post the last of them
	next   int          // where the next look begins
	idle   []*op        // whose last message the last look found done
	rank   int          // this one
	failed comm.Op      // the call whose message failed last

	handleSize, statusSize int
	memory                 uintptr // the arrays below, outside the Go heap
	capacity               int
	handles                uintptr
	statuses               uintptr
	indices                uintptr
	flag                   uintptr
}

// add makes room for a request of o and returns where MPI is to store it. The call
// that posts it is the next that is added to calls; it is made together with
// others, by flush at the latest.
func (r *requests) add(lib *library, o *op, rank, expected int) (slot uintptr, err error) {
	n := len(r.list)
	if r.calls.Full() || n == r.capacity {
		if err := r.flush(lib); err != nil {
			return 0, err
		}
	}
	r.reserve(n + 1)
	r.list = append(r.list, request{o, expected, int32(rank)})
	o.inFlight++
	return r.handles + uintptr(n*r.handleSize), nil
}

// flush makes the calls that are left.
func (r *requests) flush(lib *library) error {
	n := r.calls.Len()
	if n == 0 {
		return nil
	}
	done, code := lib.run(r.calls)
	return r.posted(lib, n, done, code)
}

// posted forgets the requests whose calls were not made, of the last n ones, because
// one failed.
func (r *requests) posted(lib *library, n, done int, code int32) error {
	if code == success {
		return nil
	}
	kept := len(r.list) - n + done
	for _, q := range r.list[kept:] {
		q.owner.inFlight--
	}
	clear(r.list[kept:])
	r.list = r.list[:kept]
	return translate(lib, lib.error(r.calls.Func(done), code))
}

// reserve makes room for n requests.
func (r *requests) reserve(n int) {
	if n > r.capacity {
		r.grow()
	}
}

// grow doubles the arrays. Without memory for requests nothing can go on.
func (r *requests) grow() {
	capacity := max(16, 2*r.capacity)
	size := capacity * (8 + r.statusSize + 4)
	memory, err := host.Allocate(size + 8)
	if err != nil {
		panic("mpi: " + err.Error())
	}
	old := hostmem.Slice[byte](r.handles, len(r.list)*r.handleSize)
	copy(hostmem.Slice[byte](memory+8, len(old)), old)
	_ = host.Deallocate(r.memory)
	r.memory, r.capacity = memory, capacity
	r.flag = memory
	r.handles = memory + 8
	r.statuses = r.handles + uintptr(capacity*8)
	r.indices = r.statuses + uintptr(capacity*r.statusSize)
}

// cancel cancels receives of messages that have not begun to come, the first time it is
// called, and returns the number of receives that MPI still writes for. Some of the list may
// be done, as a look has failed. Sends stay.
func (r *requests) cancel(lib *library, first bool) (receiving int) {
	r.list = r.list[:len(r.list)-r.calls.Len()] // the others were not posted
	r.calls.Drop()
	if !lib.Cancel.Found() {
		return 0
	}
	done := func(handle uintptr) bool { // now or before
		code := lib.call(lib.Testsome, 1, handle, r.flag, r.indices, r.statuses)
		return code != leftBehind && hostmem.Slice[int32](r.flag, 1)[0] != 0
	}
	for i := range r.list {
		q, handle := &r.list[i], r.handles+uintptr(i*r.handleSize)
		if q.expected == sent || q.owner == nil {
			continue
		}
		over := done(handle)
		if !over && first {
			_ = lib.call(lib.Cancel, handle)
			over = done(handle)
		}
		if over {
			q.owner = nil
		} else {
			receiving++
		}
	}
	return receiving
}

func (r *requests) release() {
	_ = host.Deallocate(r.memory)
	*r = requests{rank: r.rank, calls: r.calls, handleSize: r.handleSize, statusSize: r.statusSize}
}

// mostTested is how many requests one look asks about: what it costs does not
// depend on how many there are, and the next look goes on where it ended.
const mostTested = 512

// test asks MPI which requests are done, forgets these, and returns how many
// there were. all says that they only matter together. As long as there are none
// it asks again, at most so often.
func (r *requests) test(lib *library, all bool, tries int) (int, error) {
	r.idle = r.idle[:0]
	if len(r.list) == 0 {
		return 0, nil
	}
	first := 0
	if len(r.list) > mostTested {
		if all = false; r.next < len(r.list) {
			first = r.next
		}
	}
	n := min(len(r.list)-first, mostTested)
	r.next = first + n
	handles := r.handles + uintptr(first*r.handleSize)
	if r.calls.Full() {
		if err := r.flush(lib); err != nil {
			return 0, err
		}
	}
	posts, f := r.calls.Len(), lib.Testsome
	if all {
		f = lib.Testall
		r.calls.AddUntil(r.flag, tries, f, uintptr(n), handles, r.flag, r.statuses)
	} else {
		r.calls.AddUntil(r.flag, tries, f, uintptr(n), handles, r.flag, r.indices, r.statuses)
	}
	made, code := lib.run(r.calls)
	if made < posts {
		return 0, r.posted(lib, posts, made, code)
	}
	done := int(hostmem.Slice[int32](r.flag, 1)[0])
	if code != success {
		return 0, r.failure(lib, f, code, first, n, all, done)
	}
	if done <= 0 {
		return 0, nil // for Testsome, MPI_UNDEFINED is negative
	}
	if all {
		return n, r.completeAll(lib)
	}
	return done, r.completeSome(lib, first, done)
}

func (r *requests) completeAll(lib *library) error {
	for i := range r.list {
		if err := r.complete(lib, i, i); err != nil {
			return err
		}
	}
	r.list = r.list[:0]
	return nil
}

// completeSome takes the requests that MPI has named, counted from the first that
// it was asked about, out of the list: the last ones take their places.
func (r *requests) completeSome(lib *library, first, done int) error {
	indices := hostmem.Slice[int32](r.indices, done)
	for i, index := range indices {
		if err := r.complete(lib, first+int(index), i); err != nil {
			return err
		}
	}
	handles := hostmem.Slice[byte](r.handles, len(r.list)*r.handleSize)
	for _, index := range indices {
		hole, last := first+int(index), len(r.list)-1
		for last >= 0 && r.list[last].owner == nil {
			last--
		}
		if hole < last {
			r.list[hole], r.list[last] = r.list[last], request{}
			copy(handles[hole*r.handleSize:(hole+1)*r.handleSize], handles[last*r.handleSize:])
			last--
		}
		r.list = r.list[:last+1]
	}
	return nil
}

// complete takes note of a request that is done.
func (r *requests) complete(lib *library, request, status int) error {
	if err := r.check(lib, request, status); err != nil {
		return err
	}
	o := r.list[request].owner
	r.list[request].owner = nil
	if o.inFlight--; o.inFlight == 0 {
		r.idle = append(r.idle, o)
	}
	return nil
}

// status is the memory of one status.
func (r *requests) status(i int) []byte {
	return hostmem.Slice[byte](r.statuses+uintptr(i*r.statusSize), r.statusSize)
}

// check compares a message with the expected length, or its head with the call.
func (r *requests) check(lib *library, request, status int) error {
	q := &r.list[request]
	switch q.expected {
	case sent:
		return nil
	case headed:
		return q.owner.checkHead(r)
	}
	got := 0
	if lib.abi.received != nil {
		got = int(lib.abi.received(r.status(status)))
	} else {
		lib.call(lib.GetCountC, r.statuses+uintptr(status*r.statusSize), lib.handles.bytes, r.flag)
		got = hostmem.Slice[int](r.flag, 1)[0]
	}
	if got != q.expected {
		r.failed = q.owner.op
		return fmt.Errorf("%w: %v: rank %d sent %d bytes, expected %d", comm.ErrMismatch, q.owner, q.rank, got, q.expected)
	}
	return nil
}

// failure finds the message that made a test of n requests from first on fail.
func (r *requests) failure(lib *library, f dl.Func, code int32, first, n int, all bool, done int) error {
	err := lib.error(f, code)
	r.failed = comm.OpSync
	if err.class != lib.abi.errInStatus {
		return translate(lib, err)
	}
	indices := hostmem.Slice[int32](r.indices, n)
	if !all {
		n = max(min(n, done), 0)
	}
	for i := range n {
		code := hostmem.Slice[int32](r.statuses+uintptr(i*r.statusSize+lib.abi.statusError), 1)[0]
		if code == success || code == lib.abi.errPending {
			continue
		}
		request := first + i
		if !all {
			request = first + int(indices[i])
		}
		q := &r.list[request]
		r.failed = q.owner.op
		err := translate(lib, lib.error(f, code))
		if q.rank >= 0 && errors.Is(err, comm.ErrMismatch) {
			err = fmt.Errorf("%w: %v: rank %d sent more than %d bytes", comm.ErrMismatch, q.owner, q.rank, q.expected)
		}
		if head := q.owner.checkHead(r); head != nil {
			err = head
		}
		return err
	}
	return translate(lib, err)
}

// translate wraps an MPI error in the sentinel of its class.
func translate(lib *library, err *callError) error {
	sentinel := comm.ErrPeerFailed
	if err.class == lib.abi.errTruncate {
		sentinel = comm.ErrMismatch
	}
	return fmt.Errorf("%w: %w", sentinel, err)
}
