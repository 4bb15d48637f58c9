package record

import "github.com/tutti-go/tutti/internal/dump"

// Dump is what WriteJSON writes.
func (r *Recorder) Dump() *dump.File { return r.dump() }

// HoldWrites keeps dumps from being written until release is called.
func (r *Recorder) HoldWrites() (release func()) {
	r.writes.Lock()
	return r.writes.Unlock
}
