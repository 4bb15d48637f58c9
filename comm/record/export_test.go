package record

import "github.com/tutti-go/tutti/internal/dump"

// Dump is what WriteJSON writes.
func (r *Recorder) Dump() *dump.File { return r.dump() }
