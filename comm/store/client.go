package store

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/tutti-go/tutti/comm"
)

var (
	// ErrRefused means that the other side does not know the secret, or refuses this process for another reason.
	ErrRefused = errors.New("refused")
	// ErrFull means that a bound of the store is reached.
	ErrFull = errors.New("the store is full")
)

// Store is the part of a store that members and communicators use: a [Client], or one of another kind, such as
// etcd's.
type Store interface {
	// Get waits for a key and returns its value.
	Get(ctx context.Context, key string) ([]byte, error)
	// Set sets a key.
	Set(ctx context.Context, key string, value []byte, options ...Option) error
	// CompareAndSet sets a key if it has this version, 0 if it must not exist. It returns the entry after that, and
	// whether this call set it.
	CompareAndSet(
		ctx context.Context,
		key string,
		version uint64,
		value []byte,
		options ...Option,
	) (now Entry, ok bool, err error)
	// Watch calls f with each key that begins with prefix, and with each change, in order, until stop.
	Watch(ctx context.Context, prefix string, f func(Event)) (stop func(), err error)
	// Drop deletes a key, without waiting.
	Drop(key string)
	// Done is closed when the session has ended, and Err says why.
	Done() <-chan struct{}
	// Err is why the session ended, nil while it has not.
	Err() error
	// Close ends the session.
	Close() error
}

// Event is a change of a watched key. The event of a deleted key has its last entry, with a new version.
type Event struct {
	Entry
	Deleted bool // the key is gone; false if it was set
}

// Option changes how a key is set.
type Option uint8

// The options of a key.
const (
	// Lease has a key vanish when the session that set it ends.
	Lease Option = iota + 1
)

// Client is a session of a store. Its leased keys vanish, and its watches end, with the client or its process. Its
// methods may be called by several goroutines; their requests are made in the order in which they were called. Errors
// wrap [comm.ErrTimeout] or [comm.ErrCanceled] if the context has ended, and [comm.ErrPeerFailed] if the store is
// lost. A refusal wraps the sentinel of its cause: [comm.ErrArgument], [ErrFull], and behind a [Proxy] also
// [comm.ErrExhausted], [comm.ErrUnsupported], [comm.ErrUnavailable] or fs.ErrPermission.
type Client struct {
	post    func(r request) error // queues a request; set once, before the first call
	end     func() error          // hangs up; set once, before the first call
	local   net.Addr              // the address from which the store is reached; nil in the process of the server
	silence time.Duration         // of the store; 0 if it leaves that to TCP

	mu      sync.Mutex             // guards what follows; nothing is waited for under it
	next    uint64                 // number of the last request, 0 before the first
	calls   map[uint64]chan *reply // where the answers go, by request; one for each call in flight
	watches map[uint64]func(Event) // of Watch, by request, until stopped
	done    chan struct{}          // closed when err is set
	err     error                  // why the session ended, nil while it has not
}

// errHungUp is the end of a connection that the store's side has closed.
var errHungUp = errors.New("its process has ended")

func newClient(local net.Addr) *Client {
	return &Client{
		local:   local,
		calls:   map[uint64]chan *reply{},
		watches: map[uint64]func(Event){},
		done:    make(chan struct{}),
	}
}

// remote makes the client of a connection that was welcomed.
func remote(conn *tls.Conn, in *json.Decoder, silence time.Duration) *Client {
	c := newClient(conn.LocalAddr())
	c.silence = silence
	out := &outbox[request]{send: sender[request](conn), finish: conn.CloseWrite, limit: mostQueued}
	c.post = func(r request) error {
		first, err := out.push(r, len(r.Key)+len(r.Value))
		if first {
			go func() {
				out.drain()
				out.mu.Lock()
				defer out.mu.Unlock()
				if out.err != nil { // what was said before may still be there
					_ = conn.SetReadDeadline(time.Now().Add(flushTime))
				}
			}()
		}
		return err
	}
	closed := make(chan struct{}) // when the store has hung up
	c.end = func() error {
		out.close()
		select {
		case <-closed:
		case <-time.After(flushTime):
		}
		conn.NetConn().Close() //nolint:errcheck // the store may have been faster
		return nil
	}
	go func() {
		defer close(closed)
		defer conn.NetConn().Close() //nolint:errcheck // nothing is lost
		for {
			if silence > 0 {
				_ = conn.SetReadDeadline(time.Now().Add(silence))
			}
			var r reply
			if err := in.Decode(&r); err != nil {
				if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
					err = errHungUp
					if silence > 0 {
						err = fmt.Errorf("%w, or it has not heard of this process for %v", errHungUp, silence)
					}
				}
				c.fail(fmt.Errorf("%w: the job's store does not answer: %w", comm.ErrPeerFailed, err))
				return
			}
			c.handle(&r)
		}
	}()
	if silence > 0 {
		go c.beat(silence / 4)
	}
	return c
}

// beat sends heartbeats.
func (c *Client) beat(every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-c.done:
			return
		case <-tick.C:
			_ = c.post(request{Op: opPing})
		}
	}
}

// handle takes a reply.
func (c *Client) handle(r *reply) {
	c.mu.Lock()
	watch := c.watches[r.ID]
	call := c.calls[r.ID]
	if !r.Event {
		delete(c.calls, r.ID)
	}
	c.mu.Unlock()
	if watch != nil {
		for _, e := range r.Entries {
			watch(Event{e, r.Deleted})
		}
	}
	if call != nil && !r.Event {
		call <- r
	}
}

// fail ends the client with its first error.
func (c *Client) fail(err error) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return false
	}
	c.err = err
	close(c.done)
	return true
}

// call makes a request and waits for its answer. watch is called for the events of a Watch.
func (c *Client) call(ctx context.Context, r request, watch func(Event)) (a reply, err error) {
	answer := make(chan *reply, 1)
	c.mu.Lock()
	c.next++
	r.ID = c.next
	c.calls[r.ID] = answer
	if watch != nil {
		c.watches[r.ID] = watch
	}
	c.mu.Unlock()
	switch {
	case c.Err() != nil:
		err = c.Err()
	case ctx.Err() != nil:
		err = comm.ContextError(ctx)
	case !utf8.ValidString(r.Key):
		err = fmt.Errorf("%w: the key is not UTF-8", comm.ErrArgument)
	default:
		if err = c.post(r); errors.Is(err, ErrFull) { // another error ends the client soon
			break
		}
		var got *reply
		got, err = c.await(ctx, answer)
		switch {
		case err == nil && got.Fault == "":
			return *got, nil
		case err == nil:
			err = failure(got.Kind, got.Fault, errUndone)
		case ctx.Err() != nil:
			_ = c.post(request{Op: opStop, Version: r.ID})
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.calls, r.ID)
	delete(c.watches, r.ID)
	return a, fmt.Errorf("store: %s %q: %w", r.Op, r.Key, err)
}

// await waits for the answer to a request. One that has come counts, though the session or ctx may have ended since.
func (c *Client) await(ctx context.Context, answer <-chan *reply) (*reply, error) {
	var err error
	select {
	case got := <-answer:
		return got, nil
	case <-c.done:
		err = c.Err()
	case <-ctx.Done():
		err = comm.ContextError(ctx)
	}
	select {
	case got := <-answer:
		return got, nil
	default:
		return nil, err
	}
}

// Post is Set without an answer: it does not wait, and a request beyond a bound is dropped.
func (c *Client) Post(key string, value []byte, options ...Option) {
	_ = c.post(set(key, value, options))
}

// Drop is Delete without an answer.
func (c *Client) Drop(key string) { _ = c.post(request{Op: opDelete, Key: key}) }

func set(key string, value []byte, options []Option) request {
	return request{Op: opSet, Key: key, Value: value, Lease: slices.Contains(options, Lease)}
}

// Set sets a key.
func (c *Client) Set(ctx context.Context, key string, value []byte, options ...Option) error {
	_, err := c.call(ctx, set(key, value, options), nil)
	return err
}

// Get returns the value of a key, which it waits for.
func (c *Client) Get(ctx context.Context, key string) ([]byte, error) {
	r, err := c.call(ctx, request{Op: opGet, Key: key}, nil)
	if err == nil && len(r.Entries) == 0 {
		err = fmt.Errorf("store: %w: an answer to get %q without a value", comm.ErrPeerFailed, key)
	}
	if err != nil {
		return nil, err
	}
	return r.Entries[0].Value, nil
}

// Wait waits until all of the keys exist. Its error names those that are missing.
func (c *Client) Wait(ctx context.Context, keys ...string) error {
	for i, key := range keys {
		_, err := c.Get(ctx, key)
		if err == nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
		defer cancel()
		missing := []string{key}
		for _, key := range keys[i+1:] {
			all, listErr := c.List(ctx, key)
			if listErr != nil {
				return err
			}
			if len(all) == 0 || all[0].Key != key {
				missing = append(missing, key)
			}
		}
		return fmt.Errorf("%w; missing: %s", err, strings.Join(missing, ", "))
	}
	return nil
}

// Add adds to a counter, a decimal number, and returns the sum. A key that does not exist counts as 0.
func (c *Client) Add(ctx context.Context, key string, delta int64) (int64, error) {
	r, err := c.call(ctx, request{Op: opAdd, Key: key, Delta: delta}, nil)
	return r.Number, err
}

// CompareAndSet sets a key if it has a version, 0 if it must not exist, and reports whether it did. now is the entry
// after that, zero if there is none.
func (c *Client) CompareAndSet(
	ctx context.Context,
	key string,
	version uint64,
	value []byte,
	options ...Option,
) (now Entry, ok bool, err error) {
	r := set(key, value, options)
	r.Op = opSwap
	r.Version = version
	a, err := c.call(ctx, r, nil)
	if len(a.Entries) > 0 {
		now = a.Entries[0]
	}
	return now, a.OK, err
}

// Delete deletes a key if it has this version. Version 0 stands for any.
func (c *Client) Delete(ctx context.Context, key string, version uint64) error {
	_, err := c.call(ctx, request{Op: opDelete, Key: key, Version: version}, nil)
	return err
}

// List returns the keys that begin with a prefix, sorted.
func (c *Client) List(ctx context.Context, prefix string) ([]Entry, error) {
	r, err := c.call(ctx, request{Op: opList, Key: prefix}, nil)
	return r.Entries, err
}

// Watch calls f for every key that begins with a prefix: for those that exist before it returns, and then for each
// change, in order, until stop is called or the client ends. f must not wait, and not for this client in particular.
func (c *Client) Watch(ctx context.Context, prefix string, f func(Event)) (stop func(), err error) {
	r, err := c.call(ctx, request{Op: opWatch, Key: prefix}, f)
	if err != nil {
		return nil, err
	}
	return func() {
		c.mu.Lock()
		delete(c.watches, r.ID)
		c.mu.Unlock()
		_ = c.post(request{Op: opStop, Version: r.ID})
	}, nil
}

// LocalAddr is this process's side of the connection, nil in the store's own process.
func (c *Client) LocalAddr() net.Addr { return c.local }

// LeaseTime is how long the store keeps the leases of a silent process, 0 if it relies on TCP.
func (c *Client) LeaseTime() time.Duration { return c.silence }

// Done is closed when the store is lost or the client closed.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns why the session ended, an error that wraps [comm.ErrPeerFailed] or [comm.ErrClosed]; nil before.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the session. It returns when the store has handled all posted requests and ended the session too, or
// after a short time.
func (c *Client) Close() error {
	if c.fail(fmt.Errorf("store: %w", comm.ErrClosed)) {
		return c.end()
	}
	return nil
}
