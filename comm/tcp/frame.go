package tcp

import "encoding/binary"

// kind is the kind of a frame.
type kind uint8

const (
	frameAnnouncement kind = iota + 1 // of a message, with the beginning of its eager part
	framePart                         // a part of an announced message
	frameGrant                        // the receive is posted: the parts behind the eager one may come
	frameControl                      // a control message of an engine
	frameBeat                         // a sign of life, or credit
	frameGoodbye                      // the last frame of a lane whose rank leaves
	frameGoodbyeAck                   // the goodbyes of all lanes have come
)

// header precedes the payload of each frame. A field that a kind does not have is zero.
type header struct {
	kind   kind   // one of the frame… constants
	report bool   // of a control message: it is a status report
	length int    // of the payload, in bytes
	credit uint64 // bytes that the receiver of this frame may send early again

	communicator uint64 // its ID, of an announcement or a control message
	message      uint64 // its number, of a part or a grant
	tag          uint64 // of an announcement
	offset       uint64 // of a part, in bytes from the beginning of its message
	total        uint64 // of an announcement: bytes of the message
	eager        uint64 // of an announcement: bytes that come without a grant
}

// A header on the wire, in little-endian order:
//
//	 0  kind
//	 1  1 for a status report
//	 4  length, 32 bits
//	 8  credit
//	16  communicator; of a part or a grant the message
//	24  tag; of a part the offset
//	32  total
//	40  eager
const headerBytes = 48

// ofMessage reports whether the frame belongs to a message that was announced.
func (h *header) ofMessage() bool {
	return h.kind == framePart || h.kind == frameGrant
}

// put writes the header to the beginning of b.
func (h *header) put(b []byte) {
	subject := h.communicator
	place := h.tag
	if h.ofMessage() {
		subject = h.message
		place = h.offset
	}
	clear(b[:headerBytes])
	b[0] = byte(h.kind)
	if h.report {
		b[1] = 1
	}
	binary.LittleEndian.PutUint32(b[4:], uint32(h.length))
	binary.LittleEndian.PutUint64(b[8:], h.credit)
	binary.LittleEndian.PutUint64(b[16:], subject)
	binary.LittleEndian.PutUint64(b[24:], place)
	binary.LittleEndian.PutUint64(b[32:], h.total)
	binary.LittleEndian.PutUint64(b[40:], h.eager)
}

// get reads the header at the beginning of b.
func (h *header) get(b []byte) {
	*h = header{
		kind:   kind(b[0]),
		report: b[1] != 0,
		length: int(binary.LittleEndian.Uint32(b[4:])),
		credit: binary.LittleEndian.Uint64(b[8:]),
		total:  binary.LittleEndian.Uint64(b[32:]),
		eager:  binary.LittleEndian.Uint64(b[40:]),
	}
	subject := binary.LittleEndian.Uint64(b[16:])
	place := binary.LittleEndian.Uint64(b[24:])
	if h.ofMessage() {
		h.message = subject
		h.offset = place
	} else {
		h.communicator = subject
		h.tag = place
	}
}
