package local

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// group is the Group call that a rank is in, if any.
type group struct {
	comm.Grouping
	held []*op // what it submitted
}

// runGroup collects what submit submits and starts it together.
func (e *endpoint) runGroup(submit func() error) error {
	if err := e.usable(); err != nil {
		return e.turnDown("group", err)
	}
	return e.group.Run(submit, e.endGroup)
}

// endGroup submits what the group holds, unless there was an error.
func (e *endpoint) endGroup(given error) error {
	e.mu.Lock()
	held := e.group.held
	err := e.usable()
	if err == nil {
		err = overlap(held)
	}
	if given == nil && err == nil && len(held) > 0 {
		e.submitted.Store(e.submitted.Load() + uint64(len(held)))
		e.enqueue(held)
	} else {
		for _, o := range held {
			e.recycle(o)
		}
	}
	clear(held)
	e.group.held = held[:0]
	e.mu.Unlock()
	switch {
	case given != nil:
		return nil // Group returns it
	case err != nil:
		return e.turnDown("group", err)
	}
	d := driver{endpoint: e}
	d.kick(e)
	d.run()
	return nil
}

// overlap returns an error if two messages of a group touch the same memory:
// they are not ordered.
func overlap(group []*op) error {
	for i, a := range group {
		if !a.kind.isMessage() {
			continue
		}
		for _, b := range group[:i] {
			if b.kind.isMessage() && a.conflicts(b) {
				return fmt.Errorf("%w: buffers of two messages of one group overlap: %v with rank %d, %v with rank %d",
					comm.ErrArgument, &b.call, b.root, &a.call, a.root)
			}
		}
	}
	return nil
}
