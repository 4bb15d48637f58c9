package peers_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/invitation"
	"github.com/tutti-go/tutti/comm/internal/peers"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/logtest"
)

// patience is how long anything here may take on a busy machine.
const patience = time.Minute

// job connects the ranks of a job, each of a process, to the store that rank 0 keeps.
func job(t *testing.T, size int) []*store.Client {
	client, invitation, err := invitation.New(true)
	require.NoError(t, err)
	all := make([]*store.Client, size)
	for r := range all {
		if r > 0 {
			client, err = invitation.Accept(t.Context(), r)
			require.NoError(t, err)
		}
		all[r] = client
		t.Cleanup(func() { assert.NoError(t, all[r].Close()) })
	}
	return all
}

// hanging is a session of a store whose host is lost.
type hanging struct{ *store.Client }

func (hanging) Set(ctx context.Context, _ string, _ []byte, _ ...store.Option) error {
	<-ctx.Done()
	return ctx.Err()
}

// A rank goes on without a store that does not answer.
func TestJoinIsBounded(t *testing.T) {
	client := throughProxy(t, "rank 1", func(name string) store.Backend {
		return hanging{store.NewServer(store.Options{}).Local(name)}
	})
	log := logtest.Capture(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	g := peers.Join(ctx, client, "0", 1, 2, says("busy"))
	require.Error(t, ctx.Err())
	assert.Contains(t, log.String(), "does not learn of peers that abort")
	assert.NoError(t, g.Failed(100))
	g.Leave()
}

// throughProxy connects a rank to a proxy of a store.
func throughProxy(t *testing.T, name string, open func(name string) store.Backend) *store.Client {
	conf, err := store.TLS([]byte("a secret"), "store")
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	proxy := store.NewProxy(patience, func(context.Context, string) (store.Backend, error) { return open(name), nil })
	proxy.Serve(l, conf)
	t.Cleanup(func() { assert.NoError(t, proxy.Close()) })
	client, err := store.Dialer{Addresses: []string{l.Addr().String()}, TLS: conf, Name: name}.Dial(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, client.Close()) })
	return client
}

// proxied connects the ranks of a job, each by a proxy, to a store that no rank keeps.
func proxied(t *testing.T, size int) []*store.Client {
	server := store.NewServer(store.Options{})
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	all := make([]*store.Client, size)
	for r := range all {
		open := func(name string) store.Backend { return server.Local(name) }
		all[r] = throughProxy(t, fmt.Sprint("rank ", r), open)
	}
	return all
}

// jobs are the kinds of stores.
var jobs = map[string]func(t *testing.T, size int) []*store.Client{"rank 0": job, "proxies": proxied}

// says is a status that does not change.
func says(text string) func() string { return func() string { return text } }

// bounded is a context for calls that end by themselves.
func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// When a rank's abort returns, all others know: its later collectives have failed, in its group and no other.
func TestAbort(t *testing.T) {
	for kind, job := range jobs {
		t.Run(kind, func(t *testing.T) { testAbort(t, job(t, 3)) })
	}
}

func testAbort(t *testing.T, all []*store.Client) {
	for aborting := range all {
		name := fmt.Sprint("group ", aborting)
		groups := make([]*peers.Group, len(all))
		others := make([]*peers.Group, len(all))
		for r := range all {
			groups[r] = peers.Join(t.Context(), all[r], name, r, len(all), func() string {
				if groups[r].Failed(6) == nil {
					return "answers before it knows"
				}
				return fmt.Sprintf("rank %d is busy", r)
			})
			others[r] = peers.Join(t.Context(), all[r], name+"/1.0", r, len(all), says("elsewhere"))
		}
		for _, g := range groups {
			require.NoError(t, g.Failed(100))
		}
		ctx := bounded(t)
		text := groups[aborting].Abort(ctx, "changed its mind", 5)
		require.NoError(t, ctx.Err())
		var want []string
		for r := range all {
			assert.NoError(t, groups[r].Failed(5), "it had done that")
			assert.NoError(t, others[r].Failed(100))
			if r == aborting {
				assert.NoError(t, groups[r].Failed(6), "a rank knows what it does itself")
				continue
			}
			err := groups[r].Failed(6)
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorContains(t, err, fmt.Sprintf("rank %d aborted: changed its mind", aborting))
			want = append(want, fmt.Sprintf("rank %d: rank %d is busy", r, r))
		}
		assert.Equal(t, strings.Join(want, "; "), text)
		for r := range all {
			groups[r].Leave()
			others[r].Leave()
			require.Empty(t, groups[r].Abort(ctx, "too late", 0))
		}
	}
}

// A context ends when a rank has aborted that had not completed what it waits for, with the error of Failed, and also if
// that was known before. Its caller's ends it otherwise.
func TestUntil(t *testing.T) {
	all := job(t, 3)
	groups := make([]*peers.Group, len(all))
	for r := range all {
		groups[r] = peers.Join(t.Context(), all[r], "0", r, len(all), says("busy"))
	}
	ended, end := context.WithCancel(t.Context())
	canceled, cancel := groups[0].Until(ended, 6)
	defer cancel()
	done, cancel := groups[0].Until(t.Context(), 5)
	defer cancel()
	failed, cancel := groups[0].Until(t.Context(), 6)
	defer cancel()
	over, cancel := groups[0].Until(t.Context(), 6)
	cancel()
	end()
	groups[2].Leave()
	require.NoError(t, failed.Err())
	groups[1].Abort(bounded(t), "changed its mind", 5)
	<-failed.Done()
	late, cancel := groups[0].Until(t.Context(), 6)
	defer cancel()
	for _, ctx := range []context.Context{failed, late} {
		assert.Equal(t, groups[0].Failed(6), context.Cause(ctx))
		assert.ErrorIs(t, context.Cause(ctx), comm.ErrPeerFailed)
	}
	assert.NoError(t, done.Err(), "the rank had done that")
	for _, ctx := range []context.Context{canceled, over} {
		assert.Equal(t, context.Canceled, context.Cause(ctx))
	}
}

// Of several ranks that have aborted, the one that had done least is named.
func TestFirstOfSeveralAborts(t *testing.T) {
	all := job(t, 4)
	groups := make([]*peers.Group, len(all))
	for r := range all {
		groups[r] = peers.Join(t.Context(), all[r], "0", r, len(all), says("busy"))
	}
	ctx := bounded(t)
	groups[3].Abort(ctx, "timed out", 7)
	groups[2].Abort(ctx, "changed its mind", 5)
	groups[1].Abort(ctx, "again", 5)
	assert.NoError(t, groups[0].Failed(5))
	for _, collectives := range []uint64{6, 8} {
		assert.ErrorContains(t, groups[0].Failed(collectives), "rank 1 aborted: again")
	}
	assert.NoError(t, groups[2].Failed(5))
	assert.ErrorContains(t, groups[1].Failed(8), "rank 2 aborted: changed its mind")
	require.NoError(t, ctx.Err())
}

// Ranks that abort at the same time do not wait for each other's end.
func TestAbortsAtTheSameTime(t *testing.T) {
	const count = 100
	all := job(t, 3)
	groups := make([][]*peers.Group, count)
	for i := range groups {
		for r := range all {
			groups[i] = append(groups[i], peers.Join(t.Context(), all[r], fmt.Sprint(i), r, len(all), says("busy")))
		}
	}
	ctx := bounded(t)
	var aborts sync.WaitGroup
	for i := range groups {
		for r, g := range groups[i] {
			aborts.Go(func() {
				assert.Regexp(t, `^ranks \d, \d: busy$`, g.Abort(ctx, "changed its mind", uint64(r)))
			})
		}
	}
	aborts.Wait()
	require.NoError(t, ctx.Err())
	for i := range groups {
		for _, g := range groups[i] {
			require.Error(t, g.Failed(5))
		}
	}
}

// The text tells ranks that answer from those that do not, are lost, have left or have not come.
func TestText(t *testing.T) {
	for kind, job := range jobs {
		t.Run(kind, func(t *testing.T) { testText(t, job(t, 6)) })
	}
}

// abortsUntil aborts, with ever more time, until all ranks that answer have.
func abortsUntil(t *testing.T, g *peers.Group, done uint64, want string) {
	text := ""
	for limit := 200 * time.Millisecond; text != want && limit < patience; limit *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		text = g.Abort(ctx, "timed out", done)
		cancel()
	}
	assert.Equal(t, want, text)
}

func testText(t *testing.T, all []*store.Client) {
	groups := make([]*peers.Group, len(all))
	release := make(chan struct{})
	for r, status := range []func() string{
		says("busy"), says("in flight: allreduce"), says("in flight: allreduce"), says("gone"), says("closed"),
		func() string { <-release; return "asleep" },
	} {
		groups[r] = peers.Join(t.Context(), all[r], "0", r, 7, status)
	}
	groups[4].Leave()
	require.NoError(t, all[3].Close())
	require.Eventually(t, func() bool {
		alive, err := all[0].List(t.Context(), "peers/alive/0\x003")
		return err == nil && len(alive) == 0
	}, patience, time.Millisecond)
	log := logtest.Capture(t)
	const want = "ranks 1, 2: in flight: allreduce; rank 3: its process has ended, or cannot be reached; " +
		"ranks 4, 6: communicator closed, or not made yet; rank 5: does not answer"
	abortsUntil(t, groups[0], 3, want)
	assert.Contains(t, log.String(), "may not know")
	close(release)
	require.Eventually(t, func() bool { return groups[5].Failed(4) != nil }, patience, time.Millisecond)
}

// A rank that is lost while another one waits for its answer is not waited for.
func TestLostWhileAsked(t *testing.T) {
	all := job(t, 2)
	asked := make(chan struct{})
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	aborting := peers.Join(t.Context(), all[0], "0", 0, 2, says("busy"))
	peers.Join(t.Context(), all[1], "0", 1, 2, func() string {
		close(asked)
		<-release
		return ""
	})
	go func() {
		<-asked
		_ = all[1].Close()
	}()
	ctx := bounded(t)
	assert.Equal(t, "rank 1: its process has ended, or cannot be reached", aborting.Abort(ctx, "timed out", 0))
	require.NoError(t, ctx.Err())
}

// A rank that joins later knows which ranks aborted before, also if those have left.
func TestJoinAfterAnAbort(t *testing.T) {
	all := job(t, 3)
	zero := peers.Join(t.Context(), all[0], "0", 0, 3, says("busy"))
	zero.Abort(bounded(t), "changed its mind", 5)
	one := peers.Join(t.Context(), all[1], "0", 1, 3, says("busy"))
	zero.Leave()
	two := peers.Join(t.Context(), all[2], "0", 2, 3, says("busy"))
	for _, g := range []*peers.Group{one, two} {
		assert.NoError(t, g.Failed(5))
		assert.ErrorContains(t, g.Failed(6), "rank 0 aborted: changed its mind")
	}
}

// When the process that keeps the store ends, ranks learn of no abort any more. That is a failure of the groups of
// which it is a member, and of no others.
func TestEndOfTheStore(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		all := job(t, 2)
		zero, one := all[0], all[1]
		member := peers.Join(t.Context(), zero, "member", 2, 4, says("busy"))
		failed := peers.Join(t.Context(), one, "member", 1, 4, says("busy"))
		left := peers.Join(t.Context(), zero, "left", 3, 4, says("busy"))
		sound := []*peers.Group{
			peers.Join(t.Context(), one, "left", 1, 4, says("busy")),
			peers.Join(t.Context(), one, "without", 1, 4, says("busy")),
		}
		left.Leave()
		if leaves {
			member.Leave()
		}
		waiting, cancel := failed.Until(t.Context(), 1)
		defer cancel()
		require.NoError(t, zero.Close())
		<-one.Done()
		if leaves {
			require.NoError(t, failed.Failed(100))
		} else {
			<-waiting.Done()
			assert.Equal(t, failed.Failed(1), context.Cause(waiting))
			assert.ErrorIs(t, failed.Failed(1), comm.ErrPeerFailed)
			assert.ErrorContains(t, failed.Failed(1), "rank 2 aborted: its process has ended, or cannot be reached")
			ctx := bounded(t)
			text := failed.Abort(ctx, "timed out", 0)
			require.NoError(t, ctx.Err())
			const want = "what the other ranks do is not known: peer failed: rank 2 aborted: its process has ended"
			assert.Contains(t, text, want)
		}
		for _, g := range sound {
			assert.NoError(t, g.Failed(100))
		}
		log := logtest.Capture(t)
		later := peers.Join(t.Context(), one, "later", 1, 3, says("busy"))
		assert.NoError(t, later.Failed(100))
		assert.Contains(t, log.String(), "does not learn of peers that abort")
	}
}

// Groups that all have left leave nothing in the store, but for the notices of ranks that have aborted, until their
// processes end.
func TestNothingStays(t *testing.T) {
	server := store.NewServer(store.Options{})
	observer := server.Local("observer")
	keys := func() (list []string) {
		entries, err := observer.List(t.Context(), "")
		require.NoError(t, err)
		for _, e := range entries {
			list = append(list, e.Key)
		}
		return list
	}
	var clients []*store.Client
	var groups []*peers.Group
	for r := range 3 {
		client := server.Local(fmt.Sprint("rank ", r))
		clients = append(clients, client)
		groups = append(groups, peers.Join(t.Context(), client, "0", r, 3, says("busy")))
		peers.Join(t.Context(), client, "0/1", r, 3, says("busy")).Leave()
	}
	groups[1].Abort(bounded(t), "changed its mind", 0)
	groups[0].Leave()
	groups[2].Leave()
	groups[1].Leave()
	assert.Equal(t, []string{"peers/notice/0\x001"}, keys())
	require.NoError(t, clients[1].Close())
	assert.Empty(t, keys())
}

// Keys that no rank has set are ignored, and texts are fit for a terminal and short.
func TestForgedKeys(t *testing.T) {
	log := logtest.Capture(t)
	server := store.NewServer(store.Options{})
	client := server.Local("rank 0")
	g := peers.Join(t.Context(), client, "g", 0, 4, says("busy"))
	forger := server.Local("forger")
	set := func(key, value string) { require.NoError(t, forger.Set(t.Context(), key, []byte(value))) }
	for key, value := range map[string]string{
		"peers/notice/g":        `{"aborted":true}`,
		"peers/notice/g\x00one": `{"aborted":true}`,
		"peers/notice/g\x00-1":  `{"aborted":true}`,
		"peers/notice/g\x004":   `{"aborted":true}`,
		"peers/notice/g\x003":   `{"aborted":`,
		"peers/notice/h\x001":   `{"aborted":true}`,
		"peers/member/g\x00one": "",
		"peers/member/g\x009":   "",
	} {
		set(key, value)
	}
	assert.NoError(t, g.Failed(10))
	assert.Contains(t, log.String(), "a notice that is none")
	cause, err := json.Marshal("disk\x1b[2J full" + strings.Repeat("é", 4096))
	require.NoError(t, err)
	set("peers/notice/g\x001", fmt.Sprintf(`{"aborted":true,"cause":%s}`, cause))
	err = g.Failed(10)
	assert.ErrorContains(t, err, `rank 1 aborted: disk\x1b[2J full`)
	assert.Less(t, len(err.Error()), 300)
	const all = "ranks 1-3: communicator closed, or not made yet"
	assert.Equal(t, all, g.Abort(bounded(t), "changed its mind", 0))
	g.Leave()
}

// The name of a group names many ranks where a communicator was made without those.
func TestLongName(t *testing.T) {
	all := job(t, 2)
	excluded := make([]int, 5000)
	for i := range excluded {
		excluded[i] = i
	}
	name := fmt.Sprint("without ", excluded)
	zero := peers.Join(t.Context(), all[0], name, 0, 2, says("busy"))
	peers.Join(t.Context(), all[1], name, 1, 2, says("idle"))
	assert.Equal(t, "rank 1: idle", zero.Abort(bounded(t), "changed its mind", 0))
}

// Asking whether a rank has aborted costs nothing while none has.
func TestFailedAllocatesNothing(t *testing.T) {
	g := peers.Join(t.Context(), job(t, 1)[0], "0", 0, 2, says("busy"))
	assert.Zero(t, testing.AllocsPerRun(100, func() { _ = g.Failed(1) }))
}

// counter counts the keys of groups that are set.
func counter(t *testing.T, server *store.Server) func() map[string]int {
	var mu sync.Mutex
	counts := map[string]int{}
	stop, err := server.Local("counter").Watch(t.Context(), "peers/", func(e store.Event) {
		kind, _, _ := strings.Cut(strings.TrimPrefix(e.Key, "peers/"), "/")
		mu.Lock()
		defer mu.Unlock()
		if !e.Deleted {
			counts[kind]++
		}
	})
	require.NoError(t, err)
	t.Cleanup(stop)
	return func() map[string]int {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(counts)
	}
}

// together has ranks abort at the same time. done is what each has completed.
func together(t *testing.T, groups []*peers.Group, done func(rank int) uint64) {
	ctx := bounded(t)
	var aborts sync.WaitGroup
	for r, g := range groups {
		aborts.Go(func() { assert.NotContains(t, g.Abort(ctx, "timed out", done(r)), "does not answer") })
	}
	aborts.Wait()
	require.NoError(t, ctx.Err())
}

// Ranks that abort at the same time write a notice each, and one answer at most before it, however many they are.
func TestWritesOfAbortsAtTheSameTime(t *testing.T) {
	t.Parallel()
	sizes := []int{2, 64}
	if !testing.Short() { // the race detector takes ten seconds of a processor for that
		sizes = append(sizes, 256)
	}
	for _, size := range sizes {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			server := store.NewServer(store.Options{})
			counts := counter(t, server)
			groups := make([]*peers.Group, size)
			for r := range groups {
				groups[r] = peers.Join(t.Context(), server.Local(fmt.Sprint(r)), "0", r, size, says("busy"))
			}
			joined := counts()["notice"] // of ranks whose process keeps the store
			together(t, groups, func(int) uint64 { return 7 })
			assert.Equal(t, size, counts()["notice"]-joined)
			assert.LessOrEqual(t, counts()["answer"], size)
			for r, g := range groups {
				require.ErrorIs(t, g.Failed(8), comm.ErrPeerFailed, "rank %d", r)
				g.Leave()
			}
		})
	}
}

// A rank that has aborted answers nobody, also those that had completed less than it.
func TestAbortedRanksDoNotAnswer(t *testing.T) {
	const size = 64
	server := store.NewServer(store.Options{})
	counts := counter(t, server)
	groups := make([]*peers.Group, size)
	var begun sync.WaitGroup
	begun.Add(size)
	for r := range groups {
		groups[r] = peers.Join(t.Context(), server.Local(fmt.Sprint(r)), "0", r, size, func() string {
			begun.Done() // once a rank, in its abort: a second time panics
			begun.Wait()
			return "busy"
		})
	}
	joined := counts()["notice"]
	together(t, groups, func(r int) uint64 { return uint64(size - r) })
	assert.Equal(t, size, counts()["notice"]-joined)
	assert.Zero(t, counts()["answer"])
}

// A rank that takes part answers again for ranks that have completed less than those before, and for no others.
func TestOneAnswerForSeveralAborts(t *testing.T) {
	server := store.NewServer(store.Options{})
	counts := counter(t, server)
	groups := make([]*peers.Group, 6)
	for r := range groups {
		groups[r] = peers.Join(t.Context(), server.Local(fmt.Sprint(r)), "0", r, len(groups), says(fmt.Sprint("rank ", r)))
	}
	ctx := bounded(t)
	for i, c := range []struct {
		done    uint64
		answers int
	}{{5, 5}, {5, 5}, {9, 5}, {3, 5 + 2}} {
		text := groups[i].Abort(ctx, "timed out", c.done)
		assert.Contains(t, text, "rank 5: rank 5")
		assert.Equal(t, c.answers, counts()["answer"], "abort %d", i)
	}
	require.NoError(t, ctx.Err())
	for collectives, rank := range map[uint64]int{4: 3, 6: 3, 10: 3} {
		assert.ErrorContains(t, groups[5].Failed(collectives), fmt.Sprintf("rank %d aborted", rank))
	}
	assert.NoError(t, groups[5].Failed(3))
}

// The text says what a rank was doing when it learned of the abort, also if it has aborted and left since.
func TestTextOfARankThatLeft(t *testing.T) {
	t.Parallel()
	server := store.NewServer(store.Options{})
	groups := make([]*peers.Group, 3)
	for r, status := range []func() string{
		says("timed out"),
		says("in flight: allreduce"),
		func() string { // rank 1 has answered
			// Rank 2 answers when this returns, so the time passes in full. It has to last until the notice is written.
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			groups[1].Abort(ctx, "a peer has failed", 0)
			groups[1].Leave()
			return "idle"
		},
	} {
		groups[r] = peers.Join(t.Context(), server.Local(fmt.Sprint("rank ", r)), "0", r, 3, status)
	}
	ctx := bounded(t)
	assert.Equal(t, "rank 1: in flight: allreduce; rank 2: idle", groups[0].Abort(ctx, "timed out", 0))
	require.NoError(t, ctx.Err())
}

// A rank that has no watch left learns from the store which ranks have aborted when it aborts itself.
func TestAbortWithoutAWatch(t *testing.T) {
	server := store.NewServer(store.Options{})
	zero := peers.Join(t.Context(), server.Local("rank 0"), "0", 0, 2, says("busy"))
	client := server.Local("rank 1")
	for range 256 {
		_, err := client.Watch(t.Context(), "another", func(store.Event) {})
		require.NoError(t, err)
	}
	log := logtest.Capture(t)
	one := peers.Join(t.Context(), client, "0", 1, 2, says("deaf"))
	assert.Contains(t, log.String(), "does not learn of peers that abort")
	ctx := bounded(t)
	zero.Abort(ctx, "timed out", 5)
	assert.Equal(t, "rank 0: busy", one.Abort(ctx, "timed out", 5))
	require.NoError(t, ctx.Err())
	assert.ErrorContains(t, one.Failed(6), "rank 0 aborted: timed out")
}

// A rank whose session of a store that no rank keeps is lost says once that it learns of no abort any more, and why.
func TestLostSession(t *testing.T) {
	server := store.NewServer(store.Options{})
	session := server.Local("session of rank 1")
	client := throughProxy(t, "rank 1", func(string) store.Backend { return session })
	g := peers.Join(t.Context(), client, "0", 1, 2, says("busy"))
	left := peers.Join(t.Context(), client, "left", 1, 2, says("busy"))
	left.Leave()
	log := logtest.Capture(t)
	require.NoError(t, session.Close())
	<-client.Done()
	const text = "no longer learns of peers that abort"
	require.Eventually(t, func() bool { return strings.Contains(log.String(), text) }, patience, time.Millisecond)
	assert.Contains(t, log.String(), "rank=1 size=2")
	assert.Contains(t, log.String(), "the job's store does not answer", "the reason")
	assert.NoError(t, g.Failed(100))
	assert.Contains(t, g.Abort(bounded(t), "timed out", 0), "the job's store does not answer")
	g.Leave()
	assert.Equal(t, 1, strings.Count(log.String(), text), log.String())
}

// An answer to an abort does not count for another rank that had completed less.
func TestAnswerToAnotherAbort(t *testing.T) {
	all := job(t, 3)
	asked := 0
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	var groups []*peers.Group
	for r, status := range []func() string{says("busy"), says("busy"), func() string {
		asked++
		if asked > 1 {
			<-release
		}
		return "slow"
	}} {
		groups = append(groups, peers.Join(t.Context(), all[r], "0", r, 3, status))
	}
	assert.Equal(t, "rank 1: busy; rank 2: slow", groups[0].Abort(bounded(t), "timed out", 5))
	abortsUntil(t, groups[1], 4, "rank 0: busy; rank 2: does not answer")
}
