package elastic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// forgeries are texts of an epoch that no member writes, by what is wrong with them.
var forgeries = map[string]string{
	"nothing":            ``,
	"a half":             `{"Number":1`,
	"another type":       `[]`,
	"a negative number":  `{"Number":-1}`,
	"no members":         `{"Number":9,"World":"w","Members":[]}`,
	"the last number":    `{"Number":18446744073709551615,"World":"w","Members":[{"Name":"a","Incarnation":"1"}]}`,
	"the last step":      `{"Number":9,"World":"w","Members":[{"Name":"a","Incarnation":"1"}],"Step":18446744073709551615}`,
	"nobody has state":   `{"Number":9,"World":"w","Members":[{"Name":"a","Incarnation":"1","Fresh":true}]}`,
	"no world":           `{"Number":9,"Members":[{"Name":"a","Incarnation":"1"}]}`,
	"a world of escapes": `{"Number":9,"World":"\u001b[2J","Members":[{"Name":"a","Incarnation":"1"}]}`,
	"a member twice":     `{"Number":9,"World":"w","Members":[{"Name":"a","Incarnation":"1"},{"Name":"a","Incarnation":"2"}]}`,
	"a member no name":   `{"Number":9,"World":"w","Members":[{"Incarnation":"1"}]}`,
	"no process":         `{"Number":9,"World":"w","Members":[{"Name":"a"}]}`,
	"a lost one no name": `{"Number":9,"World":"w","Members":[{"Name":"a","Incarnation":"1"}],"Lost":["\n"]}`,
	"a long name":        `{"Number":9,"World":"w","Members":[{"Name":"` + strings.Repeat("a", 2000) + `","Incarnation":"1"}]}`,
	"members before all": `{"Number":0,"World":"w","Members":[{"Name":"a","Incarnation":"1"}]}`,
	"too many members":   `{"Number":9,"World":"w","Members":[` + strings.Repeat(`{},`, maxMembers) + `{}]}`,
	"too many lost ones": `{"Number":9,"World":"w","Members":[{"Name":"a","Incarnation":"1"}],"Lost":[` + strings.Repeat(`"",`, maxMembers) + `""]}`,
}

func TestRecordsAreChecked(t *testing.T) {
	for name, text := range forgeries {
		r, err := read(store.Event{Entry: store.Entry{Key: epochKey, Value: []byte(text), Version: 7}})
		assert.Error(t, err, name)
		assert.Nil(t, r.record, name)
		assert.EqualValues(t, 7, r.version, name)
		if text != "" {
			_, err = read(store.Event{Entry: store.Entry{Key: memberKeys + "a", Value: fmt.Appendf(nil, `{"Name":"a","Incarnation":"1","Standing":%s}`, text)}})
			assert.Error(t, err, name)
		}
	}
	for name, text := range map[string]string{
		"another's":        `{"Name":"b","Incarnation":"1"}`,
		"no process":       `{"Name":"a"}`,
		"no standing":      `{"Name":"a","Incarnation":"1"}`,
		"another standing": `{"Name":"a","Incarnation":"1","Standing":"sitting"}`,
		"a state of none":  `{"Name":"a","Incarnation":"1","Standing":"stepping"}`,
		"entered escapes":  `{"Name":"a","Incarnation":"1","Standing":"stepping","Entered":"\u001b[2J"}`,
		"formed escapes":   `{"Name":"a","Incarnation":"1","Standing":"stepping","Entered":"w","Formed":"\u001b[2J"}`,
		"the last step":    `{"Name":"a","Incarnation":"1","Standing":"joining","Step":18446744073709551615}`,
		"waited for less":  `{"Name":"a","Incarnation":"1","Standing":"joining","BackedOff":-1}`,
	} {
		r, err := read(store.Event{Entry: store.Entry{Key: memberKeys + "a", Value: []byte(text)}})
		assert.Error(t, err, name)
		assert.Nil(t, r.status, name)
	}
	for _, s := range []standing{fresh, joining, stepping, boundary, prepared, leaving} {
		text := fmt.Sprintf(`{"Name":"a","Incarnation":"1","Standing":%q,"Entered":"w","Formed":"w","Step":7}`, s)
		r, err := read(store.Event{Entry: store.Entry{Key: memberKeys + "a", Value: []byte(text)}})
		require.NoError(t, err)
		assert.Equal(t, &status{Name: "a", Incarnation: "1", Standing: s, Entered: "w", Formed: "w", Step: 7}, r.status)
	}
	for _, text := range []string{`{}`, `{"Number":1,"World":"w","Members":[{"Name":"a","Incarnation":"1"},{"Name":"b","Incarnation":"1","Fresh":true}],"Step":3}`} {
		r, err := read(store.Event{Entry: store.Entry{Key: epochKey, Value: []byte(text)}})
		require.NoError(t, err)
		assert.NotNil(t, r.record)
	}
	for _, name := range []string{"\x1b[2J", "a\nb", strings.Repeat("a", 2000)} {
		_, err := Join(t.Context(), Config{Name: name, Min: 1, Form: overTCP, TLS: conf}, Plain{})
		assert.ErrorIs(t, err, comm.ErrArgument)
	}
}

// FuzzEntries has a member decide by whatever the store has.
func FuzzEntries(f *testing.F) {
	for _, text := range forgeries {
		if len(text) < 1000 {
			f.Add([]byte(text), []byte(`{"Name":"a","Incarnation":"1","Standing":"boundary","Entered":"w"}`), []byte(`{"Name":"b","Incarnation":"1","Standing":"joining"}`), "w", byte(3))
		}
	}
	f.Fuzz(func(t *testing.T, epoch, a, b []byte, over string, flags byte) {
		m := &Member{cfg: Config{Name: "a", Min: 1 + int(flags)%3, Max: int(flags) / 4 % 3}, entries: map[string]entry{}, changed: make(chan struct{})}
		if flags&64 > 0 {
			m.cfg.Dial = func(context.Context) (store.Store, error) { return nil, io.EOF }
		}
		for key, value := range map[string][]byte{epochKey: epoch, memberKeys + "a": a, memberKeys + "b": b, finalKey: []byte(over)} {
			m.hear(store.Event{Entry: store.Entry{Key: key, Value: value}})
		}
		k := knowledge{publication: stored, ends: m.ends}
		k.view, _ = m.look()
		k.self = status{Name: "a", Incarnation: "1", Standing: joining}
		if s := m.entries[memberKeys+"a"].status; s != nil {
			k.self = *s
		}
		if flags&128 > 0 {
			k.entered = &record{Number: 8, World: "w", Members: []person{{Name: "a", Incarnation: "1"}}}
		}
		if flags&32 > 0 {
			k.waited = time.Minute
			k.missed = time.Minute
		}
		d := k.decide()
		assert.LessOrEqual(t, len(d.kind()), 1, "%+v", d)
		if d.propose != nil && d.propose.World == "" {
			d.propose.World = "w"
		}
		for _, r := range []*record{d.enter, d.propose, d.rejoin} {
			if r != nil {
				require.NotEmpty(t, r.Members)
				require.NoError(t, r.check())
			}
		}
	})
}

// adder is a member that counts its steps in a tensor.
type adder struct{ *Member }

// newAdder makes a member of a job over a store.
func newAdder(t *testing.T, name string, dial func(context.Context) (store.Store, error), form former) *adder {
	rt := cpu.New()
	state, err := runtime.New(rt, dtype.F32, 4)
	require.NoError(t, err)
	require.NoError(t, state.Fill(0))
	m, err := Join(t.Context(), quick(Config{Name: name, Min: 1, Dial: dial, Form: form, Runtime: rt, Tensors: []*runtime.Tensor{state}}), Plain{})
	require.NoError(t, err)
	return &adder{m}
}

// run makes steps until done says so.
func (a *adder) run(ctx context.Context, done func(e *Epoch) bool) error {
	t := a.cfg.Tensors[0]
	return a.Run(ctx, func(ctx context.Context, e *Epoch) error {
		time.Sleep(time.Millisecond)
		if done(e) {
			return io.EOF
		}
		one, err := runtime.FromSlice(a.cfg.Runtime, []float32{1, 1, 1, 1})
		if err != nil {
			return err
		}
		if err := errors.Join(distributed.AllReduce(ctx, e.Comm, one, comm.Max), e.Comm.Sync(ctx)); err != nil {
			return err
		}
		if err := a.Commit(ctx); err != nil {
			return err
		}
		values := make([]float32, 4)
		if err := runtime.CopyOut(values, t); err != nil {
			return err
		}
		for i := range values {
			values[i]++
		}
		return runtime.CopyIn(t, values)
	})
}

// TestForgedEpochIsReplaced: members go on behind an entry that no member writes, and the next epoch takes its place.
func TestForgedEpochIsReplaced(t *testing.T) { bubble(t, forgedEpochIsReplaced) }

func forgedEpochIsReplaced(t *testing.T) {
	for name, text := range forgeries {
		server := store.NewServer(store.Options{})
		form := new(rooms).form
		dial := func(context.Context) (store.Store, error) { return server.Local("a member"), nil }
		ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
		var all sync.WaitGroup
		forge := make(chan struct{})
		run := func(member string) {
			a := newAdder(t, member, dial, form)
			all.Go(func() {
				var once sync.Once
				assert.NoError(t, a.run(ctx, func(e *Epoch) bool {
					if len(e.Members) == 2 && a.Steps() > 10 {
						once.Do(func() {
							if member == "a" {
								close(forge)
							}
						})
					}
					return len(e.Members) == 3
				}), "%s: %s", name, member)
				assert.NoError(t, a.Close())
			})
		}
		run("a")
		run("b")
		<-forge
		forger := server.Local("forger")
		require.NoError(t, forger.Set(ctx, epochKey, []byte(text)))
		require.NoError(t, forger.Set(ctx, memberKeys+"x", []byte(text)))
		run("c")
		all.Wait()
		assert.NoError(t, ctx.Err(), name)
		cancel()
		require.NoError(t, errors.Join(forger.Close(), server.Close()))
	}
}

// TestForgedStep: members that find an epoch of theirs with another step than they have made go on from their own, or end with an
// error that names it.
func TestForgedStep(t *testing.T) { bubble(t, forgedStep) }

func forgedStep(t *testing.T) {
	const claimed = 1_000_000
	server := store.NewServer(store.Options{})
	form := new(rooms).form
	dial := func(context.Context) (store.Store, error) { return server.Local("a member"), nil }
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	var all sync.WaitGroup
	begun := make(chan *Epoch, 2)
	for _, name := range []string{"a", "b"} {
		a := newAdder(t, name, dial, form)
		all.Go(func() {
			var once sync.Once
			err := a.run(ctx, func(e *Epoch) bool {
				if len(e.Members) == 2 {
					once.Do(func() { begun <- e })
				}
				return e.Number > 99 && a.Steps() > 100
			})
			assert.Less(t, a.Steps(), uint64(claimed), name)
			if err != nil {
				assert.ErrorIs(t, err, comm.ErrMismatch, name)
				assert.ErrorContains(t, err, "epoch 99 (forged) in the store begins behind step 1000000", name)
			}
			assert.NoError(t, a.Close())
		})
	}
	e := <-begun
	<-begun
	forged := *e.record
	forged.Number, forged.World, forged.Step = 99, "forged", claimed
	text, err := json.Marshal(forged)
	require.NoError(t, err)
	forger := server.Local("forger")
	require.NoError(t, forger.Set(ctx, epochKey, text))
	comm.AbortAll(e.Comm, comm.ErrPeerFailed) // the members meet at a boundary
	all.Wait()
	require.NoError(t, errors.Join(ctx.Err(), forger.Close(), server.Close()))
}

// An epoch that none can follow, as its number is the last one, ends the members instead of having them propose
// forever.
func TestForgedLastEpoch(t *testing.T) {
	for name, forge := range map[string]func(r *record){
		"number":   func(r *record) { r.Number = lastNumber },
		"attempts": func(r *record) { r.Number, r.Failed = 99, []failure{{"b", lastNumber}} },
	} {
		r := epochOf(5, "ab")
		forge(r)
		require.NoError(t, r.check(), name)
		next := *r
		next.Number++
		next.Failed = r.failures(nil, r.Members[1:])
		m := &Member{cfg: Config{Name: "a", limit: time.Second}}
		err := m.propose(t.Context(), nil, new(vigil), &next, 0)
		assert.ErrorIs(t, err, comm.ErrMismatch, name)
		assert.ErrorContains(t, err, "no epoch follows the one in the store", name)
	}
}

// A member enters an epoch with the state that the epoch begins with, or gets that.
func TestCheckEntry(t *testing.T) {
	r := epochOf(5, "ab")
	r.Step = 7
	r.Members[1].Fresh = true
	for name, c := range map[string]struct {
		own status
		ok  bool
	}{
		"the step":          {at("a", nil, func(s *status) { s.Step = 7 }), true},
		"the one before":    {at("a", nil, func(s *status) { s.Step = 6 }), false},
		"prepared for it":   {at("a", nil, func(s *status) { s.Step, s.Standing = 6, prepared }), true},
		"prepared, not yet": {at("a", nil, func(s *status) { s.Step, s.Standing = 7, prepared }), true},
		"the next one":      {at("a", nil, func(s *status) { s.Step = 8 }), false},
		"it joins":          {at("b", nil, func(s *status) { s.Step = 3 }), true},
		"it is not in it":   {at("c", nil, func(s *status) { s.Step = 7 }), false},
	} {
		err := r.checkEntry(&c.own)
		assert.Equal(t, c.ok, err == nil, name)
		if err != nil {
			assert.ErrorIs(t, err, comm.ErrMismatch, name)
		}
	}
}

// forge changes something of what JSON says.
func forge(random *rand.Rand, x any) any {
	texts := []any{"", "a", "b", "x", "w", "\x1b[2J", strings.Repeat("long", 500)}
	numbers := []any{-1, 0, 1, 2, 3, 100, 1 << 62, uint64(math.MaxUint64), 0.5}
	switch x := x.(type) {
	case map[string]any:
		for key := range x {
			if random.IntN(4) == 0 {
				x[key] = forge(random, x[key])
			}
			if random.IntN(30) == 0 {
				delete(x, key)
			}
		}
		return x
	case []any:
		switch random.IntN(4) {
		case 0:
			return append(x, x...)
		case 1:
			return x[:random.IntN(len(x)+1)]
		}
		for i := range x {
			x[i] = forge(random, x[i])
		}
		return x
	case bool:
		return !x
	case string:
		return texts[random.IntN(len(texts))]
	case nil:
		return []any{map[string]any{}, []any{}, nil, 1}[random.IntN(4)]
	}
	return numbers[random.IntN(len(numbers))]
}

// forger writes anything into a store, both changed and invented keys.
func forger(t *testing.T, random *rand.Rand, kv *store.Client) {
	all, err := kv.List(t.Context(), keys)
	require.NoError(t, err)
	names := []string{epochKey, finalKey, termsKey, memberKeys + "a", memberKeys + "b", memberKeys + "x", memberKeys, keys}
	key := names[random.IntN(len(names))]
	value := []byte(`{"Number":5,"World":"w","Members":[{"Name":"x","Incarnation":"1"}]}`)
	if len(all) > 0 {
		value = all[random.IntN(len(all))].Value
	}
	for _, e := range all {
		if e.Key == key && random.IntN(3) > 0 {
			value = e.Value
		}
	}
	var x any
	if json.Unmarshal(value, &x) == nil {
		value, err = json.Marshal(forge(random, x))
		require.NoError(t, err)
	}
	if random.IntN(8) == 0 && len(value) > 0 {
		value = value[:random.IntN(len(value))]
	}
	if random.IntN(6) == 0 {
		kv.Drop(key)
		return
	}
	require.NoError(t, kv.Set(t.Context(), key, value, store.Lease))
}

// TestForgedEntries has a process that knows the secret write anything into the store of two members that train: they go on, or
// end with an error of this package or of comm's.
func TestForgedEntries(t *testing.T) { bubble(t, forgedEntries) }

func forgedEntries(t *testing.T) {
	sentinels := []error{ErrLeft, ErrStore, ErrEnded, ErrIdentity, comm.ErrMismatch, comm.ErrPeerFailed, comm.ErrTimeout, comm.ErrBroken, comm.ErrClosed}
	var went atomic.Int32
	seeds := 12
	if os.Getenv("TUTTI_EXTENDED") != "" {
		seeds = 40
	}
	for seed := range uint64(seeds) {
		random := rand.New(rand.NewPCG(seed, 7))
		server := store.NewServer(store.Options{})
		form := new(rooms).form
		dial := func(context.Context) (store.Store, error) { return server.Local("a member"), nil }
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		forged := make(chan struct{})
		var all sync.WaitGroup
		for _, name := range []string{"a", "b"} {
			a := newAdder(t, name, dial, form)
			all.Go(func() {
				since := uint64(math.MaxUint64)
				err := a.run(ctx, func(*Epoch) bool {
					select {
					case <-forged:
						since = min(since, a.Steps())
						return a.Steps() > since+20
					default:
						return false
					}
				})
				known := err == nil
				for _, s := range sentinels {
					known = known || errors.Is(err, s)
				}
				assert.True(t, known, "seed %d: %s: %v", seed, name, err)
				if err == nil {
					went.Add(1)
				}
				assert.NoError(t, a.Close())
			})
		}
		kv := server.Local("forger")
		for range 1 + random.IntN(30) {
			time.Sleep(time.Duration(random.IntN(int(100 * time.Millisecond))))
			forger(t, random, kv)
		}
		require.NoError(t, kv.Close())
		close(forged)
		all.Wait()
		cancel()
		require.NoError(t, server.Close())
	}
	t.Logf("%d of %d members went on", went.Load(), 2*seeds)
	assert.Greater(t, went.Load(), int32(seeds/2))
}
