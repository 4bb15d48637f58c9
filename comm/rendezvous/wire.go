package rendezvous

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
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
//	rank 0 -> rank r   greeting: magic, a new public key
//	rank r -> rank 0   hello:    magic, rank, world size, a public key, MAC
//	rank 0 -> rank r   reply:    outcome, length, payload (encrypted) or the reason of a refusal, MAC
//	rank r -> rank 0   receipt:  MAC
//
// A MAC is HMAC-SHA256 over all bytes so far in both directions and the name of the step,
// so neither side accepts a stranger, a replay or its own messages. Its key is derived from
// the job's secret and the port. The payload is encrypted (AES-GCM) with the shared secret
// of the two keys (X25519). An eavesdropper does not learn it, even with the job's secret.
//
// The key of rank r is the same in all its attempts. It distinguishes a rank that tries
// again from another process with the same rank.
const (
	magic    = "tutti/rendezvous/3"
	keyBytes = 32
	// maxPayload bounds the length in a reply of rank 0, maxReason that of a refusal, which
	// may come from a stranger.
	maxPayload = 1 << 20
	maxReason  = 1 << 10
)

// Kinds of replies.
const (
	replyPayload = iota
	replyRefusal
)

// ErrRefused means that the other side does not know the secret, is of another job, or
// refuses this rank for another reason.
var ErrRefused = errors.New("refused")

// refusal is an answer without the payload.
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

// key authenticates the messages of this job.
func (j Job) key() []byte {
	_, port, _ := net.SplitHostPort(j.Address)
	h := hmac.New(sha256.New, j.Secret)
	io.WriteString(h, magic+" port "+port) //nolint:errcheck // hashes never fail
	return h.Sum(nil)
}

// talk is one connection and all bytes that were sent on it.
type talk struct {
	conn    net.Conn
	key     []byte
	said    []byte           // in both directions
	private *ecdh.PrivateKey // this side's
	public  []byte           // the other side's
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

// mac authenticates all bytes up to a step.
func (t *talk) mac(step string) []byte {
	h := hmac.New(sha256.New, t.key)
	io.WriteString(h, step) //nolint:errcheck // hashes never fail
	h.Write(t.said)
	return h.Sum(nil)
}

// check receives the MAC of a step and reports whether it is right.
func (t *talk) check(step string) (bool, error) {
	want := t.mac(step)
	got, err := t.receive(sha256.Size)
	return err == nil && hmac.Equal(got, want), err
}

// payloadCipher encrypts a payload with a key that depends on all bytes so far. A pair of
// keys is used for one message, so the nonce may be zero.
func (t *talk) payloadCipher() (cipher.AEAD, []byte, error) {
	public, err := ecdh.X25519().NewPublicKey(t.public)
	if err != nil {
		return nil, nil, err
	}
	shared, err := t.private.ECDH(public)
	if err != nil {
		return nil, nil, err
	}
	h := hmac.New(sha256.New, t.mac("payload"))
	h.Write(shared)
	block, err := aes.NewCipher(h.Sum(nil))
	if err != nil {
		return nil, nil, err
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		return nil, nil, err
	}
	return gcm, make([]byte, gcm.NonceSize()), nil
}

// give sends the payload.
func (t *talk) give(payload []byte) error {
	gcm, nonce, err := t.payloadCipher()
	if err != nil {
		return err
	}
	return t.reply(replyPayload, gcm.Seal(nil, nonce, payload, nil))
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
	t.private = newKey()
	return t.send(append([]byte(magic), t.private.PublicKey().Bytes()...))
}

// hello is the rank that a process claims.
type hello struct {
	rank, size int
	public     string           // key
	private    *ecdh.PrivateKey // in the process itself
}

func newHello(rank, size int) hello {
	key := newKey()
	return hello{rank, size, string(key.PublicKey().Bytes()), key}
}

// Reasons of rank 0 to refuse a connection.
const (
	reasonSilence  = "it did not say who it is"
	reasonLanguage = "it does not speak this protocol"
	reasonSecret   = "it knows another secret: it is of another job, or " + SecretVariable + " is not the same everywhere"
	reasonGone     = "it went away"
	reasonKnown    = "it knows the secret, but"
)

// hear is rank 0's second step. It returns the peer's rank if the peer knows the secret, and
// a reason otherwise.
func (t *talk) hear() (h hello, reason string) {
	if words, err := t.receive(len(magic)); err != nil {
		return h, reasonSilence
	} else if string(words) != magic {
		return h, reasonLanguage
	}
	words, err := t.receive(4 + 4 + keyBytes)
	if err != nil {
		return h, reasonSilence
	}
	switch known, err := t.check("hello"); {
	case err != nil:
		return h, reasonSilence
	case !known:
		return h, reasonSecret
	}
	t.public = words[8:]
	return hello{
		rank:   int(binary.BigEndian.Uint32(words)),
		size:   int(binary.BigEndian.Uint32(words[4:])),
		public: string(t.public),
	}, ""
}

// introduce is the other ranks' side after the greeting. It returns the payload or a
// [refusal].
func (t *talk) introduce(h hello) ([]byte, error) {
	t.private, t.public = h.private, t.said[len(magic):]
	words := binary.BigEndian.AppendUint32([]byte(magic), uint32(h.rank))
	words = binary.BigEndian.AppendUint32(words, uint32(h.size))
	if err := t.send(append(words, h.public...)); err != nil {
		return nil, t.stranger(reasonGone)
	}
	if err := t.send(t.mac("hello")); err != nil {
		return nil, t.stranger(reasonGone)
	}
	gcm, nonce, err := t.payloadCipher()
	if err != nil {
		return nil, t.stranger(reasonLanguage)
	}
	head, err := t.receive(5)
	if err != nil {
		return nil, t.stranger("it did not answer")
	}
	outcome, n := head[0], binary.BigEndian.Uint32(head[1:])
	if outcome == replyPayload && n > maxPayload+uint32(gcm.Overhead()) || outcome == replyRefusal && n > maxReason || outcome > replyRefusal {
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
	case outcome == replyRefusal: // of a stranger
		return nil, t.stranger("it says that " + strconv.QuoteToASCII(string(body)))
	case !known:
		return nil, t.stranger("it does not know the secret")
	}
	payload, err := gcm.Open(nil, nonce, body, nil)
	if err != nil {
		return nil, t.stranger(reasonLanguage)
	}
	return payload, t.send(t.mac("receipt"))
}

// stranger is the refusal of a peer that did not prove to be rank 0.
func (t *talk) stranger(reason string) error {
	return &refusal{by: t.conn.RemoteAddr().String(), reason: reason}
}

// newKey returns a random key.
func newKey() *ecdh.PrivateKey {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		panic(err) // reading random bytes is documented never to fail
	}
	return key
}

// newSecret returns random bytes.
func newSecret() []byte {
	secret := make([]byte, 32)
	rand.Read(secret) //nolint:errcheck // documented never to fail
	return secret
}
