package tcp

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/printable"
)

// protocol is the name and version of what lanes speak (ALPN).
const protocol = "tutti-tcp/5"

const (
	// longestReason bounds the text of a refusal, in bytes.
	longestReason = 1 << 10
	// pings is how often the round trip is measured where the kernel does not tell it, and so the maximum of hellos of
	// a connection before the one that makes it a lane.
	pings = 4
	// maxAddresses and longestAddress bound what a rank may publish: a host has an address for each of its interfaces.
	maxAddresses   = 256
	longestAddress = 300
)

// record is what a rank publishes in the store.
type record struct {
	Protocol  string   // in all versions
	Nonce     uint64   // of this attempt
	Addresses []string // to connect to
}

// run is the name of the world in flight records, by the record of rank 0.
func (r *record) run() string { return fmt.Sprintf("tcp %016x", r.Nonce) }

// readRecord returns what a rank has published, if that is a record.
func readRecord(rank int, text []byte) (r record, err error) {
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("what rank %d has published is no record: %.200v", rank, err)
	}
	if r.Protocol != protocol { // whatever else it says
		return r, fmt.Errorf("%w: %w: rank %d speaks %.40q, this one %q: all ranks use one version of this library",
			comm.ErrMismatch, store.ErrRefused, rank, r.Protocol, protocol)
	}
	if len(r.Addresses) == 0 || len(r.Addresses) > maxAddresses {
		return r, fmt.Errorf("rank %d has published %d addresses", rank, len(r.Addresses))
	}
	for _, address := range r.Addresses { // of whatever form the network's are
		if address == "" || len(address) > longestAddress || printable.Text(address) != address {
			return r, fmt.Errorf("rank %d has published an address that is none: %.100q", rank, address)
		}
	}
	return r, nil
}

// hello is what the dialing side says on a connection. It gets a verdict. One that asks for no
// lanes is to measure the round trip, and another one follows. It says which rank it comes from; that this is one of
// the job, TLS has proved before ([store.TLS]).
type hello struct {
	Nonce    uint64 // of the record that it has read
	Attempt  uint64 // grows with each, also from a process to the next one of its rank
	Silence  int64  // of its Config
	From, To uint32 // ranks
	Size     uint32 // of the world
	Control  uint32 // length of control messages
	Lane     uint32 // number that the connection is to have
	Lanes    uint32 // of the pair; 0 to measure the round trip
	Window   uint32 // of the pair's credit, in bytes
}

// verdict is the answer to a hello. After one that is no welcome come the reason, and the end.
type verdict byte

const (
	welcome verdict = iota
	retry           // the rank may be at another address, or try again
	refuse          // for good
)

// greet says hello and waits for the verdict.
func greet(ctx context.Context, conn *tls.Conn, h hello) error {
	defer context.AfterFunc(ctx, func() { _ = conn.NetConn().Close() })()
	if err := binary.Write(conn, binary.LittleEndian, h); err != nil {
		return err
	}
	var v [1]byte
	if _, err := io.ReadFull(conn, v[:]); err != nil {
		return err
	}
	if verdict(v[0]) == welcome {
		return nil
	}
	sent, _ := io.ReadAll(io.LimitReader(conn, longestReason))
	reason := printable.Text(string(sent))
	if verdict(v[0]) == retry {
		return fmt.Errorf("%v: %s", conn.RemoteAddr(), reason)
	}
	return fmt.Errorf("%w: %w by rank %d: %s", comm.ErrPeerFailed, store.ErrRefused, h.To, reason)
}

// answer serves a connection until it ends.
func (k *connector) answer(g *gate.Gate, conn *tls.Conn) {
	_ = conn.SetDeadline(time.Now().Add(greetTime))
	for hellos := 0; ; hellos++ {
		var h hello
		if err := binary.Read(conn, binary.LittleEndian, &h); err != nil {
			g.Refuse(conn, "hello", "it did not say who it is")
			return
		}
		v, reason := k.judge(&h)
		if v == welcome && h.Lanes == 0 && hellos == pings { // otherwise what nobody reads fills the connection
			v = refuse
			reason = fmt.Sprintf("rank %d measures the round trip more than %d times", h.From, pings)
		}
		if v == welcome && h.Lanes > 0 {
			if k.serveLane(&h, conn) {
				return
			}
			v = retry
			reason = "a later attempt has begun"
		}
		if v != welcome {
			g.Refuse(conn, "rank", reason)
		}
		if v == refuse && uint64(h.From) < uint64(k.size) {
			k.note(k.pairs[h.From], errors.New(reason))
		}
		if _, err := conn.Write(append([]byte{byte(v)}, reason...)); err != nil || v != welcome {
			return
		}
	}
}

// serveLane makes a connection a lane, and returns true when that has ended. It returns false if the connection
// becomes none.
func (k *connector) serveLane(h *hello, conn *tls.Conn) bool {
	l := k.join(k.pairs[h.From], h, conn, true)
	if l == nil {
		return false
	}
	_ = conn.SetDeadline(time.Time{})
	if k.watch(l) == nil {
		<-l.pair.dead // the gate closes the connection then
	}
	return true
}

// judge returns the verdict on a hello, and its reason.
func (k *connector) judge(h *hello) (v verdict, reason string) {
	rank := int64(h.From)
	lanes := h.Lanes <= maxLanes && h.Lane < h.Lanes
	window := h.Window >= minWindow && h.Window <= maxWindow
	switch {
	case h.Nonce != k.record.Nonce || int64(h.To) != int64(k.rank):
		return retry, fmt.Sprintf("it looks for rank %d of another start of the job; this is rank %d", h.To, k.rank)
	case int64(h.Size) != int64(k.size):
		reason = fmt.Sprintf("rank %d of %d in a job of %d", rank, h.Size, k.size)
	case rank <= int64(k.rank) || rank >= int64(k.size):
		reason = fmt.Sprintf("rank %d has no business with rank %d of %d", rank, k.rank, k.size)
	case int64(h.Control) != int64(schedule.ControlBytes):
		reason = "it is another version of this library"
	case h.Silence != int64(k.config.Silence):
		reason = fmt.Sprintf("rank %d may be silent for %v, rank %d for %v: all ranks need the same",
			rank, time.Duration(h.Silence), k.rank, k.config.Silence)
	case h.Lanes > 0 && !(lanes && window):
		reason = fmt.Sprintf("rank %d asks for lane %d of %d, %d bytes", rank, h.Lane, h.Lanes, h.Window)
	default:
		return welcome, ""
	}
	return refuse, reason
}
