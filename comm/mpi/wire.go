package mpi

import (
	"cmp"
	"errors"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// wire is the MPI communicator under an endpoint, as the engine sees it.
type wire struct {
	lib        *library  // of this process
	handle     uintptr   // of the MPI communicator
	tags       tagSpace  // of the library, shared out; not changed after newWire
	table      requests  // the engine's messages
	users      *matching // of their messages; nil before the first
	heads      requests  // receives of heads posted while table was longer than a look
	abandoned  bool      // Abandon was called: receives are canceled once
	control    requests  // control messages that are being sent, by the number of their buffers
	buffers    uintptr   // of a status report and a last message to each rank
	controlled []bool    // buffers in use
}

var _ schedule.Wire = (*wire)(nil)

func newWire(lib *library, handle uintptr, size int, maxTag uint64) *wire {
	return &wire{
		lib:        lib,
		handle:     handle,
		tags:       newTagSpace(maxTag),
		table:      newRequests(lib),
		heads:      newRequests(lib),
		control:    newRequests(lib),
		controlled: make([]bool, 2*size),
	}
}

// Post implements [schedule.Wire].
func (w *wire) Post(id int, m *schedule.Message) {
	tag := m.Tag
	if m.User {
		if w.users == nil {
			w.users = newMatching(w, len(w.controlled)/2)
		}
		if m.Receive {
			w.users.receive(id, m)
			return
		}
		tag = w.users.sendTag(m)
	}
	f := w.lib.Isend
	if m.Receive {
		f = w.lib.Irecv
	}
	w.post(id, f, m.Address, m.Bytes, m.Peer, tag)
}

// post makes a request of the library. The call is made with the next Flush or Poll.
func (w *wire) post(id int, f dl.Func, address uintptr, bytes, peer int, tag uint64) {
	if slot, ok := w.table.add(id, f == w.lib.Irecv); ok {
		w.table.calls.Add(
			f,
			address,
			uintptr(bytes),
			w.lib.handles.bytes,
			uintptr(peer),
			uintptr(tag),
			w.handle,
			slot,
		)
	}
}

// postHead makes a receive of a head. They are matched in order, and a look asks about all of them.
func (w *wire) postHead(id int, address uintptr, peer int) {
	if len(w.table.list) < mostTested {
		w.post(id, w.lib.Irecv, address, schedule.HeadedBytes, peer, w.tags.head)
		return
	}
	_ = w.table.flush() // says why it has failed again
	if slot, ok := w.heads.add(id, true); ok {
		w.heads.calls.Add(w.lib.Irecv, address, schedule.HeadedBytes, w.lib.handles.bytes, uintptr(peer),
			uintptr(w.tags.head), w.handle, slot)
		// A look at no heads would not say why.
		w.users.failure = cmp.Or(w.users.failure, w.heads.flush())
	}
}

// Flush implements [schedule.Wire].
func (w *wire) Flush() error { return w.table.flush() }

// Poll implements [schedule.Wire].
func (w *wire) Poll(done []schedule.Done, h schedule.Hint) ([]schedule.Done, error) {
	if w.users == nil {
		return w.table.test(done, h.Together, h.Tries)
	}
	from := len(done)
	for range headRounds {
		tries := h.Tries
		if len(w.users.arrived) > 0 || len(w.heads.list) > 0 {
			tries = 1
		}
		var heads bool
		var err error
		if done, err = w.table.test(done, h.Together, tries); err != nil {
			return done[:from], err
		}
		if done, err = w.heads.test(done, false, 1); err != nil {
			return done[:from], err
		}
		if done, heads, err = w.users.poll(done, from); err != nil || !heads || len(done) > from {
			return done, err
		}
		// Heads have come whose receives have not been called: those that are waited for may be behind them.
	}
	return done, nil
}

// headRounds bounds the looks of one Poll.
const headRounds = 256

// Abandon implements [schedule.Wire]. It returns the number of receives: sends stay in flight.
func (w *wire) Abandon() (receiving int) {
	receiving = w.table.cancel(!w.abandoned) + w.heads.cancel(!w.abandoned)
	w.abandoned = true
	return receiving
}

// controlTag is the tag of control messages.
const controlTag = 0

// Tell implements [schedule.Wire].
func (w *wire) Tell(rank int, report bool, message []byte) bool {
	_, _ = w.Told() // some ranks may be out of reach
	size := len(w.controlled) / 2
	bytes := uintptr(schedule.ControlBytes)
	buffer := rank
	if !report {
		buffer += size
	}
	if w.controlled[buffer] {
		return false
	}
	if w.buffers == 0 {
		var err error
		if w.buffers, err = host.Allocate(2 * size * schedule.ControlBytes); err != nil {
			return false
		}
	}
	address := w.buffers + uintptr(buffer)*bytes
	copy(hostmem.Slice[byte](address, schedule.ControlBytes), message)
	w.control.failed = nil // to send to another rank, perhaps
	if slot, ok := w.control.add(buffer, false); ok {
		w.control.calls.Add(w.lib.Isend, address, bytes, w.lib.handles.bytes, uintptr(rank), controlTag, w.handle, slot)
	}
	w.controlled[buffer] = w.control.flush() == nil
	return w.controlled[buffer]
}

// Told implements [schedule.Wire].
func (w *wire) Told() (bool, error) {
	done, err := w.control.test(nil, false, 1)
	for _, d := range done {
		w.controlled[d.ID] = false
		err = cmp.Or(err, d.Err)
	}
	return len(w.control.list) == 0, err
}

// Hear implements [schedule.Wire].
func (w *wire) Hear(rank int) ([]byte, error) {
	t := &w.control
	lib := w.lib
	t.reserve(1)
	if err := lib.reach(lib.Iprobe, uintptr(rank), controlTag, w.handle, t.flag, t.statuses); err != nil {
		return nil, err
	}
	if hostmem.Slice[int32](t.flag, 1)[0] == 0 {
		return nil, nil
	}
	m := make([]byte, schedule.ControlBytes)
	return m, lib.reach(
		lib.Recv,
		hostmem.Addr(m),
		uintptr(len(m)),
		lib.handles.bytes,
		uintptr(rank),
		controlTag,
		w.handle,
		t.statuses,
	)
}

// Gone implements [schedule.Wire]. MPI does not say.
func (*wire) Gone(int) error { return nil }

// request is a message in flight.
type request struct {
	id       int32 // of the engine, none if MPI has completed it
	receives bool  // it is a receive, which can be canceled
}

const none = -1

// requests are the messages in flight: MPI's requests in one dense array, as
// MPI_Testall and MPI_Testsome want it, and which they are.
type requests struct {
	lib    *library     // of this process
	list   []request    // in the order of handles
	calls  *dl.Sequence // that are to post the last of them
	next   int          // where the next look begins
	failed error        // of a call that was to post one

	handleSize int     // bytes of an MPI_Request
	statusSize int     // bytes of an MPI_Status
	arrays     []int64 // the arrays below, nil before the first request
	capacity   int     // requests that they have room for
	handles    uintptr // MPI_Request
	statuses   uintptr // MPI_Status
	indices    uintptr // int
	flag       uintptr // one int
}

func newRequests(lib *library) requests {
	return requests{
		lib:        lib,
		calls:      dl.NewSequence(),
		handleSize: lib.abi.handleSize,
		statusSize: lib.abi.statusSize,
	}
}

// add makes room for a request and returns where MPI is to store it. The call
// that posts it is the next that is added to calls; it is made together with
// others, by flush at the latest. After one that failed there is none.
func (r *requests) add(id int, receives bool) (slot uintptr, ok bool) {
	n := len(r.list)
	if r.calls.Full() || n == r.capacity {
		_ = r.flush()
	}
	if r.failed != nil {
		return 0, false
	}
	r.reserve(n + 1)
	r.list = append(r.list, request{int32(id), receives})
	return r.handles + uintptr(n*r.handleSize), true
}

// flush makes the calls that are left.
func (r *requests) flush() error {
	if n := r.calls.Len(); n > 0 {
		done, code := r.lib.run(r.calls)
		r.posted(n, done, code)
	}
	return r.failed
}

// posted forgets the requests whose calls were not made, of the last n ones, because
// one failed.
func (r *requests) posted(n, done int, code int32) {
	if code != success {
		r.list = r.list[:len(r.list)-n+done]
		r.failed = translate(r.lib, r.lib.error(r.calls.Func(done), code))
	}
}

// reserve makes room for n requests: it doubles the arrays.
func (r *requests) reserve(n int) {
	if n <= r.capacity {
		return
	}
	capacity := max(16, 2*r.capacity)
	old := r.arrays
	r.arrays = make([]int64, 1+(capacity*(8+r.statusSize+4)+7)/8)
	r.capacity = capacity
	copy(r.arrays, old[:min(len(old), 1+len(r.list))]) // a handle has 8 bytes at most
	r.flag = hostmem.Addr(r.arrays)
	r.handles = r.flag + 8
	r.statuses = r.handles + uintptr(capacity*8)
	r.indices = r.statuses + uintptr(capacity*r.statusSize)
}

// cancel cancels receives of messages that have not begun to come, the first time it is
// called, and returns the number of receives that MPI still writes for. Some of the list may
// be done, as a look has failed. Sends stay.
func (r *requests) cancel(first bool) (receiving int) {
	r.list = r.list[:len(r.list)-r.calls.Len()] // the others were not posted
	r.calls.Drop()
	lib := r.lib
	if !lib.Cancel.Found() {
		return 0
	}
	done := func(handle uintptr) bool { // now or before
		code := lib.call(lib.Testsome, 1, handle, r.flag, r.indices, r.statuses)
		// A call that was not made, since another one does not return (turn.go), has not set the flag.
		return code != leftBehind && hostmem.Slice[int32](r.flag, 1)[0] != 0
	}
	for i := range r.list {
		q := &r.list[i]
		handle := r.handles + uintptr(i*r.handleSize)
		if !q.receives || q.id == none {
			continue
		}
		completed := done(handle)
		if !completed && first {
			_ = lib.call(lib.Cancel, handle)
			completed = done(handle)
		}
		if completed {
			q.id = none
		} else {
			receiving++
		}
	}
	return receiving
}

// mostTested is how many requests one look asks about: what it costs does not
// depend on how many there are, and the next look goes on where it ended.
const mostTested = 512

// test asks MPI which requests are done, and moves these from the list to done. all says
// that they only matter together. As long as there are none it asks again, at most so often.
func (r *requests) test(done []schedule.Done, all bool, tries int) ([]schedule.Done, error) {
	if len(r.list) == 0 {
		return done, nil
	}
	first := 0
	if len(r.list) > mostTested {
		all = false // one look asks about some of them
		if r.next < len(r.list) {
			first = r.next
		}
	}
	n := min(len(r.list)-first, mostTested)
	r.next = first + n
	handles := r.handles + uintptr(first*r.handleSize)
	if r.calls.Full() || r.failed != nil {
		if err := r.flush(); err != nil {
			return done, err
		}
	}
	posts := r.calls.Len()
	f := r.lib.Testsome
	if all {
		f = r.lib.Testall
		r.calls.AddUntil(r.flag, tries, f, uintptr(n), handles, r.flag, r.statuses)
	} else {
		r.calls.AddUntil(r.flag, tries, f, uintptr(n), handles, r.flag, r.indices, r.statuses)
	}
	made, code := r.lib.run(r.calls)
	if made < posts {
		r.posted(posts, made, code)
		return done, r.failed
	}
	completed := int(hostmem.Slice[int32](r.flag, 1)[0])
	if code != success {
		return r.failure(done, code, look{
			function:  f,
			first:     first,
			n:         n,
			testall:   all,
			completed: completed,
		})
	}
	switch {
	case completed <= 0: // for Testsome, MPI_UNDEFINED is negative
	case all:
		for i := range r.list {
			done = append(done, r.complete(i, i))
		}
		r.list = r.list[:0]
	default:
		done = r.completeSome(done, first, completed)
	}
	return done, nil
}

// completeSome takes the requests that MPI has named, counted from the first that
// it was asked about, out of the list: the last ones take their places.
func (r *requests) completeSome(done []schedule.Done, first, completed int) []schedule.Done {
	indices := hostmem.Slice[int32](r.indices, completed)
	for i, index := range indices {
		done = append(done, r.complete(first+int(index), i))
	}
	handles := hostmem.Slice[byte](r.handles, len(r.list)*r.handleSize)
	for _, index := range indices {
		hole := first + int(index)
		last := len(r.list) - 1
		for last >= 0 && r.list[last].id == none {
			last--
		}
		if hole < last {
			r.list[hole] = r.list[last]
			r.list[last].id = none
			copy(handles[hole*r.handleSize:(hole+1)*r.handleSize], handles[last*r.handleSize:])
			last--
		}
		r.list = r.list[:last+1]
	}
	return done
}

// complete records that a request is done.
func (r *requests) complete(request, status int) schedule.Done {
	q := &r.list[request]
	d := schedule.Done{ID: int(q.id)}
	q.id = none
	switch {
	case !q.receives:
	case r.lib.abi.received != nil: // the layout of a status is known
		d.Bytes = int(r.lib.abi.received(hostmem.Slice[byte](r.statuses+uintptr(status*r.statusSize), r.statusSize)))
	default:
		r.lib.call(
			r.lib.GetCountC,
			r.statuses+uintptr(status*r.statusSize),
			r.lib.handles.bytes,
			r.flag,
		)
		d.Bytes = hostmem.Slice[int](r.flag, 1)[0]
	}
	return d
}

// look is one question to MPI, which requests are done.
type look struct {
	function  dl.Func // MPI_Testall or MPI_Testsome
	first     int     // the first of list that it asks about
	n         int     // how many it asks about
	testall   bool    // they only matter together: MPI_Testall
	completed int     // how many are done, as MPI_Testsome says; below 0: MPI does not say
}

// failure finds the message that made a look fail.
func (r *requests) failure(done []schedule.Done, code int32, l look) ([]schedule.Done, error) {
	lib := r.lib
	err := lib.error(l.function, code)
	if err.class != lib.abi.errInStatus {
		return done, translate(lib, err)
	}
	indices := hostmem.Slice[int32](r.indices, l.n)
	statuses := l.n
	if !l.testall { // one for each that is done
		statuses = max(min(l.n, l.completed), 0)
	}
	for i := range statuses {
		code := hostmem.Slice[int32](r.statuses+uintptr(i*r.statusSize+lib.abi.statusError), 1)[0]
		if code == success || code == lib.abi.errPending {
			continue
		}
		request := l.first + i
		if !l.testall {
			request = l.first + int(indices[i])
		}
		d := schedule.Done{
			ID:  int(r.list[request].id),
			Err: translate(lib, lib.error(l.function, code)),
		}
		if errors.Is(d.Err, comm.ErrMismatch) {
			d.Bytes = math.MaxInt // how many, MPI does not say
		}
		return append(done, d), nil
	}
	return done, translate(lib, err)
}
