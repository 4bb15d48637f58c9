//go:build simulated

package simulation

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/sim"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// job is an elastic job. Its only knowledge of the steps comes from their members, so two halves that both go on, or
// a step that only some have committed, contradict each other.
type job struct {
	*play
	kind    string       // reducer: "", sparse.TopkA, "ddp"
	server  *sim.Node    // of the store
	fronts  []*front     // proxies of the store; empty if members use the server
	members []*simulated // live members
	all     []*simulated
	steps   map[uint64]*made
	until   uint64    // number of steps
	calm    time.Time // when all can be reached again
	silence time.Duration
	pace    time.Duration // longest time to compute a step
	judge   judge         // of writes to the server
}

// made is a step as its members report it.
type made struct {
	epoch   uint64
	members []string
	result  []float32            // of the exchange
	values  []float32            // the parameters after it
	before  map[string][]float32 // the residuals, by member
	after   map[string][]float32
}

// simulated is a member.
type simulated struct {
	*job
	*elastic.Member
	name     string
	node     *sim.Node
	rt       *cpu.Runtime
	x        [2]*runtime.Tensor // parameters and gradient
	values   []float32
	gradient []float32
	reducer  *sparse.Reducer
	sums     *ddp.Gradients
	done     uint64 // steps
	epoch    uint64 // of the last step
	fresh    bool   // its state is from another member
	dead     bool
	leaves   bool
	cut      bool // from the store, as Next last said
	hangs    bool // in its next step, until it becomes false again
	err      error
	cancel   context.CancelFunc
	ended    chan struct{}
}

const numbers = 24 // of parameters

// part returns a member's gradient: small integers, so that sums are exact.
func part(seed uint64, name string, step uint64, i int) float32 {
	for _, b := range []byte(name) {
		seed = sim.Mix(seed, uint64(b))
	}
	return float32(sim.Mix(sim.Mix(seed, step), uint64(i)) >> 40 % 7)
}

// join starts a member.
func (j *job) join() *simulated {
	events++
	m := &simulated{job: j, name: fmt.Sprint("m", len(j.all)), rt: cpu.New(), values: make([]float32, numbers), gradient: make([]float32, numbers), ended: make(chan struct{})}
	m.node = j.NewNode(m.name)
	for i, v := range [][]float32{m.values, m.gradient} {
		m.x[i] = must(cpu.Wrap(m.rt, v))
	}
	cfg := elastic.Config{Name: m.name, Min: 1, Silence: j.silence, Patience: j.patience(), Runtime: m.rt, Tensors: m.x[:1]}
	cfg.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: secret, Listen: m.node.Host(), Silence: j.silence})
	}
	dials := 0
	addresses := j.addresses(len(j.all))
	cfg.Dial = func(ctx context.Context) (store.Store, error) {
		dials++
		kv, err := store.Dialer{Addresses: addresses, TLS: secret2, Name: fmt.Sprint(m.name, " ", dials)}.Dial(ctx)
		if err != nil {
			return nil, err
		}
		return &fickle{kv, &j.judge}, nil
	}
	var ctx context.Context
	ctx, m.cancel = context.WithCancel(context.Background())
	j.all, j.members = append(j.all, m), append(j.members, m)
	sim.GoOn(m.node, func() {
		defer close(m.ended)
		t := must(m.newTrainer(ctx))
		m.Member, m.err = elastic.Join(ctx, cfg, t)
		if m.err == nil {
			m.err = m.train(ctx)
			m.Event("ends after %d steps: %v", m.done, m.err)
		}
		j.within(20*time.Second, m.name+": Close", func() {
			_ = t.close()
			if m.Member != nil {
				_ = m.Close()
			}
		})
	})
	return m
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// jobTrainer is a member's trainer and its number of steps.
type jobTrainer struct {
	elastic.Trainer
	*simulated
	close func() error
}

// newTrainer makes a reducer of gradients of one of three kinds.
func (m *simulated) newTrainer(ctx context.Context) (*jobTrainer, error) {
	alone := noop.New(m.rt)
	reduce := sparse.Config{Pattern: sparse.TopkA, Density: 0.1}
	var err error
	switch m.kind {
	case sparse.TopkA:
		m.reducer, err = sparse.New(m.rt, alone, numbers, reduce)
		return &jobTrainer{reducer{m.reducer}, m, m.reducer.Close}, err
	case "ddp":
		m.sums, err = ddp.New(ctx, m.rt, alone, m.x[1:], ddp.Config{Config: reduce, DenseUpTo: -1})
		return &jobTrainer{m.sums, m, m.sums.Close}, err
	}
	return &jobTrainer{elastic.Plain{}, m, alone.Close}, nil
}

// SharedState implements [elastic.Trainer].
func (t *jobTrainer) SharedState(ctx context.Context) ([]byte, error) {
	shared, err := t.Trainer.SharedState(ctx)
	return append(binary.LittleEndian.AppendUint64(nil, t.done), shared...), err
}

// Restore implements [elastic.Trainer].
func (t *jobTrainer) Restore(ctx context.Context, states ...[]byte) error {
	t.done = binary.LittleEndian.Uint64(states[0])
	t.fresh = true
	return t.Trainer.Restore(ctx, states[0][8:])
}

// reducer adapts a sparse.Reducer to elastic.Trainer.
type reducer struct{ *sparse.Reducer }

// Rebind implements [elastic.Trainer].
func (r reducer) Rebind(_ context.Context, c comm.Communicator) error { return r.Reducer.Rebind(c) }

// Residuals implements [elastic.Trainer].
func (r reducer) Residuals() ([]*runtime.Tensor, error) {
	t, err := r.Residual()
	return []*runtime.Tensor{t}, err
}

func (m *simulated) residuals() ([]*runtime.Tensor, error) {
	switch {
	case m.reducer != nil:
		return reducer{m.reducer}.Residuals()
	case m.sums != nil:
		return m.sums.Residuals()
	}
	return nil, nil
}

// residual copies the member's residual.
func (m *simulated) residual() (all []float32) {
	for _, t := range must(m.residuals()) {
		all = append(all, must(cpu.Slice[float32](t))...)
	}
	return all
}

// train makes the steps of a member.
func (m *simulated) train(ctx context.Context) error {
	var failed error
	for {
		var e *elastic.Epoch
		var err error
		began := time.Now()
		e, err = m.Next(ctx, failed)
		if took := time.Since(began); took > 60*time.Second && !m.dead {
			m.fail("%s: Next took %v: %v", m.name, took, err)
		}
		failed, m.cut = nil, errors.Is(err, elastic.ErrStore)
		switch {
		case m.cut && ctx.Err() == nil:
			m.Event("%v", err)
			continue
		case errors.Is(err, elastic.ErrLeft) && m.leaves:
			return nil
		case err != nil:
			return err
		}
		if e.Number != m.epoch {
			m.epoch = e.Number
			m.Event("epoch %d: %v", e.Number, e.Members)
		}
		if m.done >= m.until {
			return nil
		}
		sim.Sleep(m.Between(time.Millisecond, m.pace))
		for m.hangs {
			sim.Sleep(10 * time.Millisecond)
		}
		if failed = m.step(ctx, e); failed != nil {
			m.Event("step %d fails: %v", m.done, failed)
			if errors.Is(failed, comm.ErrMismatch) || errors.Is(failed, comm.ErrArgument) {
				return failed
			}
		}
	}
}

// step makes one step.
func (m *simulated) step(ctx context.Context, e *elastic.Epoch) (err error) {
	if e.Comm.WorldSize() != len(e.Members) || e.Members[e.Comm.Rank()] != m.name {
		m.fail("%s is rank %d of %d in an epoch of %v", m.name, e.Comm.Rank(), e.Comm.WorldSize(), e.Members)
	}
	for i := range m.gradient {
		m.gradient[i] = part(m.Seed, m.name, m.done, i)
	}
	given, before, values := slices.Clone(m.gradient), m.residual(), slices.Clone(m.values)
	switch m.kind {
	case sparse.TopkA:
		err = m.reducer.AllReduce(ctx, m.x[1])
	case "ddp":
		err = m.sums.ReduceAll(ctx, m.x[1:])
	default:
		if err = distributed.AllReduce(ctx, e.Comm, m.x[1], comm.Sum); err == nil {
			err = e.Comm.Sync(ctx)
		}
		if err == nil {
			err = m.Commit(ctx)
		}
	}
	if err != nil {
		if m.kind != "" && (!slices.Equal(m.gradient, given) || !slices.Equal(m.residual(), before)) || !slices.Equal(m.values, values) {
			m.fail("%s: a part of step %d, which failed, is done: %v", m.name, m.done, err)
		}
		return err
	}
	result := slices.Clone(m.gradient)
	for i, x := range result {
		if m.kind != "" { // the average
			x = float32(math.Round(float64(x) * float64(len(e.Members))))
		}
		result[i] = x
		m.values[i] += x
	}
	s := m.steps[m.done]
	if s == nil {
		s = &made{epoch: e.Number, members: e.Members, result: result, values: slices.Clone(m.values), before: map[string][]float32{}, after: map[string][]float32{}}
		m.steps[m.done] = s
		m.Event("step %d of epoch %d is made", m.done, e.Number)
	}
	if s.epoch != e.Number || !slices.Equal(s.members, e.Members) || !slices.Equal(s.result, result) || !slices.Equal(s.values, m.values) {
		m.fail("%s: step %d in epoch %d of %v: %v, then %v; others in epoch %d of %v: %v, then %v",
			m.name, m.done, e.Number, e.Members, result, m.values, s.epoch, s.members, s.result, s.values)
	}
	if m.fresh && slices.ContainsFunc(before, func(x float32) bool { return x != 0 }) {
		m.fail("%s begins with a residual: %v", m.name, before)
	}
	if _, again := s.before[m.name]; again {
		m.fail("%s makes step %d twice", m.name, m.done)
	}
	s.before[m.name], s.after[m.name] = before, m.residual()
	m.done, m.fresh = m.done+1, false
	return nil
}

// replay compares all steps with those of the same members without faults, and accounts for the residuals.
func (j *job) replay() {
	values, last := make([]float32, numbers), (*made)(nil)
	for step := range uint64(len(j.steps)) {
		s := j.steps[step]
		if s == nil {
			j.fail("nobody has made step %d of %d", step, len(j.steps))
		}
		sum := make([]float32, numbers) // the input minus what remains in residuals
		for _, name := range s.members {
			for i := range sum {
				sum[i] += part(j.Seed, name, step, i)
				if b, a := s.before[name], s.after[name]; len(b) > 0 {
					sum[i] += b[i] - a[i]
				}
			}
			if own := s.before[name]; last != nil && len(own) > 0 && !slices.Equal(own, last.after[name]) {
				j.inherits(name, own, last, s)
			}
		}
		if len(s.before) == len(s.members) && !slices.Equal(sum, s.result) { // all are alive to report their residuals
			j.fail("step %d of %v: %v went in, and %v came out", step, s.members, sum, s.result)
		}
		for i := range values {
			values[i] += s.result[i]
		}
		if !slices.Equal(values, s.values) {
			j.fail("after step %d parameters are %v, expected %v", step, s.values, values)
		}
		last = s
	}
}

// inherits fails unless a member has its residual from its last step or none, plus residuals of members that left in
// between.
func (j *job) inherits(name string, own []float32, last, s *made) {
	left := [][]float32{}
	for _, other := range j.all {
		if other.leaves && last.after[other.name] != nil && !slices.Contains(s.members, other.name) {
			left = append(left, last.after[other.name])
		}
	}
	was := last.after[name]
	if was == nil || slices.Max(own) == 0 {
		was = make([]float32, len(own)) // it has just joined
	}
	for subset := range 1 << len(left) {
		sum := slices.Clone(was)
		for i, l := range left {
			for k := range sum {
				sum[k] += float32(subset>>i&1) * l[k]
			}
		}
		if slices.Equal(sum, own) {
			return
		}
	}
	j.fail("%s has the residual %v, and had %v; %d left", name, own, was, len(left))
}

// converge waits until exactly the live members make steps together.
func (j *job) converge(what string) { j.convergeIn(what, 60*time.Second) }

func (j *job) convergeIn(what string, limit time.Duration) {
	began, first := time.Now(), len(j.steps)
	for {
		s := j.steps[uint64(len(j.steps)-1)]
		var want []string
		for _, m := range j.members {
			want = append(want, m.name)
			if m.Member == nil && m.err != nil {
				j.fail("%s cannot join: %v", m.name, m.err)
			}
		}
		if s != nil && len(j.steps) > first+2 && len(s.members) == len(want) && !slices.ContainsFunc(want, func(name string) bool {
			return s.before[name] == nil && j.kind != "" || !slices.Contains(s.members, name)
		}) {
			return
		}
		if time.Since(began) > limit {
			for _, m := range j.members {
				j.Event("%s: %d steps, cut off %v, %v", m.name, m.done, m.cut, m.err)
			}
			j.fail("%s: %v do not train together after %v", what, want, time.Since(began))
		}
		sim.Sleep(10 * time.Millisecond)
	}
}

// gone removes a member from the list.
func (j *job) gone(m *simulated) {
	j.members = slices.DeleteFunc(j.members, func(o *simulated) bool { return o == m })
}

// event causes one random event.
func (j *job) event() {
	any := j.members[j.IntN(len(j.members))]
	alone := len(j.members) == 1
	switch kind := j.IntN(11); {
	case alone || kind == 0:
		if len(j.members) < 5 {
			j.join()
		}
	case kind == 1: // joins and leaves in one boundary
		if j.spare(any) {
			j.leave(any)
		}
		j.join()
	case kind == 2:
		if j.spare(any) {
			j.leave(any)
		}
	case kind == 3: // a member lost while it joins
		m := j.join()
		sim.Sleep(j.Between(0, 60*time.Millisecond))
		j.kill(m)
	case kind == 4:
		away := j.away(4)
		any.node.Freeze()
		sim.AfterFunc(away, any.node.Thaw)
	case kind == 5: // a partition
		away := j.away(6)
		until := time.Now().Add(away)
		var here, there []*sim.Node
		for i, m := range j.members {
			if i == 0 || j.Chance(2) {
				here = append(here, m.node)
			} else {
				there = append(there, m.node)
			}
		}
		there = append(there, j.server)
		for _, f := range j.fronts {
			there = append(there, f.node)
		}
		for _, a := range here {
			for _, b := range there {
				j.Cut(a, b, until)
				if !j.Chance(4) { // or in one direction
					j.Cut(b, a, until)
				}
			}
		}
		sim.Sleep(time.Until(until))
	case kind == 6:
		events++
		j.Hangup(func(from, to *sim.Node) bool { return from == any.node || to == any.node })
	case kind == 7:
		j.refuse()
	case kind == 8:
		j.isolate(any)
	case kind == 9:
		j.hang(any)
	case len(j.fronts) > 0 && j.Chance(2):
		j.loseFront()
	case j.Chance(2): // a slow store
		away := j.away(4)
		j.server.Freeze()
		sim.AfterFunc(away, j.server.Thaw)
	case j.spare(any):
		j.kill(any)
	}
}

// away draws how long a node is out of reach: at most a few times silence. A member that cannot reach the store for
// more than five times silence, through successive faults, has made steps that the others repeat.
func (j *job) away(most time.Duration) time.Duration {
	events++
	most = min(most, 4)
	sim.Sleep(max(time.Until(j.calm), 0))
	d := j.Between(time.Millisecond, most*j.silence)
	if until := time.Now().Add(d + 4*j.silence); until.After(j.calm) {
		j.calm = until
	}
	return d
}

// spare reports whether the job can lose a member: another one has the state and can be reached.
func (j *job) spare(m *simulated) bool {
	sim.Sleep(max(time.Until(j.calm), 0))
	last := j.steps[uint64(len(j.steps)-1)]
	return slices.Contains(j.members, m) && slices.ContainsFunc(j.members, func(o *simulated) bool { return o != m && slices.Contains(last.members, o.name) })
}

func (j *job) leave(m *simulated) {
	j.Event("%s is to leave", m.name)
	events++
	j.gone(m)
	if m.leaves = true; m.Member == nil {
		m.cancel()
	} else {
		m.Leave()
	}
}

// hang keeps a live member from the exchange of a step. The others go on without it, and with it again once it
// continues.
func (j *job) hang(m *simulated) {
	if !j.spare(m) {
		return
	}
	events++
	j.Event("%s hangs", m.name)
	m.hangs = true
	j.gone(m)
	if j.Chance(2) {
		j.converge("without a member that hangs")
	} else {
		sim.Sleep(j.Between(0, 2*j.patience()))
	}
	m.hangs = false
	j.Event("%s goes on", m.name)
	j.members = append(j.members, m)
}

// patience is the time that members wait for one that hangs.
func (j *job) patience() time.Duration { return 6 * j.silence }

// kill ends a member's process, or its host.
func (j *job) kill(m *simulated) {
	events++
	if m.dead = true; !m.leaves {
		j.gone(m)
	}
	j.Kill(m.node, j.Chance(3))
}

// playElastic has members join, leave, be killed, stopped, and cut off from each other and the store. They make the
// same steps as without faults, and none waits forever. In wild seeds a fault does not wait for the end of another.
func playElastic(p *play) { playJob(p, 0, 40*time.Millisecond) }

// playMembership is playElastic with many events and fewer steps. Its waits poll more rarely.
func playMembership(p *play) {
	p.Rarely = true
	playJob(p, 60, 400*time.Millisecond)
}

func playJob(p *play, most int, pace time.Duration) {
	kind := []string{"", sparse.TopkA, "ddp"}[p.IntN(3)]
	j := &job{play: p, kind: kind, steps: map[uint64]*made{}, until: 1 << 62, silence: time.Second, pace: pace}
	wild := p.Chance(2)
	server := p.serve(store.Options{Silence: j.silence})
	j.server = p.store
	if p.Chance(3) {
		j.judge = judge{every: 2 + p.IntN(6), denied: p.Chance(2)}
	}
	if p.Chance(2) {
		j.serveFronts()
	}
	for range 1 + p.IntN(4) {
		j.join()
	}
	j.converge("the beginning")
	if most == 0 {
		most = 2 + p.IntN(5)
	}
	for range most {
		if j.event(); wild {
			sim.Sleep(p.Between(0, 3*j.silence))
		} else {
			j.converge("after an event")
		}
	}
	sim.Sleep(10 * j.silence)
	j.converge("the end")
	j.until = uint64(len(j.steps)) + 3
	trains := func(m *simulated) bool { return m.done < j.until }
	for began := time.Now(); slices.ContainsFunc(j.members, trains); sim.Sleep(10 * time.Millisecond) {
		if time.Since(began) > 60*time.Second {
			p.fail("members do not make their last steps")
		}
	}
	wait := func(m *simulated) {
		select {
		case <-m.ended:
		case <-time.After(limit):
			p.fail("%s has not ended", m.name)
		}
		sim.Point()
	}
	for _, m := range j.all {
		if errors.Is(m.err, comm.ErrMismatch) {
			p.fail("%s: %v", m.name, m.err)
		}
		if !m.dead {
			if wait(m); m.err != nil && !m.leaves {
				p.fail("%s: %v", m.name, m.err)
			}
		}
	}
	j.closeFronts()
	p.within(20*time.Second, "Close of the store", func() { _ = server.Close() })
	for _, m := range j.all {
		if m.dead {
			m.cancel()
			p.Bury(m.node)
			wait(m)
		}
	}
	sim.Sleep(20 * time.Second)
	j.replay()
}
