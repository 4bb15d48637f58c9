package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/fault"
	"github.com/tutti-go/tutti/internal/logtest"
)

// meeting is a store in this process with a client for each rank.
type meeting struct {
	server  *store.Server
	clients []*store.Client
}

func newMeeting(t *testing.T, size int) *meeting {
	m := &meeting{server: store.NewServer(store.Options{})}
	for rank := range size {
		m.clients = append(m.clients, m.server.Local(fmt.Sprint("rank ", rank)))
	}
	t.Cleanup(func() { _ = m.server.Close() })
	return m
}

// enter begins a rank's Round, whose attempt waits for its context. The number of each attempt is received from
// entered, and the error of Round from ended.
func (m *meeting) enter(ctx context.Context, rank int) (entered chan string, ended chan error) {
	entered, ended = make(chan string, 10), make(chan error, 1)
	go func() {
		ended <- m.round(ctx, rank, func(ctx context.Context, number string) error {
			entered <- number
			<-ctx.Done()
			return comm.ContextError(ctx)
		})
	}()
	return entered, ended
}

func (m *meeting) round(ctx context.Context, rank int, attempt func(ctx context.Context, number string) error) error {
	return Job{Rank: rank, WorldSize: len(m.clients)}.Round(ctx, m.clients[rank], "test", attempt)
}

// complete has each of some ranks make one round with all, and returns its number.
func (m *meeting) complete(t *testing.T, ranks ...int) []string {
	numbers, errs := make([]string, len(ranks)), make([]error, len(ranks))
	var all sync.WaitGroup
	for i, rank := range ranks {
		all.Go(func() {
			errs[i] = m.round(deadline(t, time.Minute), rank, func(ctx context.Context, number string) error {
				numbers[i] = number
				if rank > 0 {
					return nil
				}
				for _, key := range (Job{WorldSize: len(m.clients)}).Arrivals("test", number) {
					if _, err := m.clients[0].Get(ctx, key); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	return numbers
}

// All ranks have a number that no earlier round had, whoever comes first. Of rounds, the keys of the last one stay.
func TestRoundsHaveNumbers(t *testing.T) {
	m := newMeeting(t, 3)
	for i := range 20 {
		number := strconv.Itoa(i + 1)
		require.Equal(t, []string{number, number, number}, m.complete(t, 0, 1, 2))
	}
	left, err := m.server.Local("observer").List(t.Context(), "")
	require.NoError(t, err)
	require.Len(t, left, 1+len(m.clients), "%v", left)
}

// A rank that comes when rank 0 has long begun is in the same round.
func TestRoundOfALateRank(t *testing.T) {
	m := newMeeting(t, 2)
	begun, others := make(chan string), make(chan struct{})
	led := make(chan error, 1)
	go func() {
		led <- m.round(t.Context(), 0, func(_ context.Context, number string) error {
			begun <- number
			<-others
			return nil
		})
	}()
	number := <-begun
	require.NoError(t, m.round(t.Context(), 1, func(_ context.Context, late string) error {
		assert.Equal(t, number, late)
		close(others)
		return nil
	}))
	require.NoError(t, <-led)
}

// A rank that has completed a round waits for the next one, although rank 0 is in that round still.
func TestRoundsAreCompletedOnce(t *testing.T) {
	m := newMeeting(t, 2)
	begun := make(chan string, 2)
	led := make(chan error, 2)
	// Rank 0 stays in a round until it may leave: the number goes with it.
	lead := func(leave <-chan struct{}) {
		led <- m.round(t.Context(), 0, func(_ context.Context, number string) error {
			begun <- number
			<-leave
			return nil
		})
	}
	follow := func(ctx context.Context) (numbers []string, err error) {
		err = m.round(ctx, 1, func(_ context.Context, number string) error {
			numbers = append(numbers, number)
			return nil
		})
		return numbers, err
	}
	first := make(chan struct{})
	go lead(first)
	require.Equal(t, "1", <-begun)
	numbers, err := follow(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"1"}, numbers)
	numbers, err = follow(deadline(t, 10*time.Millisecond))
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.Empty(t, numbers)
	close(first)
	require.NoError(t, <-led)
	second := make(chan struct{})
	go lead(second)
	numbers, err = follow(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"2"}, numbers)
	close(second)
	require.NoError(t, <-led)
}

// One missing rank is the only one that the others accuse, whenever they end, also when their processes end with it.
func TestRoundNamesTheMissingRankAlone(t *testing.T) {
	for _, order := range [][]int{{0, 2, 3}, {3, 2, 0}, {2, 0, 3}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			m := newMeeting(t, 4)
			cancel, entered, ended := map[int]func(){}, map[int]chan string{}, map[int]chan error{}
			for _, rank := range order {
				ctx, stop := context.WithCancel(t.Context())
				cancel[rank] = stop
				entered[rank], ended[rank] = m.enter(ctx, rank)
			}
			for _, rank := range order {
				require.Equal(t, "1", <-entered[rank])
			}
			for _, rank := range order {
				cancel[rank]()
				err := <-ended[rank]
				require.ErrorIs(t, err, comm.ErrCanceled, "rank %d", rank)
				require.ErrorContains(t, err, "rendezvous: rank 1 did not come: ", "rank %d", rank)
				require.NoError(t, m.clients[rank].Close())
			}
		})
	}
}

// Ranks that have ended with success are named as such where others wait for them.
func TestRoundNamesRanksThatHaveEnded(t *testing.T) {
	for _, c := range []struct {
		missing, ended []int
		want           string
	}{
		{[]int{2}, []int{2}, "rank 2 (ended with success)"},
		{[]int{2, 3}, []int{3}, "ranks 2, 3 (rank 3 ended with success)"},
		{[]int{2, 3}, []int{1, 9}, "ranks 2, 3"},
	} {
		m := newMeeting(t, 4)
		for _, rank := range c.ended {
			require.NoError(t, m.clients[1].Set(t.Context(), fault.EndedKey(rank), nil))
		}
		ctx, cancel := context.WithCancel(t.Context())
		ends := map[int]chan error{}
		for rank := range 4 {
			if slices.Contains(c.missing, rank) {
				continue
			}
			var entered chan string
			entered, ends[rank] = m.enter(ctx, rank)
			require.Equal(t, "1", <-entered)
		}
		cancel()
		for rank, end := range ends {
			require.ErrorContains(t, <-end, "rendezvous: "+c.want+" did not come: ", "rank %d", rank)
		}
	}
	m := newMeeting(t, 2)
	r := &round{Job: Job{Rank: 1, WorldSize: 2}, kv: m.clients[1]}
	assert.Equal(t, "rank 0", r.leader(t.Context()))
	require.NoError(t, m.clients[0].Set(t.Context(), fault.EndedKey(0), nil))
	assert.Equal(t, "rank 0 (ended with success)", r.leader(t.Context()))
}

// Without rank 0 there is no round. It is accused, and a later rank 0 starts one with whoever waits.
func TestRoundWithoutRankZero(t *testing.T) {
	m := newMeeting(t, 3)
	var err error
	for limit := time.Millisecond; ; limit *= 2 {
		_, ended := m.enter(deadline(t, limit), 1)
		err = <-ended
		require.ErrorIs(t, err, comm.ErrTimeout)
		if !strings.Contains(err.Error(), "store: watch ") { // which a crowded machine had not answered
			break
		}
	}
	require.ErrorContains(t, err, "rendezvous: rank 0 did not come: ")
	require.Equal(t, []string{"1", "1", "1"}, m.complete(t, 2, 1, 0))
}

// A rank may try again in a round, and so may rank 0, which takes all that wait with it to the next one.
func TestRoundsBeginAgain(t *testing.T) {
	m := newMeeting(t, 3)
	short, fail := context.WithCancel(t.Context())
	entered, ended := m.enter(short, 0)
	require.Equal(t, "1", <-entered)
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		entered, ended := m.enter(ctx, 1)
		require.Equal(t, "1", <-entered)
		cancel()
		require.ErrorIs(t, <-ended, comm.ErrCanceled)
	}
	one, oneEnded := m.enter(t.Context(), 1)
	require.Equal(t, "1", <-one)
	fail()
	require.ErrorContains(t, <-ended, "rank 2 did not come")

	short, fail = context.WithCancel(t.Context())
	entered, ended = m.enter(short, 0)
	require.Equal(t, "2", <-entered)
	require.Equal(t, "2", <-one)
	fail()
	require.ErrorContains(t, <-ended, "did not come")
	require.Empty(t, oneEnded, "rank 1 waits for rank 0 to try again")

	// A rank that has begun already gets its success also when the next round begins meanwhile.
	begun, last := make(chan string, 1), make(chan error, 1)
	go func() {
		last <- m.round(t.Context(), 2, func(ctx context.Context, number string) error {
			begun <- number
			<-ctx.Done()
			assert.ErrorIs(t, context.Cause(ctx), errLaterRound)
			return nil
		})
	}()
	short, fail = context.WithCancel(t.Context())
	entered, ended = m.enter(short, 0)
	require.Equal(t, "3", <-entered)
	require.Equal(t, "3", <-one)
	require.Equal(t, "3", <-begun)
	fail()
	require.Error(t, <-ended)
	entered, _ = m.enter(t.Context(), 0)
	require.Equal(t, "4", <-entered)
	require.NoError(t, <-last)
}

// When rank 0 ends early, and the store with it, the others fail at once: one that waits for the round, and one that
// is in it. A launcher's store stays, and they wait for the next process of rank 0.
func TestRoundWhoseRankZeroEnds(t *testing.T) {
	for name, begins := range map[string]bool{"before": false, "in it": true} {
		t.Run(name, func(t *testing.T) {
			logtest.Capture(t)
			zero := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("a secret of tests, long enough as it is")}
			one := zero
			one.Rank = 1
			own, err := zero.Connect(t.Context())
			require.NoError(t, err)
			kv, err := one.Connect(t.Context())
			require.NoError(t, err)
			defer kv.Close() //nolint:errcheck // the store is gone
			m := &meeting{clients: []*store.Client{own, kv}}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if begins {
				entered, _ := m.enter(ctx, 0)
				<-entered
			}
			ended, waits := make(chan error, 1), make(chan struct{})
			go func() {
				if !begins {
					close(waits)
				}
				ended <- m.round(t.Context(), 1, func(ctx context.Context, _ string) error {
					close(waits)
					_, err := kv.Get(ctx, "never")
					return err
				})
			}()
			<-waits
			require.NoError(t, own.Close())
			assert.ErrorIs(t, await(t, results(ended)).err, comm.ErrPeerFailed)
		})
	}
	t.Run("but not the store", func(t *testing.T) {
		m := newMeeting(t, 2)
		entered, _ := m.enter(t.Context(), 0)
		require.Equal(t, "1", <-entered)
		one, _ := m.enter(t.Context(), 1)
		require.Equal(t, "1", <-one)
		require.NoError(t, m.clients[0].Close())
		m.clients[0] = m.server.Local("the next process")
		entered, _ = m.enter(t.Context(), 0)
		require.Equal(t, "2", <-entered)
		require.Equal(t, "2", <-one)
	})
}

// results are errors as those of shares.
func results(ended <-chan error) <-chan result {
	all := make(chan result, 1)
	go func() { all <- result{err: <-ended} }()
	return all
}

// A number that rank 0 cannot have drawn is an error.
func TestRoundOfNoNumber(t *testing.T) {
	m := newMeeting(t, 2)
	require.NoError(t, m.clients[0].Set(t.Context(), currentKeys+"test", []byte("1/../2")))
	err := m.round(t.Context(), 1, func(context.Context, string) error { panic("there is no round") })
	require.ErrorIs(t, err, strconv.ErrSyntax)
	assert.ErrorContains(t, err, "rendezvous: rank 1: the number of a round: ")
}

// A rank that a full store has no room for is told so.
func TestAFullStoreRefusesARank(t *testing.T) {
	t.Parallel()
	m := newMeeting(t, 2)
	entered, _ := m.enter(t.Context(), 0)
	<-entered
	var err error
	for i := 0; err == nil; i++ {
		err = m.clients[1].Set(t.Context(), "filling/"+strconv.Itoa(i), nil)
	}
	require.ErrorIs(t, err, store.ErrFull)
	err = m.round(deadline(t, time.Minute), 1, func(context.Context, string) error { panic("it has not arrived") })
	require.ErrorIs(t, err, store.ErrFull)
}
