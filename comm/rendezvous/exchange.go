package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"time"
)

const (
	// ports is the number of ports that rank 0 tries to listen on, beginning with that of
	// its address.
	ports = 4
	// patience bounds the time until a connection has said hello, and that of the answer.
	patience = 10 * time.Second
	// glance bounds the time to reach a listener and to get its greeting.
	glance = 3 * time.Second
	// A rank that did not find rank 0 tries again after this time, which doubles.
	retryFirst, retryLast = 25 * time.Millisecond, 400 * time.Millisecond
)

// Broadcast gives every rank the payload of rank 0. All ranks of the job call it. On rank 0
// it returns when all others have the payload. It ends with an error when ctx does.
//
// Strangers are refused and logged, and delay no rank. Rank 0 refuses a rank that knows the
// secret if another process has the same rank, or if the job's size differs. That rank gets
// an error wrapping [ErrRefused] at once, as does a rank that finds all ports where rank 0
// could be taken by others.
func (j Job) Broadcast(ctx context.Context, payload []byte) ([]byte, error) {
	if len(payload) > maxPayload {
		return nil, fmt.Errorf("rendezvous: %d bytes to share, at most %d can be", len(payload), maxPayload)
	}
	if j.WorldSize <= 1 {
		return payload, nil
	}
	host, _, err := net.SplitHostPort(j.Address)
	if err == nil && len(j.Secret) == 0 && !isLoopback(host) {
		err = fmt.Errorf("%w: rank 0 would listen to the network at %s, but nothing keeps strangers out; set %s to something random, the same for all processes",
			ErrEnvironment, j.Address, SecretVariable)
	}
	if err == nil {
		if j.Rank == 0 {
			err = j.serve(ctx, payload)
		} else {
			payload, err = j.fetch(ctx)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("rendezvous: rank %d: %w", j.Rank, err)
	}
	return payload, nil
}

// portAddress is the address of host with the port of rank 0, or with the i-th after it.
func (j Job) portAddress(host string, i int) (string, error) {
	_, text, err := net.SplitHostPort(j.Address)
	if err != nil {
		return "", err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	return net.JoinHostPort(host, strconv.Itoa(portAfter(int(port), i))), err
}

// fetch is the side of the other ranks. Rank 0 may start later, or another program may have
// its port, so they try until ctx ends.
func (j Job) fetch(ctx context.Context) ([]byte, error) {
	host, _, err := net.SplitHostPort(j.Address)
	if err != nil {
		return nil, err
	}
	self := newHello(j.Rank, j.WorldSize)
	var log tally
	var refused []error // of the last round with a refusal
	for wait := retryFirst; ; wait = min(2*wait, retryLast) {
		var unreached, now []error
		for i := range ports {
			address, err := j.portAddress(host, i)
			if err != nil {
				return nil, err
			}
			payload, err := j.ask(ctx, address, self)
			var r *refusal
			switch {
			case err == nil:
				return payload, nil
			case !errors.As(err, &r):
				unreached = append(unreached, err)
			case r.proven:
				return nil, err
			default:
				now = append(now, err)
				if times, due := log.count(r.reason); due {
					slog.Warn("rendezvous: looking for rank 0, found somebody else", "at", r.by, "reason", r.reason, "times", times)
				}
			}
		}
		if len(now) > 0 {
			refused = now
		}
		if len(unreached) == 0 && ctx.Err() == nil {
			return nil, fmt.Errorf("rank 0's port and the %d behind it are in use by others; set %s to a free one: %w", ports-1, portVariable, errors.Join(refused...))
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w; last attempts to reach rank 0: %w", context.Cause(ctx), errors.Join(append(refused, unreached...)...))
		case <-time.After(wait):
		}
	}
}

// ask makes one attempt at one address.
func (j Job) ask(ctx context.Context, address string, self hello) ([]byte, error) {
	conn, err := (&net.Dialer{Timeout: glance}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })() // ends what is read
	defer conn.Close()                                      //nolint:errcheck // nothing is lost
	t := &talk{conn: conn, key: j.key()}
	if err := conn.SetDeadline(time.Now().Add(glance)); err != nil {
		return nil, err
	}
	if greeting, err := t.receive(len(magic) + keyBytes); err != nil {
		return nil, t.stranger("it does not greet")
	} else if string(greeting[:len(magic)]) != magic {
		return nil, t.stranger(reasonLanguage)
	}
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	return t.introduce(self)
}

// tally counts repeated events, such as refusals for one reason.
type tally map[string]int

// count returns how often an event has happened, and whether to log it: the first, second,
// fourth, eighth … time.
func (t *tally) count(what string) (times int, due bool) {
	if *t == nil {
		*t = make(tally)
	}
	(*t)[what]++
	times = (*t)[what]
	return times, times&(times-1) == 0
}
