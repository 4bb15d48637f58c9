package rendezvous

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
)

// The exchange, for each of the ranks 1 to WorldSize-1:
//
//	rank 0 -> rank r   greeting: magic, 32 random bytes
//	rank r -> rank 0   hello:    magic, rank, world size, 32 random bytes, MAC
//	rank 0 -> rank r   reply:    outcome, length, payload or the reason of a refusal, MAC
//	rank r -> rank 0   receipt:  MAC
//
// A MAC is HMAC-SHA256 over everything said so far in both directions and the
// name of the step, so neither side accepts a stranger, a replay or its own
// words. Its key is made of the job's secret and the port. Nothing is encrypted.
//
// The random bytes of rank r are the same in all its attempts: they tell a rank
// that tries again from another process that has the same rank.
const (
	magic      = "tutti/rendezvous/2"
	nonceBytes = 32
	// maxPayload bounds what a peer may announce, maxReason one that may be a
	// stranger.
	maxPayload = 1 << 20
	maxReason  = 1 << 10
)

// Kinds of replies.
const (
	replyPayload = iota
	replyRefusal
)

// ErrRefused: the other side does not know the secret, is of another job, or
// has reasons not to take this rank.
var ErrRefused = errors.New("refused")

// refusal is an answer that brings no payload.
type refusal struct {
	by     string // the other side's address
	reason string
	proven bool // by rank 0 of this job
}

func (r *refusal) Error() string {
	if r.proven {
		return fmt.Sprintf("%v by rank 0 (%s): %s", ErrRefused, r.by, r.reason)
	}
	return fmt.Sprintf("%v: what listens on %s is not rank 0 of this job: %s", ErrRefused, r.by, r.reason)
}

func (r *refusal) Unwrap() error { return ErrRefused }

// key authenticates the words of this job.
func (j Job) key() []byte {
	_, port, _ := net.SplitHostPort(j.Address)
	h := hmac.New(sha256.New, j.Secret)
	io.WriteString(h, magic+" port "+port) //nolint:errcheck // hashes never fail
	return h.Sum(nil)
}

// talk is one connection and what was said on it.
type talk struct {
	conn net.Conn
	key  []byte
	said []byte
}

func (t *talk) send(words []byte) error {
	t.said = append(t.said, words...)
	_, err := t.conn.Write(words)
	return err
}

func (t *talk) receive(n int) ([]byte, error) {
	words := make([]byte, n)
	if _, err := io.ReadFull(t.conn, words); err != nil {
		return nil, err
	}
	t.said = append(t.said, words...)
	return words, nil
}

// mac authenticates what was said up to a step.
func (t *talk) mac(step string) []byte {
	h := hmac.New(sha256.New, t.key)
	io.WriteString(h, step) //nolint:errcheck // hashes never fail
	h.Write(t.said)
	return h.Sum(nil)
}

// check receives the MAC of a step, and reports whether it is right.
func (t *talk) check(step string) (bool, error) {
	want := t.mac(step)
	got, err := t.receive(sha256.Size)
	return err == nil && hmac.Equal(got, want), err
}

// reply sends a whole reply.
func (t *talk) reply(outcome byte, body []byte) error {
	head := binary.BigEndian.AppendUint32([]byte{outcome}, uint32(len(body)))
	if err := t.send(append(head, body...)); err != nil {
		return err
	}
	return t.send(t.mac("reply"))
}

// greet is rank 0's first step.
func (t *talk) greet() error {
	return t.send(append([]byte(magic), newNonce()...))
}

// hello is who somebody says to be.
type hello struct {
	rank, size int
	nonce      string
}

// Reasons of rank 0 to refuse somebody.
const (
	reasonSilence  = "it did not say who it is"
	reasonLanguage = "it does not speak this protocol"
	reasonSecret   = "it knows another secret: it is of another job, or " + SecretVariable + " is not the same everywhere"
	reasonKnown    = "it knows the secret, but"
)

// hear is rank 0's second step: it returns who the peer is if that knows the
// secret, and a reason otherwise.
func (t *talk) hear() (h hello, reason string) {
	if words, err := t.receive(len(magic)); err != nil {
		return h, reasonSilence
	} else if string(words) != magic {
		return h, reasonLanguage
	}
	words, err := t.receive(4 + 4 + nonceBytes)
	if err != nil {
		return h, reasonSilence
	}
	switch known, err := t.check("hello"); {
	case err != nil:
		return h, reasonSilence
	case !known:
		return h, reasonSecret
	}
	return hello{
		rank:  int(binary.BigEndian.Uint32(words)),
		size:  int(binary.BigEndian.Uint32(words[4:])),
		nonce: string(words[8:]),
	}, ""
}

// introduce is the whole of the other ranks' side, once the connection has
// brought the greeting: it returns the payload or a [refusal].
func (t *talk) introduce(h hello) ([]byte, error) {
	words := binary.BigEndian.AppendUint32([]byte(magic), uint32(h.rank))
	words = binary.BigEndian.AppendUint32(words, uint32(h.size))
	if err := t.send(append(words, h.nonce...)); err != nil {
		return nil, t.stranger("it went away")
	}
	if err := t.send(t.mac("hello")); err != nil {
		return nil, t.stranger("it went away")
	}
	head, err := t.receive(5)
	if err != nil {
		return nil, t.stranger("it did not answer")
	}
	outcome, n := head[0], binary.BigEndian.Uint32(head[1:])
	if outcome == replyPayload && n > maxPayload || outcome == replyRefusal && n > maxReason || outcome > replyRefusal {
		return nil, t.stranger(reasonLanguage)
	}
	body, err := t.receive(int(n))
	if err != nil {
		return nil, t.stranger("it did not answer")
	}
	switch known, err := t.check("reply"); {
	case err != nil:
		return nil, t.stranger("it did not answer")
	case outcome == replyRefusal && known:
		return nil, &refusal{t.conn.RemoteAddr().String(), string(body), true}
	case outcome == replyRefusal: // anybody's words
		return nil, t.stranger("it says that " + strconv.QuoteToASCII(string(body)))
	case !known:
		return nil, t.stranger("it does not know the secret")
	}
	return body, t.send(t.mac("receipt"))
}

// stranger is the refusal of somebody who did not prove to be rank 0.
func (t *talk) stranger(reason string) error {
	return &refusal{by: t.conn.RemoteAddr().String(), reason: reason}
}

// newNonce returns random bytes. Reading them never fails.
func newNonce() []byte {
	nonce := make([]byte, nonceBytes)
	rand.Read(nonce) //nolint:errcheck // documented never to fail
	return nonce
}
