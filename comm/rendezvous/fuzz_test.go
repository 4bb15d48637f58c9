package rendezvous

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const treasure = "treasure"

// fuzzJob's rank 1 and a new rank 0 of its talk in the tests below.
var fuzzJob = Job{Rank: 1, WorldSize: 3, Address: "127.0.0.1:4000", Secret: []byte("a secret")}

func zeroOn(c net.Conn) (reason string) {
	s := newServer(fuzzJob, []byte(treasure))
	return s.answer(&visitor{conn: c})
}

func oneOn(c net.Conn) ([]byte, error) {
	t := &talk{conn: c, key: fuzzJob.key()}
	if _, err := t.receive(len(magic) + keyBytes); err != nil {
		return nil, err
	}
	return t.introduce(newHello(1, 3))
}

// link joins two ends in memory. When both wait for each other, it is over.
type link struct {
	mu      sync.Mutex
	change  sync.Cond
	buffers [2]bytes.Buffer // what each end may read
	waiting int
	over    bool
	heard   [2]bytes.Buffer // what each end wrote
	// What end number side writes is changed at one byte, or lost from there on.
	side, at int
	flip     byte
}

// end is one of them.
type end struct {
	net.Conn // addresses and deadlines are of no use
	*link
	number int
}

func (e end) Read(b []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	own := &e.buffers[e.number]
	e.waiting++
	for own.Len() == 0 && !e.over {
		if e.waiting == 2 && e.buffers[1-e.number].Len() == 0 {
			e.hangUp()
			break
		}
		e.change.Wait()
	}
	e.waiting--
	return own.Read(b)
}

func (e end) Write(b []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	words := bytes.Clone(b)
	if e.number == e.side {
		if i := e.at; i >= 0 && i < len(words) {
			words[i] ^= e.flip
			if e.flip == 0 {
				words = words[:i]
			}
		}
		e.at -= len(b)
		if e.at < 0 && e.flip == 0 {
			defer e.hangUp()
		}
	}
	e.buffers[1-e.number].Write(words)
	e.heard[e.number].Write(words)
	e.change.Broadcast()
	return len(b), nil
}

// hangUp is called with the lock held.
func (l *link) hangUp() {
	l.over = true
	l.change.Broadcast()
}

func (e end) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.hangUp()
	return nil
}

func (e end) SetDeadline(time.Time) error { return nil }
func (e end) RemoteAddr() net.Addr        { return &net.TCPAddr{} }

// FuzzExchange changes or cuts what one of the sides says: rank 1 takes no
// payload but the right one, and rank 0 knows whether it did.
func FuzzExchange(f *testing.F) {
	greeting := len(magic) + keyBytes
	f.Add(true, 60, byte(0))
	f.Add(true, 3, byte(1))               // the magic
	f.Add(true, greeting, byte(1))        // the kind of the reply
	f.Add(true, greeting+1, byte(0x80))   // its length
	f.Add(true, greeting+4, byte(0x08))   // the same
	f.Add(true, greeting+5, byte(1))      // the payload
	f.Add(false, len(magic)+3, byte(3))   // the rank
	f.Add(false, len(magic)+80, byte(0))  // in the receipt
	f.Add(false, len(magic)+130, byte(0)) // behind it
	f.Fuzz(func(t *testing.T, zero bool, at int, flip byte) {
		l := &link{side: 1, at: at, flip: flip}
		if zero {
			l.side = 0
		}
		l.change.L = &l.mu
		reason := make(chan string)
		go func() {
			e := end{link: l, number: 0}
			why := zeroOn(e)
			e.Close() //nolint:errcheck
			reason <- why
		}()
		e := end{link: l, number: 1}
		payload, err := oneOn(e)
		e.Close() //nolint:errcheck
		if err == nil {
			assert.Equal(t, treasure, string(payload))
		}
		if <-reason == "" {
			assert.NoError(t, err, "rank 0 believes that rank 1 has the payload")
		}
	})
}

// monologue is a connection to somebody who says something and hangs up.
type monologue struct {
	net.Conn
	io.Reader
	heard bytes.Buffer
}

func (m *monologue) Read(b []byte) (int, error)  { return m.Reader.Read(b) }
func (m *monologue) Write(b []byte) (int, error) { return m.heard.Write(b) }
func (m *monologue) SetDeadline(time.Time) error { return nil }
func (m *monologue) RemoteAddr() net.Addr        { return &net.TCPAddr{} }

// FuzzStranger says anything to both sides: neither gives or takes a payload.
func FuzzStranger(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
	f.Add(append([]byte(magic), make([]byte, 4+4+keyBytes+32)...))
	f.Add(append([]byte(magic), make([]byte, keyBytes+5+32)...))
	f.Add(append(append([]byte(magic), make([]byte, keyBytes)...), replyRefusal, 0, 0, 0, 2, 'n', 'o'))
	f.Fuzz(func(t *testing.T, words []byte) {
		m := &monologue{Reader: bytes.NewReader(words)}
		assert.NotEmpty(t, zeroOn(m))
		assert.NotContains(t, m.heard.String(), treasure)
		payload, err := oneOn(&monologue{Reader: bytes.NewReader(words)})
		assert.Error(t, err)
		assert.Nil(t, payload)
	})
}

// The link of the tests above brings an exchange to its end.
func TestUntouchedExchange(t *testing.T) {
	l := &link{side: -1}
	l.change.L = &l.mu
	reason := make(chan string)
	go func() { reason <- zeroOn(end{link: l, number: 0}) }()
	payload, err := oneOn(end{link: l, number: 1})
	require.NoError(t, err)
	assert.Equal(t, treasure, string(payload))
	assert.Empty(t, <-reason)
	for i := range l.heard {
		assert.NotContains(t, l.heard[i].String(), treasure, "who listens does not learn it")
	}
}

// One who knows the secret and listens, or has listened, does not learn the payload: it
// takes a private key, too. Who proposes a key that leaves nothing secret gets none.
func TestPayloadTakesAPrivateKey(t *testing.T) {
	talks := func() (*talk, *talk) {
		zero := &talk{key: fuzzJob.key(), private: newKey(), said: []byte("the same")}
		one := &talk{key: fuzzJob.key(), private: newKey(), said: []byte("the same")}
		zero.public, one.public = one.private.PublicKey().Bytes(), zero.private.PublicKey().Bytes()
		return zero, one
	}
	zero, one := talks()
	gcm, nonce, err := zero.payloadCipher()
	require.NoError(t, err)
	sealed := gcm.Seal(nil, nonce, []byte(treasure), nil)
	gcm, _, err = one.payloadCipher()
	require.NoError(t, err)
	payload, err := gcm.Open(nil, nonce, sealed, nil)
	require.NoError(t, err)
	assert.Equal(t, treasure, string(payload))

	listener := *one
	listener.private = newKey()
	gcm, _, err = listener.payloadCipher()
	require.NoError(t, err)
	_, err = gcm.Open(nil, nonce, sealed, nil)
	assert.Error(t, err)

	zero.public = make([]byte, keyBytes)
	_, _, err = zero.payloadCipher()
	assert.Error(t, err)
}
