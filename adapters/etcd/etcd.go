// Package etcd keeps the store of an elastic job in [etcd], so that it outlives every member. The program in
// cmd/tutti-store serves such a store to processes that do not know etcd.
//
//	client, err := clientv3.New(clientv3.Config{Endpoints: …, TLS: …})
//	…
//	cfg.Dial = func(ctx context.Context) (store.Store, error) { // an elastic.Config
//		return etcd.Dial(ctx, etcd.Config{Client: client, Prefix: "/tutti/job-17/", Silence: 3 * time.Second})
//	}
//
// [etcd]: https://etcd.io/docs/v3.6/learning/api/
package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// Config describes the store to use.
type Config struct {
	Client *clientv3.Client // not closed by the store
	// Prefix begins the keys of a job. Each job needs a different prefix, even after this one has ended: its keys
	// stay.
	Prefix string
	// Silence is how long a process may be silent before its leases end. It is rounded up to seconds. An etcd with
	// the usual timeouts grants at least 2.
	Silence time.Duration
}

// reachTime bounds the time until an etcd first answers. An election takes a second. Finding the cause afterwards
// makes it 5 s in all.
const (
	reachTime = 3 * time.Second
	retryTime = 100 * time.Millisecond
	// answerTime bounds the question why a lease has ended.
	answerTime = 500 * time.Millisecond
)

// session is one process's store.
type session struct {
	Config
	lease *concurrency.Session // of the session
	ttl   time.Duration        // of the lease; etcd may grant more than Silence
	ctx   context.Context      // ends at Close
	end   context.CancelFunc   // ends ctx
	drops sync.WaitGroup       // deletions in flight; Close waits for them
	done  chan struct{}        // closed when the session has ended

	mu  sync.Mutex // guards err
	err error      // why it has ended; nil while it lasts; guarded by mu
}

// Dial begins a session. The session ends with Close, or when etcd has not heard from this process for
// Config.Silence. If an etcd does not answer within 3 s, Dial returns an error at most 2 s later. The error describes
// the endpoints, such as a port without a server, or a server that does not accept a certificate.
//
// Errors of Dial and of the session name the cause and the remedy. They wrap [comm.ErrTimeout] or [comm.ErrCanceled]
// if the context has ended, and otherwise
//
//   - fs.ErrPermission where etcd refuses the user or a certificate, or the client etcd's,
//   - [comm.ErrArgument] where it refuses the request or an endpoint is no etcd's, [comm.ErrMismatch] where endpoints
//     belong to different clusters, [comm.ErrUnsupported] where it is too old,
//   - [store.ErrFull] where it has no room, [comm.ErrExhausted] where it has too many requests or too little history,
//   - [comm.ErrUnavailable] where an endpoint has no address, or etcd is not in a state to do it,
//   - [comm.ErrTimeout] where it has not done something in its own time,
//   - [comm.ErrPeerFailed] where it is down, cut off, or without a leader.
func Dial(ctx context.Context, cfg Config) (store.Backend, error) {
	if cfg.Client == nil || cfg.Prefix == "" || cfg.Silence <= 0 {
		return nil, fmt.Errorf("etcd: %w: Client, Prefix and Silence are needed", comm.ErrArgument)
	}
	s := &session{Config: cfg, done: make(chan struct{})}
	s.ctx, s.end = context.WithCancel(context.WithoutCancel(ctx))
	granted, err := cfg.grant(ctx)
	if unreachable(err) && ctx.Err() == nil {
		s.end()
		return nil, cfg.explain(ctx, err)
	}
	if err == nil {
		err = cfg.check(ctx)
	}
	if err == nil {
		s.ttl = time.Duration(granted.TTL) * time.Second
		lease := concurrency.WithLease(clientv3.LeaseID(granted.ID))
		s.lease, err = concurrency.NewSession(cfg.Client, lease, concurrency.WithContext(s.ctx))
	}
	if err != nil {
		s.end()
		return nil, cfg.wrap(ctx, err)
	}
	go func() {
		select {
		case <-s.lease.Done():
			s.expire()
		case <-s.done:
		}
	}()
	return s, nil
}

// grant requests a lease, and retries while etcd is down or has no leader. It calls etcd's interface directly,
// because the client replaces earlier errors with the context's error.
func (cfg *Config) grant(ctx context.Context) (*etcdserverpb.LeaseGrantResponse, error) {
	seconds := int64(cfg.Silence / time.Second)
	if cfg.Silence%time.Second > 0 {
		seconds++
	}
	conn := cfg.Client.ActiveConnection()
	if conn == nil { // an etcd in this process
		granted, err := cfg.Client.Grant(ctx, seconds)
		if err != nil {
			return nil, err
		}
		return &etcdserverpb.LeaseGrantResponse{ID: int64(granted.ID), TTL: granted.TTL}, nil
	}
	bounded, cancel := context.WithTimeout(ctx, reachTime)
	defer cancel()
	leases := etcdserverpb.NewLeaseClient(conn)
	return persist(bounded, func() (*etcdserverpb.LeaseGrantResponse, error) {
		return leases.LeaseGrant(bounded, &etcdserverpb.LeaseGrantRequest{TTL: seconds})
	})
}

// persist repeats a request while no etcd can be reached, until ctx ends. It returns the last error before that.
func persist[R any](ctx context.Context, request func() (R, error)) (R, error) {
	var last error
	for {
		answer, err := request()
		if err == nil {
			return answer, nil
		}
		if last == nil || ctx.Err() == nil {
			last = rpctypes.Error(err)
		}
		if status.Code(err) != codes.Unavailable {
			return answer, last
		}
		select {
		case <-time.After(retryTime):
		case <-ctx.Done():
			return answer, last
		}
	}
}

// check makes etcd check the user's access to the job's keys, by a transaction that changes nothing: etcd checks both
// branches. Without it, a user would learn of missing rights in the first call.
func (cfg *Config) check(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, reachTime)
	defer cancel()
	never := clientv3.Compare(clientv3.Version(cfg.Prefix), "<", 0)
	_, err := cfg.Client.Txn(bounded).If(never).
		Then(clientv3.OpPut(cfg.Prefix, "")).
		Else(clientv3.OpGet(cfg.Prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())).
		Commit()
	return err
}

// wrap returns an error of etcd's client with the sentinel and the remedy of its cause.
func (cfg *Config) wrap(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("etcd: %w", cfg.name(ctx, err))
}

// name adds the sentinel and the remedy of its cause to an error of etcd's client. The error keeps failures that the
// client met before its context ended, such as a refused certificate or a port without a server.
func (cfg *Config) name(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", comm.ContextError(ctx), err)
	}
	c := causeOf(err)
	if c.remedy == "" {
		return fmt.Errorf("%w: %w", c.sentinel, err)
	}
	return fmt.Errorf("%w: %w; %s", c.sentinel, err, strings.ReplaceAll(c.remedy, "PREFIX", cfg.Prefix))
}

// errWatchEnded is the error of a watch whose channel etcd's client closes without an error, which means that the
// client is closed.
var errWatchEnded = errors.New("etcd's client is closed, or has ended the watch")

// fail ends the session and reports whether this call did so.
func (s *session) fail(err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return false
	}
	s.err = err
	s.end()
	close(s.done)
	return true
}

func (s *session) Done() <-chan struct{} { return s.done }

func (s *session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// LeaseTime returns how long etcd keeps the leased keys of a silent process.
func (s *session) LeaseTime() time.Duration { return s.ttl }

// Orphan ends the session. Its lease is no longer renewed.
func (s *session) Orphan() { s.fail(fmt.Errorf("etcd: %w", comm.ErrClosed)) }

// Close deletes the leased keys.
func (s *session) Close() error {
	if !s.fail(fmt.Errorf("etcd: %w", comm.ErrClosed)) {
		return nil
	}
	s.drops.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), s.Silence)
	defer cancel()
	_, err := s.Client.Revoke(ctx, s.lease.Lease())
	return s.wrap(ctx, err)
}

// join returns a ctx that also ends with the session.
func (s *session) join(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.ctx, func() { cancel(comm.ErrClosed) })
	return ctx, func() { stop(); cancel(nil) }
}

// loseLease ends a session after its lease has ended.
func (s *session) loseLease() {
	s.fail(fmt.Errorf("etcd: %w: the session's lease has ended; %s", comm.ErrPeerFailed, silentTooLong))
}

// expire ends a session that has not renewed its lease in time. If etcd does not answer now either, that is the reason.
func (s *session) expire() {
	err := s.ask()
	if err == nil {
		s.loseLease()
		return
	}
	switch causeOf(err).sentinel {
	case comm.ErrPeerFailed, comm.ErrTimeout:
		const format = "etcd: %w: the session's lease has ended; %s: %v; %s"
		s.fail(fmt.Errorf(format, comm.ErrPeerFailed, noAnswer, err, needsMajority)) // a timeout is not the error's kind
	default: // etcd answers
		s.loseLease()
	}
}

// ask requests a key that etcd returns only while it has a leader and most of its servers.
func (s *session) ask() error {
	ctx, cancel := context.WithTimeout(s.ctx, answerTime)
	defer cancel()
	conn := s.Client.ActiveConnection()
	if conn == nil { // an etcd in this process
		_, err := s.Client.Get(ctx, s.Prefix)
		return err
	}
	keys := etcdserverpb.NewKVClient(conn)
	_, err := persist(ctx, func() (*etcdserverpb.RangeResponse, error) {
		return keys.Range(ctx, &etcdserverpb.RangeRequest{Key: []byte(s.Prefix), CountOnly: true})
	})
	return err
}

// result is the error of a call.
func (s *session) result(ctx context.Context, err error) error {
	if errors.Is(rpctypes.Error(err), rpctypes.ErrLeaseNotFound) {
		s.loseLease() // the renewal would report it later
	}
	if ended := s.Err(); err != nil && ended != nil {
		return ended
	}
	return s.wrap(ctx, err)
}

// put sets a key with options.
func (s *session) put(key string, value []byte, options []store.Option) clientv3.Op {
	if slices.Contains(options, store.Lease) {
		return clientv3.OpPut(s.Prefix+key, string(value), clientv3.WithLease(s.lease.Lease()))
	}
	return clientv3.OpPut(s.Prefix+key, string(value))
}

func (s *session) Set(ctx context.Context, key string, value []byte, options ...store.Option) error {
	op := s.put(key, value, options)
	inner, done := s.join(ctx)
	defer done()
	_, err := s.Client.Do(inner, op)
	return s.result(ctx, err)
}

func (s *session) CompareAndSet(
	ctx context.Context, key string, version uint64, value []byte, options ...store.Option,
) (now store.Entry, ok bool, err error) {
	op := s.put(key, value, options)
	inner, done := s.join(ctx)
	defer done()
	full := s.Prefix + key
	unchanged := clientv3.Compare(clientv3.ModRevision(full), "=", int64(version))
	r, err := s.Client.Txn(inner).If(unchanged).Then(op).Else(clientv3.OpGet(full)).Commit()
	if err != nil {
		return now, false, s.result(ctx, err)
	}
	if r.Succeeded {
		return store.Entry{Key: key, Value: value, Version: uint64(r.Header.Revision)}, true, nil
	}
	for _, kv := range r.Responses[0].GetResponseRange().Kvs {
		now = s.entry(kv)
	}
	return now, false, nil
}

func (s *session) Get(ctx context.Context, key string) ([]byte, error) {
	inner, done := s.join(ctx)
	defer done()
	found := errors.New("found")
	inner, cancel := context.WithCancelCause(inner)
	defer cancel(nil)
	var value []byte
	err := s.follow(inner, key, nil, func(e store.Event) {
		if !e.Deleted && context.Cause(inner) == nil {
			value = e.Value
			cancel(found)
		}
	}, nil)
	if context.Cause(inner) == found {
		return value, nil
	}
	return nil, s.result(ctx, err)
}

// List implements [store.Backend].
func (s *session) List(ctx context.Context, prefix string) ([]store.Entry, error) {
	inner, done := s.join(ctx)
	defer done()
	sorted := clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend)
	r, err := s.Client.Get(inner, s.Prefix+prefix, clientv3.WithPrefix(), sorted)
	if err != nil {
		return nil, s.result(ctx, err)
	}
	var all []store.Entry
	for _, kv := range r.Kvs {
		all = append(all, s.entry(kv))
	}
	return all, nil
}

// Delete implements [store.Backend].
func (s *session) Delete(ctx context.Context, key string, version uint64) error {
	inner, done := s.join(ctx)
	defer done()
	full := s.Prefix + key
	deletion := s.Client.Txn(inner)
	if version > 0 {
		deletion = deletion.If(clientv3.Compare(clientv3.ModRevision(full), "=", int64(version)))
	}
	_, err := deletion.Then(clientv3.OpDelete(full)).Commit()
	return s.result(ctx, err)
}

// entry is a key of etcd's without the prefix.
func (s *session) entry(kv *mvccpb.KeyValue) store.Entry {
	return store.Entry{Key: strings.TrimPrefix(string(kv.Key), s.Prefix), Value: kv.Value, Version: uint64(kv.ModRevision)}
}

// Drop deletes a key.
func (s *session) Drop(key string) {
	s.drops.Go(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), s.Silence)
		defer cancel()
		_, _ = s.Client.Delete(ctx, s.Prefix+key) // its lease ends anyway
	})
}

func (s *session) Watch(ctx context.Context, prefix string, f func(store.Event)) (stop func(), err error) {
	watching, cancel := context.WithCancel(s.ctx)
	ready := make(chan struct{})
	failed := make(chan error, 1)
	go func() {
		err := s.follow(watching, prefix, []clientv3.OpOption{clientv3.WithPrefix()}, f, func() { close(ready) })
		if failed <- err; watching.Err() == nil { // it would miss events
			s.fail(fmt.Errorf("etcd: %w: a watch has ended: %w", comm.ErrPeerFailed, s.name(watching, err)))
		}
	}()
	select {
	case <-ready:
		return cancel, nil
	case err = <-failed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	cancel()
	return nil, s.result(ctx, err)
}

// follow calls f for each existing key, then ready unless it is nil, and then f for each change. It ends when ctx
// ends or events are no longer available.
func (s *session) follow(
	ctx context.Context, key string, options []clientv3.OpOption, f func(store.Event), ready func(),
) error {
	full := s.Prefix + key
	now, err := s.Client.Get(ctx, full, append(options, clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))...)
	if err != nil {
		return err
	}
	for _, kv := range now.Kvs {
		f(store.Event{Entry: s.entry(kv)})
	}
	if ready != nil {
		ready()
	}
	options = append(options, clientv3.WithRev(now.Header.Revision+1), clientv3.WithPrevKV())
	for r := range s.Client.Watch(clientv3.WithRequireLeader(ctx), full, options...) {
		if err := r.Err(); err != nil {
			return err
		}
		for _, e := range r.Events {
			event := store.Event{Entry: s.entry(e.Kv), Deleted: e.Type == clientv3.EventTypeDelete}
			if event.Deleted && e.PrevKv != nil {
				event.Value = e.PrevKv.Value
			}
			f(event)
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return errWatchEnded
}
