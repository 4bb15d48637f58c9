package tcp

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/fault"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/segment"
)

// deaf is a launcher that has heard something, and does not answer.
type deaf struct {
	posted []string // keys, in order
	waited []string // likewise, of what waited for an answer
}

func (d *deaf) Post(key string, _ []byte, _ ...store.Option) { d.posted = append(d.posted, key) }

func (d *deaf) Drop(string) {}

func (d *deaf) Set(ctx context.Context, key string, _ []byte, _ ...store.Option) error {
	if _, bounded := ctx.Deadline(); !bounded {
		return errors.New("a wait without a bound")
	}
	d.waited = append(d.waited, key)
	return context.DeadlineExceeded
}

// A launcher that does not answer holds a rank up once, however many others the rank reports.
func TestReportsWaitOnce(t *testing.T) {
	d := new(deaf)
	report := reporterTo(d).report
	var list []fault.Report
	var keys []string
	for about := range 500 {
		r := fault.Report{By: 500, About: about, Reason: "a test"}
		list = append(list, r)
		keys = append(keys, r.Key())
	}
	report(nil)
	report(list)
	assert.Equal(t, keys[:499], d.posted)
	assert.Equal(t, keys[499:], d.waited)
	report(list[:1])
	assert.Len(t, d.posted, 500)
	assert.Len(t, d.waited, 1)
}

// Signs of life to others, and what reads and writes under locks, do not wait for the launcher, which hears once of a
// loss. The peer is lost when that knows.
func TestReportsBesideOthers(t *testing.T) {
	broken := errors.New("broken")
	for name, lose := range map[string]func(p *pair, w *wire, peer *segment.Ring){
		"nothing has come": func(p *pair, _ *wire, _ *segment.Ring) {
			p.node.countSilence()
			p.beat(p.node.ticks.Add(100), 2)
		},
		"broken": func(p *pair, _ *wire, _ *segment.Ring) {
			p.lanes[0].secure = severed{err: broken}
			p.quiet()
			p.lanes[0].write(true)
		},
		"a frame of kind 99": func(_ *pair, w *wire, peer *segment.Ring) {
			put(peer, header{kind: 99}, nil)
			w.moveTracks() // as with the engine's lock
			w.moveTracks()
		},
		"it has read": func(p *pair, w *wire, _ *segment.Ring) {
			memory := make([]uint64, segment.RingBytes(ringBytes)/8)
			for i := range memory {
				memory[i] = 1 // of the reader's position, among others
			}
			p.track.Load().out = segment.NewRing(hostmem.Addr(memory), ringBytes)
			for range 100 {
				p.write()
				w.moveTracks()
			}
			runtime.KeepAlive(memory)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, w, peer := newTracked(1 << 20)
			p.node.rank = 1
			begun := make(chan []fault.Report)
			answer := make(chan struct{})
			p.node.report = func(list []fault.Report) {
				begun <- list
				<-answer
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				lose(p, w, peer)
			}()
			list := <-begun
			require.Len(t, list, 1)
			assert.Contains(t, list[0].Reason, name)
			select {
			case <-done:
			case <-time.After(time.Minute):
				require.Fail(t, "it waits for the launcher")
			}
			p.mu.Lock()
			assert.NoError(t, p.gone, "the launcher does not know it yet")
			p.mu.Unlock()
			close(answer)
			<-p.dead
			assert.ErrorContains(t, p.gone, name)
		})
	}
}

// severed is a connection over which nothing can be sent.
type severed struct {
	script
	err error
}

func (s severed) Write([]byte) (int, error) { return 0, s.err }

// A rank that was never connected to others has no lock when it says so.
func TestUnreachedWithoutLock(t *testing.T) {
	n := &node{rank: 1, size: 4}
	for rank := range n.size {
		n.pairs = append(n.pairs, newPair(n, rank))
	}
	k := &connector{node: n}
	var about []int
	n.report = func(list []fault.Report) {
		if !assert.True(t, k.mu.TryLock()) {
			return
		}
		defer k.mu.Unlock()
		for _, r := range list {
			about = append(about, r.About)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	err := k.failure(ctx, missingRanks{unreached: []int{0, 2, 3}}, nil)
	assert.ErrorContains(t, err, "no connection to ranks 0, 2")
	assert.Equal(t, []int{0, 2, 3}, about)
}

// The launcher is told who has tried to connect in vain, whichever of the two ranks tells it.
func TestWhoTried(t *testing.T) {
	n := &node{rank: 1, size: 4}
	for rank := range n.size {
		n.pairs = append(n.pairs, newPair(n, rank))
	}
	k := &connector{node: n, config: Config{World: "1"}}
	tried := &triedError{[]string{"10.0.0.1:29500"}, errors.New("a test")}
	k.note(k.pairs[0], tried)
	k.hear(store.Event{Entry: store.Entry{Key: k.config.reports(1) + "2", Value: []byte(tried.Error())}}, nil)
	const text = "cannot be reached at [10.0.0.1:29500]: a test"
	assert.Equal(t, []fault.Report{
		{Kind: fault.Tried, By: 1, About: 0, Reason: text},
		{Kind: fault.Heard, By: 1, About: 2, Reason: text},
		{Kind: fault.Unreached, By: 1, About: 3, Reason: "it has not connected to this rank, which listens at []"},
	}, k.unreachedReports([]int{0, 2, 3}))
	assert.EqualError(t, k.troubleWith(k.pairs[2]), "rank 2: it reports that this rank "+text)
}

// While a rank is tried at its second address, the reason of the first one is known.
func TestFirstFailureIsNoted(t *testing.T) {
	refusing, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, refusing.Close())
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close() //nolint:errcheck // nothing is lost
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // nothing is lost
	n := &node{rank: 1, size: 2}
	n.pairs = []*pair{newPair(n, 0), newPair(n, 1)}
	k := &connector{node: n, config: Config{World: "1"}, kv: server.Local("1"), tls: conf}
	first := refusing.Addr().String()
	second := silent.Addr().String()
	text, err := json.Marshal(record{protocol, 1, []string{first, second}})
	require.NoError(t, err)
	require.NoError(t, k.kv.Set(t.Context(), k.config.key(0), text))

	tried := make(chan error)
	go func() { tried <- k.try(t.Context(), n.pairs[0], 1) }()
	conn, err := silent.Accept()
	require.NoError(t, err)
	k.mu.Lock()
	trouble := k.troubleWith(n.pairs[0])
	k.mu.Unlock()
	assert.ErrorContains(t, trouble, "rank 0: no answer yet from ["+second+"]; dial tcp "+first)
	assert.ErrorContains(t, trouble, "refused")
	require.NoError(t, conn.Close())
	err = <-tried
	require.ErrorAs(t, err, new(*triedError))
	k.note(n.pairs[0], err)
	k.begin(n.pairs[0], []string{first, second}, nil)
	k.mu.Lock()
	defer k.mu.Unlock()
	assert.ErrorContains(t, k.troubleWith(n.pairs[0]), "cannot be reached at", "a whole attempt says more than a new one")
}

// A rank revokes its report of stragglers to its launcher when they have come: it is not why the job fails later.
func TestReportsTakenBack(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	job := rendezvous.Job{WorldSize: 2, Address: l.Addr().String(), Secret: []byte("a secret of tests, long enough as it is"), Hosted: true}
	conf, err := job.TLS("store")
	require.NoError(t, err)
	server := store.NewServer(store.Options{Size: 2})
	server.Serve(l, conf)
	defer server.Close() //nolint:errcheck // nothing is lost
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	kv, err := job.Shared(ctx)
	require.NoError(t, err)
	known := func() []store.Entry {
		list, err := kv.List(ctx, fault.Prefix)
		require.NoError(t, err)
		return list
	}
	for patience := 100 * time.Millisecond; len(known()) == 0; patience *= 2 {
		short, end := context.WithTimeout(ctx, patience)
		_, err := Config{}.join(short, job)
		end()
		require.ErrorIs(t, err, comm.ErrTimeout)
	}
	var comms [2]comm.Communicator
	errs := each(job, []int{0, 1}, func(job rendezvous.Job) (err error) {
		comms[job.Rank], err = Config{}.join(ctx, job)
		return err
	})
	require.NoError(t, errors.Join(errs...))
	assert.Empty(t, known(), "both have come to a rendezvous")

	n := comms[0].(*communicator).e.wire.node
	n.report([]fault.Report{{Kind: fault.Late, By: 0, About: 1, Reason: "a test"}})
	require.Len(t, known(), 1)
	split := func(ctx context.Context, c comm.Communicator) error {
		sub, err := c.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		return sub.Close()
	}
	require.NoError(t, comm.Run(ctx, comms[:], split))
	assert.Empty(t, known(), "both have come to Split")

	// A rank that is lost comes to nothing any more.
	r := reporterTo(new(deaf))
	r.report([]fault.Report{{By: 0, About: 1, Reason: "a test"}})
	r.takeBack([]int{1})
	assert.Len(t, r.told, 1)
}
