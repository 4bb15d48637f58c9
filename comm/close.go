package comm

import (
	"errors"
	"sync"
)

// Parent is implemented by communicators that know their sub-communicators: all that
// package comm/backend makes.
type Parent interface {
	// SubCommunicators returns those that Split made of this one and that are not
	// closed, with theirs, each behind its own.
	SubCommunicators() []Communicator
}

// family returns c and its sub-communicators ([Parent]). Those of what c decorates come
// last, as c may need them until it closes.
func family(c Communicator) []Communicator {
	var own, below []Communicator
	subs := &own
	for at := c; at != nil; {
		if p, ok := at.(Parent); ok {
			*subs = append(*subs, p.SubCommunicators()...)
			subs = &below
		}
		u, ok := at.(interface{ Unwrap() Communicator })
		if !ok {
			break
		}
		at = u.Unwrap()
	}
	return append(append(own, c), below...)
}

// AbortAll aborts c and its sub-communicators ([Parent]), side by side, so that every peer
// learns the cause before this rank waits for anything.
func AbortAll(c Communicator, cause error) {
	var all sync.WaitGroup
	for _, m := range family(c) {
		all.Go(func() { m.Abort(cause) })
	}
	all.Wait()
}

// CloseAll closes c and its sub-communicators ([Parent]). If cause is not nil it
// aborts all of them first ([AbortAll]).
func CloseAll(c Communicator, cause error) error {
	if cause != nil {
		AbortAll(c, cause)
	}
	var errs []error
	for _, m := range family(c) {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}
