//go:build unix

package launch

import (
	"context"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// lostText says that a machine's launcher has left the job.
const lostText = "has ended, or its machine cannot be reached"

// between is a first launcher or leader in the pause after a round, with the keys of a second machine.
type between struct {
	*agent
	server *store.Server
	second string
}

// newBetween returns a job of two machines whose ranks have ended for the first time. Its sessions share one store.
func newBetween(t *testing.T) *between {
	t.Helper()
	server := store.NewServer(store.Options{})
	a := newAgent(Config{Machines: 2, Ranks: 1, Restarts: 5, Out: new(buffer), Err: new(buffer)})
	t.Cleanup(func() { _ = flush(a.out, a.err, nil) })
	a.kv = server.Local("the first launcher")
	a.key = machines + "00000001"
	b := &between{agent: a, server: server, second: machines + "00000002"}
	a.plan = plan{
		Size:     2,
		First:    map[string]int{a.key: 0, b.second: 1},
		Machines: map[string]machine{a.key: {Host: "one", Address: "10.0.0.1", Ranks: 1}, b.second: {Host: "two", Address: "10.0.0.2", Ranks: 1}},
		Restarts: 5,
	}
	require.NoError(t, a.kv.Set(t.Context(), a.key, nil, store.Lease))
	return b
}

// join returns a session of the second machine's launcher.
func (b *between) join(t *testing.T) *store.Client {
	t.Helper()
	kv := b.server.Local("the second launcher")
	require.NoError(t, kv.Set(t.Context(), b.second, nil, store.Lease))
	return kv
}

// A lost machine ends the job, and the others learn of it. It may be lost while ranks end, in the pause before the
// restart, or before others watch it.
func TestAMachineLostBetweenRounds(t *testing.T) {
	const round = 4 // its pause is longer than the test
	for name, lose := range map[string]func(t *testing.T, b *between, kv *store.Client){
		"while ranks end": func(t *testing.T, b *between, kv *store.Client) { require.NoError(t, kv.Close()) },
		"in the pause": func(t *testing.T, b *between, kv *store.Client) {
			require.NoError(t, kv.Set(t.Context(), b.doneKey("ended", b.second, round), nil))
			require.NoError(t, kv.Set(t.Context(), "a rank's", nil))
			require.NoError(t, b.kv.Wait(t.Context(), b.doneKey("ended", b.key, round)))
			require.Eventually(t, func() bool { // until the ranks' keys are cleared, and the pause begins
				listed, err := kv.List(t.Context(), "a rank's")
				return err == nil && len(listed) == 0
			}, time.Minute, time.Millisecond)
			require.NoError(t, kv.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBetween(t)
			kv := b.join(t)
			complete, err := b.attend(t.Context())
			require.NoError(t, err)
			ends := make(chan End, 1)
			go func() {
				end, err := b.restart(t.Context(), complete, round, time.Now().Add(time.Hour))
				assert.NoError(t, err)
				ends <- end
			}()
			lose(t, b, kv)
			want := End{Text: "the launcher of two (10.0.0.2) " + lostText, Code: 1}
			select {
			case end := <-ends:
				assert.Equal(t, want, end)
			case <-time.After(time.Minute):
				t.Fatal("the loss is not noticed")
			}
			text, err := b.kv.Get(t.Context(), b.doneKey("ready", "", round))
			require.NoError(t, err)
			told, err := readEnd(text)
			require.NoError(t, err)
			assert.Equal(t, want, told)
		})
	}
}

// A machine that has left before the others watch it is lost as well.
func TestAMachineLostBeforeTheFirstRound(t *testing.T) {
	b := newBetween(t)
	complete, err := b.attend(t.Context())
	require.NoError(t, err)
	require.Error(t, complete.Err())
	assert.Equal(t, "the launcher of two (10.0.0.2) "+lostText, lost(complete).Text)
}

// A launcher that does not lead learns from a served store that the leader has left between rounds.
func TestALeaderLostBetweenRounds(t *testing.T) {
	b := newBetween(t)
	kv := b.join(t)
	leader := b.kv
	b.kv = kv
	b.first = false
	b.Served = true
	b.Join = []string{"store:1"}
	b.key, b.second = b.second, b.key
	complete, err := b.attend(t.Context())
	require.NoError(t, err)
	ends := make(chan End, 1)
	go func() {
		end, err := b.restart(t.Context(), complete, 0, time.Now())
		assert.NoError(t, err)
		ends <- end
	}()
	require.NoError(t, leader.Wait(t.Context(), b.doneKey("ended", b.key, 0)))
	require.NoError(t, leader.Close())
	select {
	case end := <-ends:
		assert.Equal(t, "the launcher of one (10.0.0.1) "+lostText, end.Text)
	case <-time.After(time.Minute):
		t.Fatal("the loss is not noticed")
	}
}

// A store that is lost between two rounds is named.
func TestAStoreLostBetweenRounds(t *testing.T) {
	b := newBetween(t)
	b.first = false
	b.Served = true
	b.Join = []string{"store:1"}
	require.NoError(t, b.kv.Close())
	_, err := b.restart(t.Context(), context.Background(), 0, time.Now())
	require.ErrorIs(t, err, comm.ErrClosed)
	assert.ErrorContains(t, err, "the store at store:1")
}

// A first launcher may end with a signal or because its starter is lost. It does not wait then for a machine that has
// not confirmed the end: here, the wait would last a day.
func TestTheEndWaitsForNoLostMachine(t *testing.T) {
	for name, cause := range map[string]error{"signal": Signaled(syscall.SIGTERM), "detached": errDetached} {
		t.Run(name, func(t *testing.T) {
			first, second := pair(t)
			ctx, cancel := context.WithCancelCause(t.Context())
			a := begin(t, ctx, "idles", first)
			cfg := Config{Command: []string{os.Args[0]}, Version: "v1", Grace: longestGrace, Out: new(buffer), Err: new(buffer)}
			second(&cfg)
			silent := newAgent(cfg)
			t.Cleanup(func() { _ = flush(silent.out, silent.err, nil) })
			require.NoError(t, silent.connect(t.Context()))
			defer silent.kv.Close() //nolint:errcheck // nothing is lost
			a.says(t, "[1] idles")
			cancel(cause)
			assert.Contains(t, ended(t, a.wait(t)).Text, cause.Error()+" on ")
		})
	}
}
