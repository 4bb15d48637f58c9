// Package store lets the processes of a job share keys, as c10d's TCPStore does: a process sets keys, waits for keys
// of others, counts, compares and sets, watches a prefix, and leases keys that vanish with its session. It carries
// the data that a job needs before and beside its communicators: addresses, ids, notices of aborts, members.
//
//	state.go    what the store does: a deterministic state machine without time, goroutines or connections
//	server.go   sessions of a state: processes over TLS, and clients of the server's own process
//	client.go   what a process asks of it
//	dial.go     how a process reaches it, over connections of tls.go
//	proxy.go    the same protocol in front of a store of another kind, such as etcd's
//
// A session's end, in state.go, drops its leases and whatever it waits for.
package store

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Bounds of a state. A request beyond them is answered by [ErrFull] or [comm.ErrArgument].
const (
	mostKeys    = 1 << 18
	mostBytes   = 256 << 20 // of keys and values
	longestKey  = 64 << 10
	MaxValue    = 1 << 20 // MaxValue is the maximum length of a value, in bytes.
	mostWaits   = 1 << 10 // of a session
	mostWatches = 1 << 8  // of a session
)

// operation is what a request asks for.
type operation string

// The operations of a store.
const (
	opSet    operation = "set"    // Key, Value; Lease
	opSwap   operation = "swap"   // a Set if the key's version is Version, 0 if it must not exist
	opAdd    operation = "add"    // Key, Delta
	opGet    operation = "get"    // Key: answered when it exists
	opList   operation = "list"   // Key, a prefix
	opDelete operation = "delete" // Key, if its version is Version or that is 0
	opWatch  operation = "watch"  // Key, a prefix: an answer with what is there, then an event for each change
	opStop   operation = "stop"   // ends the Get or Watch with the ID Version
	opPing   operation = "ping"   // is answered
)

// request is one operation of a session.
type request struct {
	ID      uint64    `json:"id,omitempty"`      // that the session chose; 0 wants no answer
	Op      operation `json:"op"`                // what to do
	Key     string    `json:"key,omitempty"`     // what with; of a watch a prefix
	Value   []byte    `json:"value,omitempty"`   // to store, of a Set or Swap
	Delta   int64     `json:"delta,omitempty"`   // what an Add adds
	Version uint64    `json:"version,omitempty"` // the key must have, of a Swap or Delete; of a stop, the request to end
	Lease   bool      `json:"lease,omitempty"`   // the key vanishes with the session
}

// reply is an answer to a session, or an event of one of its watches.
type reply struct {
	To      uint64  `json:"-"`                 // the session
	ID      uint64  `json:"id,omitempty"`      // of its request
	Entries []Entry `json:"entries,omitempty"` // what a Get, List or Swap has found, or what has changed; nil if nothing
	Number  int64   `json:"number,omitempty"`  // the sum of an Add
	OK      bool    `json:"ok,omitempty"`      // a Swap was made
	Fault   string  `json:"fault,omitempty"`   // why the request was refused
	Kind    kind    `json:"kind,omitempty"`    // of that

	Event   bool `json:"event,omitempty"`   // of a watch: the request stays in flight
	Deleted bool `json:"deleted,omitempty"` // of an event: the key is gone
}

// Entry is a key with its value.
type Entry struct {
	Key     string `json:"key"`             // any text of at most 64 KiB
	Value   []byte `json:"value,omitempty"` // nil and empty are alike
	Version uint64 `json:"version"`         // grows with every change of the store
}

// state is the state machine of a store. Its answers depend on the calls alone: who replicates it makes the same
// calls, in the same order, on every replica. The zero value is ready.
type state struct {
	version  uint64             // of the last change
	bytes    int                // of all keys and values, which the options bound
	entries  map[string]*entry  // by key; nil before the first
	sessions map[uint64]*held   // what each open session holds, by number; nil before the first
	waiting  map[string][]place // Gets of keys that do not exist
	watches  []watch            // in the order in which they began
}

type entry struct {
	value   []byte // never changed in place
	version uint64 // of the change that made it
	session uint64 // that set it
	lease   bool   // it vanishes with the session
}

// held is what a session holds.
type held struct {
	waits   map[uint64]string // keys, by request
	watches int               // number of them, which is bounded
}

// place is a request of a session.
type place struct{ session, id uint64 }

type watch struct {
	place
	prefix string // of the keys that it reports
}

// Open begins a session, whose number was never used before.
func (s *state) Open(session uint64) {
	if s.sessions == nil {
		s.sessions = map[uint64]*held{}
		s.entries = map[string]*entry{}
		s.waiting = map[string][]place{}
	}
	s.sessions[session] = &held{waits: map[uint64]string{}}
}

// End ends a session: its leases vanish, and nobody waits for it.
func (s *state) End(session uint64) (replies []reply) {
	h := s.sessions[session]
	if h == nil {
		return nil
	}
	for id := range h.waits {
		s.stop(place{session, id})
	}
	delete(s.sessions, session)
	s.watches = slices.DeleteFunc(s.watches, func(w watch) bool { return w.session == session })
	var leases []string
	for key, e := range s.entries {
		if e.lease && e.session == session {
			leases = append(leases, key)
		}
	}
	slices.Sort(leases)
	for _, key := range leases {
		replies = s.remove(replies, key)
	}
	return replies
}

// refuse says that a session asks for more than it may have.
func (r *reply) refuse(fault string) {
	r.Fault = fault
	r.Kind = kindFull
}

// Apply makes a request of an open session. It returns answers and events in the order in which each session is to
// get its own.
func (s *state) Apply(session uint64, r *request) (replies []reply) {
	h := s.sessions[session]
	if h == nil {
		return nil
	}
	origin := place{session, r.ID}
	e := s.entries[r.Key]
	version := uint64(0) // of a key that does not exist
	if e != nil {
		version = e.version
	}
	answer := reply{To: session, ID: r.ID}
	waits := false
	switch op := r.Op; {
	case len(r.Key) > longestKey:
		answer.Fault = fmt.Sprintf("a key of %d bytes, at most %d", len(r.Key), longestKey)
	case op == opSet:
		replies = s.put(origin, r, r.Value, &answer)
	case op == opSwap && r.Version == version:
		answer.OK = true
		replies = s.put(origin, r, r.Value, &answer)
	case op == opSwap:
		if e != nil {
			answer.Entries = s.view(r.Key)
		}
	case op == opAdd:
		sum := r.Delta // of a key that does not exist
		var err error
		if e != nil {
			sum, err = increase(e.value, r.Delta)
		}
		if err != nil {
			answer.Fault = fmt.Sprintf("%.100q is no counter, or its sum is none", r.Key)
			break
		}
		answer.Number = sum
		replies = s.put(origin, r, strconv.AppendInt(nil, sum, 10), &answer)
	case op == opGet && e != nil:
		answer.Entries = s.view(r.Key)
	case op == opGet:
		if _, twice := h.waits[r.ID]; len(h.waits) == mostWaits || twice {
			answer.refuse("too many waits, or two by one ID")
			break
		}
		h.waits[r.ID] = r.Key
		s.waiting[r.Key] = append(s.waiting[r.Key], origin)
		waits = true
	case op == opList:
		answer.Entries = s.list(r.Key)
	case op == opDelete:
		if e != nil && (r.Version == 0 || r.Version == version) {
			replies = s.remove(nil, r.Key)
		}
	case op == opWatch && h.watches == mostWatches:
		answer.refuse("too many watches")
	case op == opWatch:
		h.watches++
		s.watches = append(s.watches, watch{origin, r.Key})
		answer.Entries = s.list(r.Key)
	case op == opStop:
		s.stop(place{session, r.Version})
	case op != opPing:
		answer.Fault = fmt.Sprintf("there is no operation %.100q", op)
	}
	if !waits && (r.ID > 0 || r.Op == opPing) {
		replies = append(replies, answer)
	}
	return replies
}

// increase returns the sum of a counter, a decimal number, and delta.
func increase(counter []byte, delta int64) (sum int64, err error) {
	value, err := strconv.ParseInt(string(counter), 10, 64)
	if err != nil {
		return 0, err
	}
	sum = value + delta
	if (sum < value) != (delta < 0) {
		return 0, strconv.ErrRange
	}
	return sum, nil
}

// put sets a key and tells who waits for it and who watches it.
func (s *state) put(origin place, r *request, value []byte, answer *reply) (replies []reply) {
	old := s.entries[r.Key]
	grows := len(r.Key) + len(value)
	if old != nil {
		grows = len(value) - len(old.value)
	}
	switch {
	case len(value) > MaxValue:
		answer.Fault = fmt.Sprintf("a value of %d bytes, at most %d", len(value), MaxValue)
	case s.bytes+grows > mostBytes || old == nil && len(s.entries) == mostKeys:
		answer.Fault = fmt.Sprintf("the store has %d keys and %d bytes", len(s.entries), s.bytes)
		answer.Kind = kindFull
	}
	if answer.Fault != "" {
		answer.OK = false
		return nil
	}
	s.version++
	s.bytes += grows
	s.entries[r.Key] = &entry{value, s.version, origin.session, r.Lease}
	now := s.view(r.Key)
	if r.Op == opSwap {
		answer.Entries = now
	}
	replies = s.tell(nil, reply{Event: true, Entries: now})
	for _, w := range s.waiting[r.Key] {
		replies = append(replies, reply{To: w.session, ID: w.id, Entries: now})
		delete(s.sessions[w.session].waits, w.id)
	}
	delete(s.waiting, r.Key)
	return replies
}

// remove deletes a key that exists.
func (s *state) remove(replies []reply, key string) []reply {
	last := s.view(key)
	s.bytes -= len(key) + len(s.entries[key].value)
	delete(s.entries, key)
	s.version++
	last[0].Version = s.version
	return s.tell(replies, reply{Event: true, Deleted: true, Entries: last})
}

// tell adds an event for each watch.
func (s *state) tell(replies []reply, event reply) []reply {
	for _, w := range s.watches {
		if !strings.HasPrefix(event.Entries[0].Key, w.prefix) {
			continue
		}
		event.To = w.session
		event.ID = w.id
		replies = append(replies, event)
	}
	return replies
}

// stop ends a Get or a Watch.
func (s *state) stop(p place) {
	h := s.sessions[p.session]
	if key, ok := h.waits[p.id]; ok {
		delete(h.waits, p.id)
		s.waiting[key] = slices.DeleteFunc(s.waiting[key], func(w place) bool { return w == p })
		if len(s.waiting[key]) == 0 {
			delete(s.waiting, key)
		}
	}
	if i := slices.IndexFunc(s.watches, func(w watch) bool { return w.place == p }); i >= 0 {
		s.watches = slices.Delete(s.watches, i, i+1)
		h.watches--
	}
}

// view is the entry of a key.
func (s *state) view(key string) []Entry {
	e := s.entries[key]
	return []Entry{{Key: key, Value: e.value, Version: e.version}}
}

// list is the entries of a prefix, by key.
func (s *state) list(prefix string) (all []Entry) {
	for key := range s.entries {
		if strings.HasPrefix(key, prefix) {
			all = append(all, s.view(key)...)
		}
	}
	slices.SortFunc(all, func(a, b Entry) int { return cmp.Compare(a.Key, b.Key) })
	return all
}
