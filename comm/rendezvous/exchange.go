package rendezvous

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"
)

// The exchange, for each of the ranks 1 to WorldSize-1:
//
//	rank 0 -> rank r   challenge: 32 random bytes
//	rank r -> rank 0   hello: magic, rank, world size, 32 random bytes, MAC
//	rank 0 -> rank r   reply: length, payload, MAC
//
// Both MACs are HMAC-SHA256 with the job's secret over everything said so far
// in both directions and the direction's name, so neither side accepts a
// stranger, a replay or its own words. The payload is not encrypted.
const (
	magic      = "tutti/rendezvous/1"
	nonceBytes = 32
	helloBytes = len(magic) + 4 + 4 + nonceBytes + sha256.Size
	// maxPayload bounds what a peer may announce.
	maxPayload = 1 << 20
	// patience is how long one connection may take to say hello.
	patience = 10 * time.Second
	// retryEvery is how long a rank waits until it looks for rank 0 again.
	retryEvery = 50 * time.Millisecond
)

// ErrRefused: the other side does not know the secret, or is of another job.
var ErrRefused = errors.New("refused")

// Broadcast gives every rank what rank 0 passes. All ranks of the job call it;
// it returns on rank 0 when all the others have it, and ends with an error when
// ctx does. Connections of strangers are closed and logged.
func (j Job) Broadcast(ctx context.Context, payload []byte) ([]byte, error) {
	if len(payload) > maxPayload {
		return nil, fmt.Errorf("rendezvous: %d bytes to share, at most %d can be", len(payload), maxPayload)
	}
	if j.WorldSize <= 1 {
		return payload, nil
	}
	if j.Rank == 0 {
		return payload, j.serve(ctx, payload)
	}
	return j.fetch(ctx)
}

// serve answers the other ranks until each has the payload.
func (j Job) serve(ctx context.Context, payload []byte) error {
	address, err := j.listenAddress()
	if err != nil {
		return fmt.Errorf("rendezvous: rank 0: %w", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("rendezvous: rank 0: %w", err)
	}
	defer listener.Close() //nolint:errcheck // nothing is lost
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()

	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		served = make(map[int]bool)
	)
	defer wg.Wait()
	for {
		conn, err := listener.Accept()
		if err != nil {
			mu.Lock()
			defer mu.Unlock()
			if len(served) == j.WorldSize-1 {
				return nil
			}
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return fmt.Errorf("rendezvous: rank 0: ranks %v did not come: %w", j.missing(served), err)
		}
		wg.Go(func() {
			defer conn.Close() //nolint:errcheck // nothing is lost
			rank, err := j.answer(ctx, conn, payload)
			if err != nil {
				slog.Warn("rendezvous: connection refused", "from", conn.RemoteAddr(), "err", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			served[rank] = true
			if len(served) == j.WorldSize-1 {
				listener.Close() //nolint:errcheck // ends the loop above
			}
		})
	}
}

// listenAddress is where rank 0 listens. What the others call its host may be no
// address of the host (behind a translation), or mean another one here: Debian
// resolves the host's own name to 127.0.1.1.
func (j Job) listenAddress() (string, error) {
	host, port, err := net.SplitHostPort(j.Address)
	if err != nil {
		return "", err
	}
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
		return j.Address, nil
	}
	return ":" + port, nil
}

// missing lists the ranks that were not served.
func (j Job) missing(served map[int]bool) (ranks []int) {
	for r := 1; r < j.WorldSize; r++ {
		if !served[r] {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// answer is rank 0's side of one connection.
func (j Job) answer(ctx context.Context, conn net.Conn, payload []byte) (rank int, err error) {
	if err := limit(ctx, conn); err != nil {
		return 0, err
	}
	transcript := make([]byte, nonceBytes, nonceBytes+helloBytes)
	if _, err := rand.Read(transcript); err != nil {
		return 0, err
	}
	if _, err := conn.Write(transcript); err != nil {
		return 0, err
	}
	hello := make([]byte, helloBytes)
	if _, err := io.ReadFull(conn, hello); err != nil {
		return 0, fmt.Errorf("%w: no hello: %w", ErrRefused, err)
	}
	said, mac := hello[:helloBytes-sha256.Size], hello[helloBytes-sha256.Size:]
	transcript = append(transcript, said...)
	if string(said[:len(magic)]) != magic || !hmac.Equal(mac, j.mac("hello", transcript)) {
		return 0, fmt.Errorf("%w: the peer does not know this job's secret", ErrRefused)
	}
	numbers := said[len(magic):]
	rank, size := int(binary.BigEndian.Uint32(numbers)), int(binary.BigEndian.Uint32(numbers[4:]))
	if size != j.WorldSize || rank < 1 || rank >= size {
		return 0, fmt.Errorf("%w: rank %d of %d in a job of %d", ErrRefused, rank, size, j.WorldSize)
	}
	reply := binary.BigEndian.AppendUint32(nil, uint32(len(payload)))
	reply = append(reply, payload...)
	reply = append(reply, j.mac("reply", append(transcript, reply...))...)
	_, err = conn.Write(reply)
	return rank, err
}

// fetch is the side of the other ranks. Rank 0 may start later, or somebody
// else may have its port for a moment, so they try until ctx ends.
func (j Job) fetch(ctx context.Context) ([]byte, error) {
	for {
		payload, err := j.ask(ctx)
		if err == nil {
			return payload, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("rendezvous: rank %d: %w; last attempt to reach rank 0: %w", j.Rank, context.Cause(ctx), err)
		case <-time.After(retryEvery):
		}
	}
}

// ask makes one attempt.
func (j Job) ask(ctx context.Context) ([]byte, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", j.Address)
	if err != nil {
		return nil, err
	}
	defer conn.Close() //nolint:errcheck // nothing is lost
	if err := limit(ctx, conn); err != nil {
		return nil, err
	}
	transcript := make([]byte, nonceBytes)
	if _, err := io.ReadFull(conn, transcript); err != nil {
		return nil, err
	}
	said := []byte(magic)
	said = binary.BigEndian.AppendUint32(said, uint32(j.Rank))
	said = binary.BigEndian.AppendUint32(said, uint32(j.WorldSize))
	nonce := make([]byte, nonceBytes)
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	said = append(said, nonce...)
	transcript = append(transcript, said...)
	if _, err := conn.Write(append(said, j.mac("hello", transcript)...)); err != nil {
		return nil, err
	}
	length := make([]byte, 4)
	if _, err := io.ReadFull(conn, length); err != nil {
		return nil, fmt.Errorf("%w by rank 0: %w", ErrRefused, err)
	}
	n := binary.BigEndian.Uint32(length)
	if n > maxPayload {
		return nil, fmt.Errorf("%w: the peer announces %d bytes", ErrRefused, n)
	}
	reply := make([]byte, int(n)+sha256.Size)
	if _, err := io.ReadFull(conn, reply); err != nil {
		return nil, err
	}
	payload, mac := reply[:n], reply[n:]
	transcript = append(append(transcript, length...), payload...)
	if !hmac.Equal(mac, j.mac("reply", transcript)) {
		return nil, fmt.Errorf("%w: the peer on %s does not know this job's secret", ErrRefused, j.Address)
	}
	return payload, nil
}

// mac authenticates a transcript in one direction.
func (j Job) mac(direction string, transcript []byte) []byte {
	h := hmac.New(sha256.New, j.Secret)
	h.Write([]byte(direction))
	h.Write(transcript)
	return h.Sum(nil)
}

// limit bounds the time that a connection may take.
func limit(ctx context.Context, conn net.Conn) error {
	deadline := time.Now().Add(patience)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	return conn.SetDeadline(deadline)
}
