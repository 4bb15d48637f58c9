package comm

import (
	"errors"
	"sync"
)

// parent is backend.Parent.
type parent interface {
	SubCommunicators() []Communicator
}

// family returns c and its sub-communicators, in the order in which they are closed. Sub-communicators of a
// communicator that c decorates come last, as c may need them until it closes.
func family(c Communicator) []Communicator {
	var children, decorated []Communicator
	list := &children
	for link := c; link != nil; {
		if p, ok := link.(parent); ok {
			*list = append(*list, p.SubCommunicators()...)
			list = &decorated
		}
		u, ok := link.(interface{ Unwrap() Communicator })
		if !ok {
			break
		}
		link = u.Unwrap()
	}
	return append(append(children, c), decorated...)
}

// AbortAll aborts c and its sub-communicators (backend.Parent), side by side, so that every peer
// learns the cause before this rank waits for anything.
func AbortAll(c Communicator, cause error) {
	var all sync.WaitGroup
	for _, m := range family(c) {
		all.Go(func() { m.Abort(cause) })
	}
	all.Wait()
}

// CloseAll closes c and its sub-communicators (backend.Parent). If cause is not nil it
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
