package train

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// reproducible is the training of the table of hashes in docs/same-bits.md.
func reproducible() Config {
	cfg := Default(sparse.Dense)
	cfg.Reproducible = 12
	cfg.Batch = 48
	cfg.Epochs = 4
	return cfg
}

// documentedHash is the only hash in that table.
func documentedHash(t *testing.T) string {
	text, err := os.ReadFile("../../../../docs/same-bits.md")
	require.NoError(t, err)
	require.Contains(t, string(text), "\ntutti train --reproducible 12 --batch 48 --epochs 4 --json |")
	table := regexp.MustCompile("(?m)^\\| `hash` of the first command .*(\n\\|.*)+").Find(text)
	require.NotNil(t, table)
	hashes := regexp.MustCompile(`\b[0-9a-f]{16}\b`).FindAllString(string(table), -1)
	require.NotEmpty(t, hashes)
	for _, h := range hashes {
		require.Equal(t, hashes[0], h, "%s", table)
	}
	return hashes[0]
}

// The row of the table for goroutines has the hash that a training leaves.
func TestReproducibleDocumentedHash(t *testing.T) {
	want := documentedHash(t)
	for _, ranks := range []int{1, 2, 3, 4, 6, 12} {
		assert.Equal(t, want, trainLocal(t, ranks, reproducible())[sparse.Dense].Hash, "%d ranks", ranks)
	}
}

// A training that goes on from its state with another number of ranks has the hash of an undisturbed one.
func TestReproducibleResumed(t *testing.T) {
	cfg := reproducible()
	local, err := backend.Find("local")
	require.NoError(t, err)
	var saved []byte
	hash := ""
	until := 0
	for _, ranks := range []int{2, 3, 1, 5} {
		until += 29 // of 116 steps
		before := saved
		err := local.Run(t.Context(), backend.Options{Ranks: ranks}, func(ctx context.Context, r backend.Rank) error {
			m, err := newMember(ctx, r.Runtime, cfg, &collector{})
			if err != nil {
				return err
			}
			err = m.Rebind(ctx, r.Comm)
			if err == nil && before != nil {
				err = m.Restore(ctx, before)
			}
			perEpoch := m.data.Len() / cfg.Batch
			for err == nil && m.done.Step < until {
				err = m.advance(ctx, perEpoch, perEpoch*cfg.Epochs)
			}
			if err != nil {
				return errors.Join(err, m.close())
			}
			if r.Comm.Rank() == 0 {
				saved, err = m.SharedState(ctx)
				hash = fmt.Sprintf("%016x", m.hash())
			}
			return errors.Join(err, m.close())
		})
		require.NoError(t, err, "%d ranks", ranks)
	}
	assert.Equal(t, documentedHash(t), hash)
}

// phases are from which step on a training has how many members, and which of them begin then.
var phases = []struct {
	step, members int
	begin         []int
	kill, leave   int // a member that ends; 0: none
}{
	{step: 0, members: 2, begin: []int{1, 2}},
	{step: 20, members: 1, kill: 2},
	{step: 40, members: 3, begin: []int{3, 4}},
	{step: 70, members: 2, leave: 1},
	{step: 95, members: 4, begin: []int{5, 6}},
}

// churn is an elastic training whose members come and go.
type churn struct {
	t       *testing.T
	server  *store.Server
	conf    elastic.Config
	results *collector
	members sync.WaitGroup
	mu      sync.Mutex
	begun   int      // phases; guarded by mu
	seen    []uint64 // how many steps were made with so many members; guarded by mu
}

// phase returns the number of a step's phase.
func (c *churn) phase(step int) (number int) {
	for i, p := range phases {
		if step >= p.step {
			number = i
		}
	}
	return number
}

// enter begins phases up to one of that number, which happens once.
func (c *churn) enter(number int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for ; c.begun <= number; c.begun++ {
		for _, name := range phases[c.begun].begin {
			c.members.Go(func() { c.join(name) })
		}
	}
}

// join has a member take part until the training, or its part of it, ends.
func (c *churn) join(name int) {
	ctx := c.t.Context()
	conf := c.conf
	conf.Name = fmt.Sprint("member ", name)
	conf.Dial = func(context.Context) (store.Store, error) { return c.server.Local(conf.Name), nil }
	conf.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf.TLS,
			Listen: "localhost", Silence: elastic.DefaultSilence})
	}
	rt := cpu.New()
	conf.Runtime = rt
	member, err := newMember(ctx, rt, reproducible(), c.results)
	if !assert.NoError(c.t, err) {
		return
	}
	job, err := elastic.Join(ctx, conf, member)
	if !assert.NoError(c.t, err) {
		return
	}
	killed := false
	err = job.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
		number := c.phase(member.done.Step)
		c.enter(number)
		p := phases[number]
		if p.kill == name {
			killed = true
			return errors.Join(job.Close(), io.ErrUnexpectedEOF)
		}
		if p.leave == name {
			job.Leave()
		}
		if len(e.Members) != p.members { // until all are there: a boundary without a step of the training
			return job.Commit(ctx)
		}
		c.mu.Lock()
		c.seen[len(e.Members)]++
		c.mu.Unlock()
		return member.proceed(ctx, job)
	})
	if !killed {
		assert.NoError(c.t, err, "member %d", name)
		assert.NoError(c.t, job.Close())
	}
	assert.NoError(c.t, member.close())
}

// A training whose members come, leave and are killed has the hash of an undisturbed one.
func TestReproducibleElastic(t *testing.T) {
	conf, err := store.TLS([]byte("a secret of some length"), "test")
	require.NoError(t, err)
	c := &churn{
		t:       t,
		server:  store.NewServer(store.Options{Silence: 2 * time.Second}),
		conf:    elastic.Config{Min: 1, Max: 8, Terms: "reproducible", TLS: conf},
		results: &collector{results: map[string]Result{}},
		seen:    make([]uint64, 5),
	}
	c.enter(0)
	c.members.Wait()
	require.NoError(t, c.server.Close())
	assert.Equal(t, documentedHash(t), c.results.results[sparse.Dense].Hash)
	for _, p := range phases {
		assert.NotZero(t, c.seen[p.members], "steps with %d members", p.members)
	}
}
