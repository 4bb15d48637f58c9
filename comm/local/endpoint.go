package local

// enqueueBatch appends the batch, operations that start together, to the backlog.
// Messages go first: they are not ordered among the collectives of a batch,
// and must not wait for a free slot. The caller holds e.mu.
func (e *endpoint) enqueueBatch() {
	batch := e.batch
	e.batches++
	messages := 0
	for _, o := range batch {
		if o.op.Message() {
			messages++
		}
	}
	for _, pass := range [...]bool{true, false} {
		for _, o := range batch {
			if o.op.Message() == pass {
				o.batch = e.batches
				o.messages = messages > 0
				o.collectives = messages < len(batch)
				if o.op.Message() {
					o.number = e.messages.Begin()
				}
				e.backlog.Push(o)
			}
		}
	}
	e.pending.Add(int32(len(batch)))
	clear(batch)
	e.batch = batch[:0]
}

// startable reports whether the first operation of the backlog may start.
// Messages of a batch start after earlier collectives are done, and after
// earlier messages that touch the same memory; collectives after earlier
// messages are done. The caller holds e.mu.
func (e *endpoint) startable() bool {
	o := e.backlog.First()
	if !e.finishSmall() {
		return false
	}
	if o.batch != e.released {
		if o.collectives && len(e.opened) > 0 {
			return false
		}
		if o.messages && e.completed() < e.arrivals.Load() {
			return false
		}
		if len(e.opened) > 0 && e.batchConflicts(o.batch) {
			return false
		}
		e.released = o.batch
	}
	return o.op.Message() || e.hasRoom(&o.entry)
}

// hasRoom reports whether the rank's next collective can be put into the ring, or be
// told. The caller holds e.mu.
func (e *endpoint) hasRoom(x *entry) bool {
	if !e.finishSmall() {
		return false
	}
	ahead := e.arrivals.Load() - e.completed()
	return ahead == 0 || ahead < ringSize-1 && !e.world.isSmall(x)
}

// enter puts a collective into the ring, behind all that is done: ranks that have
// finished small ones know more than the others. The caller holds e.mu, and calls
// driver.arrive without it.
func (e *endpoint) enter(x *entry) (seq uint64, s *slot) {
	seq = e.arrivals.Load()
	front := &e.world.front.completed
	if e.finished.Load() == seq {
		for done := front.Load(); done < seq && !front.CompareAndSwap(done, seq); {
			done = front.Load()
		}
	}
	e.skip(seq)
	s = e.world.slot(seq)
	s.calls[e.rank] = *x
	return seq, s
}

// batchConflicts reports whether a message of the batch at the front of the
// backlog conflicts with an open one.
func (e *endpoint) batchConflicts(batch uint64) bool {
	for _, o := range e.backlog.All() {
		if o.batch != batch || !o.op.Message() {
			return false
		}
		if e.conflicts(o) {
			return true
		}
	}
	return false
}

// advanceable reports whether the backlog has an operation that may start. If
// it has only others, the endpoint counts as stalled, which makes the next
// collective that ends look again. The caller holds e.mu.
func (e *endpoint) advanceable() bool {
	if e.backlog.Empty() {
		e.setStalled(false)
		return false
	}
	if e.startable() {
		return true
	}
	if e.stalled.Load() {
		return false
	}
	e.setStalled(true)
	// A collective may have ended before it could see the mark.
	return e.startable()
}

func (e *endpoint) setStalled(stalled bool) {
	if e.stalled.Load() == stalled {
		return
	}
	e.stalled.Store(stalled)
	if stalled {
		e.world.stalled.Add(1)
	} else {
		e.world.stalled.Add(-1)
	}
}
