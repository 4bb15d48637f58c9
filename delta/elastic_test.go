package delta

import (
	"context"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestAgree: of ranks with different versions, each has the latest one afterwards, one whose tensors are of no
// version among them.
func TestAgree(t *testing.T) {
	const seed = 21
	r, rt := rand.New(rand.NewPCG(seed, 0)), cpu.New()
	versions := []model{newModel(r, "m")}
	for v := range 7 {
		versions = append(versions, versions[v].train(r, 0.1))
	}
	at := []int{4, 7, 0, 7, 6}
	publishers, weights := make([]*Publisher, len(at)), make([]model, len(at))
	for i, last := range at {
		publishers[i], weights[i] = NewPublisher(rt, nil), versions[last].clone()
		for v := 1; v <= last; v++ {
			require.NoError(t, publishers[i].Commit(t.Context(), uint64(v), versions[v]))
		}
	}
	for range 2 { // the second time there is nothing to send
		for rank, err := range world(t, len(at), func(ctx context.Context, c comm.Communicator) error {
			return publishers[c.Rank()].Agree(ctx, c, weights[c.Rank()])
		}) {
			require.NoError(t, err, "rank %d", rank)
			require.NoError(t, same(weights[rank], versions[7]), "rank %d, seed %d", rank, seed)
			require.EqualValues(t, 7, publishers[rank].Version())
		}
	}
}

// follower is a trainer whose members have what its publisher has.
type follower struct {
	elastic.Plain
	t         *testing.T
	publisher *Publisher
	weights   model
}

func (f *follower) Rebind(ctx context.Context, c comm.Communicator) error {
	return f.publisher.Agree(ctx, c, f.weights)
}

func (f *follower) SharedState(context.Context) ([]byte, error) {
	return binary.AppendUvarint(nil, f.publisher.Version()), nil
}

func (f *follower) Restore(_ context.Context, states ...[]byte) error {
	version, _ := binary.Uvarint(states[0])
	assert.Equal(f.t, version, f.publisher.Version())
	return nil
}

func (f *follower) Hash(context.Context) (uint64, error) {
	return uint64(f.publisher.replica.digest()), nil
}

// TestElastic has a member of a job killed. It comes back with the weights that it had, and gets what has changed
// since.
func TestElastic(t *testing.T) {
	const seed, killed, met, end = 22, 5, 12, 20
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	rt := cpu.New()
	conf, err := store.TLS([]byte("secret"), "delta")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // the members have ended
	var mu sync.Mutex
	digests := map[uint64]uint32{} // by version
	train := func(cfg elastic.Config, weights model, version uint64, each func(m *elastic.Member, p *Publisher, e *elastic.Epoch) (goOn bool)) error {
		p := NewPublisher(rt, nil)
		if err := p.Commit(ctx, version, weights); err != nil {
			return err
		}
		cfg.Min = 1
		cfg.Max = 2
		cfg.Runtime = rt
		cfg.Dial = func(context.Context) (store.Store, error) { return server.Local(cfg.Name), nil }
		cfg.Form = func(ctx context.Context, kv store.Store, at elastic.Place) (comm.Communicator, error) {
			return tcp.New(ctx, kv, tcp.Config{Rank: at.Rank, WorldSize: at.Size, World: at.World, TLS: conf, Listen: "localhost", Silence: elastic.DefaultSilence})
		}
		m, err := elastic.Join(ctx, cfg, &follower{t: t, publisher: p, weights: weights})
		if err != nil {
			return err
		}
		defer m.Close()
		return m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
			if !each(m, p, e) || p.Version() >= end {
				return io.EOF
			}
			if err := m.Commit(ctx); err != nil {
				return err
			}
			if len(e.Members) == 1 && (p.Version() == 1 || p.Version() >= met) { // until the other one is there
				time.Sleep(time.Millisecond)
				return nil
			}
			for i, next := range weights.train(rand.New(rand.NewPCG(seed, p.Version())), 0.02) {
				copy(weights[i].Memory.(Host), next.Memory.(Host))
			}
			err := p.Commit(ctx, p.Version()+1, weights)
			mu.Lock()
			defer mu.Unlock()
			if d, ok := digests[p.Version()]; ok {
				assert.Equal(t, d, p.replica.digest(), "version %d, seed %d", p.Version(), seed)
			}
			digests[p.Version()] = p.replica.digest()
			return err
		})
	}
	r := rand.New(rand.NewPCG(seed, 0))
	first := append(newModel(r, "m"), newTensor(r, "long", dtype.BF16, 20_000)) // so that what one misses is in the log
	alone := make(chan bool, 1)                                                 // when it begins, and when it has gone on alone
	var members sync.WaitGroup
	members.Go(func() {
		asked := map[bool]bool{false: true, true: true}
		assert.NoError(t, train(elastic.Config{Name: "stays"}, first.clone(), 1, func(m *elastic.Member, p *Publisher, e *elastic.Epoch) bool {
			if told := p.Version() == met; len(e.Members) == 1 && (p.Version() == 1 || told) && len(alone) == 0 && asked[told] {
				asked[told] = false
				alone <- true
			}
			if len(e.Members) == 2 && p.Version() > killed+2 {
				assert.True(t, slices.ContainsFunc(p.log, func(d *Delta) bool { return d.Base == killed }), "what the other one has missed")
			}
			return true
		}))
	})
	await := func() {
		select {
		case <-alone:
		case <-ctx.Done():
		}
	}
	mine, saved := first.clone(), model(nil)
	await()
	assert.NoError(t, train(elastic.Config{Name: "comes"}, mine, 1, func(m *elastic.Member, p *Publisher, _ *elastic.Epoch) bool {
		if p.Version() == killed {
			saved = mine.clone()
			_ = m.Close()
		}
		return saved == nil
	}))
	require.NotNil(t, saved)
	await()
	missed := 0
	require.NoError(t, train(elastic.Config{Name: "comes"}, saved, killed, func(_ *elastic.Member, p *Publisher, e *elastic.Epoch) bool {
		if missed == 0 {
			missed = int(p.Version()) - killed
		}
		return true
	}))
	members.Wait()
	assert.Equal(t, met-killed, missed, "versions")
}
