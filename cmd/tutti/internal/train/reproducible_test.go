package train

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// reproducible is the training in docs/same-bits.md's table of hashes.
func reproducible() Config {
	cfg := Default(sparse.Dense)
	cfg.Reproducible = 12
	cfg.Batch = 48
	cfg.Epochs = 4
	return cfg
}

// documentedHash returns the only hash in that table.
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

// The hash of a training equals the one in the table's row for goroutines.
func TestReproducibleDocumentedHash(t *testing.T) {
	want := documentedHash(t)
	for _, ranks := range []int{1, 2, 3, 4, 6, 12} {
		assert.Equal(t, want, trainLocal(t, ranks, reproducible())[sparse.Dense].Hash, "%d ranks", ranks)
	}
}

// undisturbed returns the hashes of the weights after each step of a training by one member. The last one is
// documented.
func undisturbed(t *testing.T) (hashes []uint64) {
	m, err := newMember(t.Context(), cpu.New(), reproducible(), &collector{})
	require.NoError(t, err)
	perEpoch := m.data.Len() / m.cfg.Batch
	for steps := perEpoch * m.cfg.Epochs; m.done.Step < steps; {
		require.NoError(t, m.advance(t.Context(), perEpoch, steps))
		hashes = append(hashes, m.hash())
	}
	require.NoError(t, m.close())
	require.Equal(t, documentedHash(t), fmt.Sprintf("%016x", hashes[len(hashes)-1]))
	return hashes
}

// continued trains from a state up to a step and returns the state there. Each rank compares the weights after each
// step with an undisturbed training.
func continued(t *testing.T, ranks int, before []byte, until int, want []uint64) (saved []byte) {
	local, err := backend.Find("local")
	require.NoError(t, err)
	err = local.Run(t.Context(), backend.Options{Ranks: ranks}, func(ctx context.Context, r backend.Rank) error {
		m, err := newMember(ctx, r.Runtime, reproducible(), &collector{})
		if err != nil {
			return err
		}
		err = m.Rebind(ctx, r.Comm)
		if err == nil && before != nil {
			err = m.Restore(ctx, before)
		}
		for err == nil && m.done.Step < until {
			err = m.advance(ctx, m.data.Len()/m.cfg.Batch, len(want))
			if err == nil && m.hash() != want[m.done.Step-1] {
				err = fmt.Errorf("rank %d has other weights after step %d", r.Comm.Rank(), m.done.Step)
			}
		}
		if err == nil && r.Comm.Rank() == 0 {
			saved, err = m.SharedState(ctx)
		}
		return errors.Join(err, m.close())
	})
	require.NoError(t, err, "%d ranks, from %d bytes of state until step %d", ranks, len(before), until)
	return saved
}

// A training on any number of ranks has an undisturbed training's weights after each step, even if it resumes from a
// state of other numbers of ranks.
func TestReproducibleResumed(t *testing.T) {
	want := undisturbed(t)
	worlds := [][]int{{2, 6, 1, 5}, {6}, {4}, {3}, {2}}
	if testing.Short() { // each rank reads the images
		worlds = worlds[:1]
	}
	for _, numbers := range worlds {
		var saved []byte
		for i, ranks := range numbers {
			saved = continued(t, ranks, saved, (i+1)*len(want)/len(numbers), want)
		}
	}
}

// A member whose vote has committed a step keeps that step, even if another member is lost before it reads the
// result: the others have made the step too.
func TestMemberKeepsCommittedStep(t *testing.T) {
	for name, cfg := range map[string]Config{
		"reproducible": reproducible(),
		"dense":        Default(sparse.Dense),
		"topkA":        Default("topkA"),
	} {
		cfg.Elastic = true
		var after [2]uint64
		for i, breaks := range []bool{false, true} {
			rt := cpu.New()
			m, err := newMember(t.Context(), rt, cfg, &collector{})
			require.NoError(t, err)
			c := noop.New(rt)
			require.NoError(t, m.Rebind(t.Context(), c))
			m.BeforeCommit(func(ctx context.Context) error {
				err := c.Sync(ctx)
				if breaks {
					c.Abort(errors.New("another member is lost"))
				}
				return err
			})
			before := m.hash()
			require.NoError(t, m.advance(t.Context(), 1, 1), name)
			assert.Equal(t, breaks, c.Err() != nil, name)
			assert.Equal(t, 1, m.done.Step, name)
			after[i] = m.hash()
			assert.NotEqual(t, before, after[i], name)
			_ = m.close() // its communicator may have been aborted
		}
		assert.Equal(t, after[0], after[1], name)
	}
}

// phase is a part of a training with a fixed set of members.
type phase struct {
	step    int // the first
	members []string
	begin   []string         // members that join at its start
	leave   []string         // members that leave in order
	kill    map[string]death // members that end in its first step
}

// drawPhases draws the phases of a training in which members join, leave and are killed. The phases have 1, 2, 3, 4
// and 6 members, and one member stays across each change.
func drawPhases(random *rand.Rand, steps int) (phases []phase) {
	sizes := []int{1, 2, 3, 4, 6, 1 + random.IntN(6), 1 + random.IntN(6), 6}
	random.Shuffle(len(sizes), func(i, j int) { sizes[i], sizes[j] = sizes[j], sizes[i] })
	var members []string
	begun := 0
	for i, size := range sizes {
		p := phase{step: i * steps / len(sizes), kill: map[string]death{}}
		if i > 0 {
			p.step += random.IntN(steps / len(sizes) / 2)
		}
		random.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
		stay := min(size, len(members))
		if stay > 1 {
			stay -= random.IntN(stay)
		}
		for _, name := range members[stay:] {
			if how := death(random.IntN(6)); how <= afterVote {
				p.kill[name] = how
			}
			if p.kill[name] == never {
				p.leave = append(p.leave, name)
			}
		}
		for range size - stay {
			begun++
			p.begin = append(p.begin, fmt.Sprint("member ", begun))
		}
		members = slices.Concat(members[:stay], p.begin)
		p.members = slices.Sorted(slices.Values(members))
		phases = append(phases, p)
	}
	return phases
}

// death is the point in a step where a member ends.
type death int

const (
	never death = iota
	beforeSums
	beforeVote // after receiving its part of the sums
	afterVote
)

// mortal is a member that a test can kill in the middle of a step.
type mortal struct {
	*member
	job   *elastic.Member
	death death
}

// BeforeCommit implements [elastic.Trainer].
func (m *mortal) BeforeCommit(vote func(context.Context) error) {
	m.member.BeforeCommit(func(ctx context.Context) error {
		if m.death == beforeVote {
			return m.end()
		}
		if err := vote(ctx); err != nil || m.death == never {
			return err
		}
		return m.end()
	})
}

// end ends the member without telling the others.
func (m *mortal) end() error { return errors.Join(m.job.Close(), io.ErrUnexpectedEOF) }

// churn is an elastic training whose members come and go.
type churn struct {
	t       *testing.T
	phases  []phase
	want    []uint64 // hashes of the weights after each step
	server  *store.Server
	conf    elastic.Config
	results *collector
	members sync.WaitGroup
	mu      sync.Mutex
	begun   int         // phases; guarded by mu
	made    map[int]int // steps that members have made, by how many there were; guarded by mu
	differ  []int       // steps after which a member had other weights; guarded by mu
}

// phase returns the number of a step's phase.
func (c *churn) phase(step int) (number int) {
	for i, p := range c.phases {
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
		for _, name := range c.phases[c.begun].begin {
			c.members.Go(func() { c.join(name) })
		}
	}
}

// join has a member take part until the training, or its part of it, ends.
func (c *churn) join(name string) {
	ctx := c.t.Context()
	conf := c.conf
	conf.Name = name
	conf.Dial = func(context.Context) (store.Store, error) { return c.server.Local(name), nil }
	conf.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf.TLS,
			Listen: "localhost", Silence: conf.Silence})
	}
	rt := cpu.New()
	conf.Runtime = rt
	cfg := reproducible()
	cfg.Elastic = true
	trained, err := newMember(ctx, rt, cfg, c.results)
	if !assert.NoError(c.t, err) {
		return
	}
	m := &mortal{member: trained}
	m.job, err = elastic.Join(ctx, conf, m)
	if !assert.NoError(c.t, err) {
		return
	}
	err = m.job.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error { return c.step(ctx, m, name, e) })
	if m.death == never {
		assert.NoError(c.t, err, name)
		assert.NoError(c.t, m.job.Close())
	}
	assert.NoError(c.t, m.close())
}

// step has a member make a step of the job, or end.
func (c *churn) step(ctx context.Context, m *mortal, name string, e *elastic.Epoch) error {
	number := c.phase(m.done.Step)
	c.enter(number)
	p := c.phases[number]
	m.death = p.kill[name]
	if m.death == beforeSums {
		return m.end()
	}
	if slices.Contains(p.leave, name) {
		m.job.Leave()
	}
	killed := func(name string) bool { return p.kill[name] != never }
	members := slices.Sorted(slices.Values(e.Members))
	if !slices.Equal(members, p.members) && !slices.ContainsFunc(members, killed) {
		return m.job.Commit(ctx) // a boundary without a step of the training
	}
	before := m.done.Step
	err := m.proceed(ctx, m.job)
	if m.done.Step == before {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made[len(members)]++
	if m.hash() != c.want[before] {
		c.differ = append(c.differ, m.done.Step)
	}
	return err
}

// A training whose members come, leave and are killed has the weights of an undisturbed one after each step. With
// TUTTI_EXTENDED there are some of them.
func TestReproducibleElastic(t *testing.T) {
	seeds := []uint64{49}
	if os.Getenv("TUTTI_EXTENDED") != "" {
		seeds = []uint64{rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64()}
	}
	if text := os.Getenv("TUTTI_SEED"); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
		seeds = []uint64{seed}
	}
	conf, err := store.TLS([]byte("a secret of some length"), "test")
	require.NoError(t, err)
	want := undisturbed(t)
	const silence = 10 * time.Second // who ends closes its connections, which the others see at once
	for _, seed := range seeds {
		t.Log("TUTTI_SEED", seed)
		c := &churn{
			t:       t,
			phases:  drawPhases(rand.New(rand.NewPCG(seed, 0)), len(want)),
			want:    want,
			server:  store.NewServer(store.Options{Silence: silence}),
			conf:    elastic.Config{Min: 1, Terms: "reproducible", TLS: conf, Silence: silence},
			results: &collector{results: map[string]Result{}},
			made:    map[int]int{},
		}
		c.enter(0)
		c.members.Wait()
		require.NoError(t, c.server.Close())
		assert.Empty(t, c.differ, "seed %d", seed)
		assert.Equal(t, documentedHash(t), c.results.results[sparse.Dense].Hash, "seed %d", seed)
		for _, p := range c.phases {
			assert.NotZero(t, c.made[len(p.members)], "steps with %d members, seed %d", len(p.members), seed)
		}
	}
}
