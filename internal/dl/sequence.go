package dl

// maxCalls is the capacity of a Sequence.
const maxCalls = 8

// Sequence is a list of calls of C functions that are made together: entering C takes longer than a short function,
// and a sequence enters it once. [NewSequence] makes one.
type Sequence struct {
	left uintptr // remaining calls
	// calls are in the order in which they were added; the first n are set.
	calls [maxCalls]struct {
		frame
		flag  uintptr // if not 0: the call is repeated until the int there is not 0,
		times uintptr // but at most this number of times
	}
	n     int              // number of calls added
	names [maxCalls]string // of their functions
}

// NewSequence returns an empty sequence, on the heap: a stack could move while C
// calls back.
//
//go:noinline
func NewSequence() *Sequence { return new(Sequence) }

// Len is the number of calls to make.
func (s *Sequence) Len() int { return s.n }

// Full reports whether there is no room for another call.
func (s *Sequence) Full() bool {
	return s.n == maxCalls
}

// Add appends a call of a function that returns a C int, 0 for success, and takes
// at most 16 arguments.
func (s *Sequence) Add(f Func, args ...uintptr) {
	s.AddUntil(0, 1, f, args...)
}

// AddUntil appends a call that is repeated until the C int at address flag is not 0, at most this number of times.
func (s *Sequence) AddUntil(flag uintptr, times int, f Func, args ...uintptr) {
	c := &s.calls[s.n]
	c.fn = f.address
	c.flag = flag
	c.times = uintptr(times)
	copy(c.args[:len(args)], args)
	s.names[s.n] = f.name
	s.n++
}

// Func is the function of the i-th call, also after Run.
func (s *Sequence) Func(i int) Func {
	return Func{s.calls[i].fn, s.names[i]}
}

// Run makes the calls, in order, and empties the sequence. It stops at a result other than 0, and returns that and the
// number of calls made before.
func (s *Sequence) Run() (done int, code int32) {
	n := s.n
	s.left = uintptr(n)
	s.n = 0
	code = callEach(s)
	return n - int(s.left), code
}

// Drop empties the sequence without making the calls.
func (s *Sequence) Drop() { s.n = 0 }
