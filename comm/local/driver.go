package local

// driver carries out what one event (a submission, the end of an operation)
// makes possible, one thing after the other instead of one inside the other.
type driver struct {
	*endpoint // on whose time this happens
	// kicked lists endpoints whose backlog may go on, linked by endpoint.next.
	kicked *endpoint
	// ready says that the collective number seq can start. There is at most
	// one such, since each one waits for its predecessor.
	ready bool
	seq   uint64
}

// kick puts an endpoint on the list, unless it is on somebody's.
func (d *driver) kick(e *endpoint) {
	if e.linked.CompareAndSwap(false, true) {
		e.next = d.kicked
		d.kicked = e
	}
}

// arrived counts down what a collective waits for: a rank, its predecessor.
func (d *driver) arrived(seq uint64) {
	if d.world.slot(seq).missing.Add(-1) == 0 {
		d.ready = true
		d.seq = seq
	}
}

// arrive is arrived for a rank, not a predecessor: it may turn out to be in
// vain.
func (d *driver) arrive(seq uint64) {
	d.arrived(seq)
	if d.world.left.Load() > 0 {
		d.world.checkLeft()
	}
}
