package delta

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// model is what a trainer has: bytes by name.
type model []Tensor

// newModel returns tensors of several types and shapes.
func newModel(r *rand.Rand, prefix string) (m model) {
	for i, d := range []dtype.DType{dtype.BF16, dtype.F32, dtype.F16, dtype.FP8E4M3, dtype.I64, dtype.U8} {
		shape := [][]int{{8, 9}, {100}, {}, {3, 1, 70}, {0, 5}, {500}}[i]
		m = append(m, newTensor(r, prefix+string(rune('a'+i)), d, shape...))
	}
	return m
}

func newTensor(r *rand.Rand, name string, d dtype.DType, shape ...int) Tensor {
	n := 1
	for _, k := range shape {
		n *= k
	}
	return Tensor{Name: name, DType: d, Shape: shape, Memory: Host(pattern(r, n, d.Size(), false))}
}

// clone copies a model.
func (m model) clone() (copied model) {
	for _, t := range m {
		t.Memory = slices.Clone(t.Memory.(Host))
		copied = append(copied, t)
	}
	return copied
}

// train moves a share of the elements by one or some.
func (m model) train(r *rand.Rand, share float64) model {
	next := m.clone()
	for _, t := range next {
		b := t.Memory.(Host)
		for i := 0; i < len(b); i += t.DType.Size() {
			if r.Float64() < share {
				b[i] += byte(1 - 2*r.IntN(2) + r.IntN(2)*r.IntN(9))
			}
		}
	}
	return next
}

// same reports whether the tensors are those of the models, bit for bit.
func same(tensors []Tensor, models ...model) error {
	want := slices.Concat(models...)
	if len(tensors) != len(want) {
		return fmt.Errorf("%d tensors, want %d", len(tensors), len(want))
	}
	for _, w := range want {
		i := slices.IndexFunc(tensors, func(t Tensor) bool { return t.like(&w) })
		if i < 0 {
			return fmt.Errorf("no tensor %q of shape %v", w.Name, w.Shape)
		}
		got := make([]byte, len(w.Memory.(Host)))
		if _, err := tensors[i].Memory.ReadAt(got, 0); err != nil {
			return err
		}
		if !bytes.Equal(got, w.Memory.(Host)) {
			return fmt.Errorf("tensor %q differs", w.Name)
		}
	}
	return nil
}

// shows checks what a subscriber shows.
func shows(t *testing.T, s *Subscriber, version uint64, models ...model) {
	t.Helper()
	require.NoError(t, s.checkShown(version, models...))
}

// checkShown checks that a subscriber shows a version, bit for bit.
func (s *Subscriber) checkShown(version uint64, models ...model) error {
	return s.View(func(v uint64, tensors []Tensor) error {
		if v != version {
			return fmt.Errorf("version %d is shown, want %d", v, version)
		}
		return same(tensors, models...)
	})
}

// elsewhere is memory that is read and written, not changed in place.
type elsewhere struct{ b Host }

func (e elsewhere) ReadAt(p []byte, at int64) (int, error)  { return e.b.ReadAt(p, at) }
func (e elsewhere) WriteAt(p []byte, at int64) (int, error) { return e.b.WriteAt(p, at) }

// TestFiles publishes to readers: in order, behind by some versions, of a version that nobody knows, and of other
// tensors.
func TestFiles(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	ctx := t.Context()
	versions := []model{nil, newModel(r, "")}
	p := NewPublisher(nil, nil)
	require.ErrorContains(t, p.WriteSince(ctx, io.Discard, 0), "nothing is published")
	var steps []*Delta
	for v := 1; v < 8; v++ {
		if v > 1 {
			versions = append(versions, versions[v-1].train(r, 0.05))
		}
		require.NoError(t, p.Commit(ctx, uint64(v), versions[v]))
		steps = append(steps, p.log[len(p.log)-1])
	}
	require.ErrorIs(t, p.Commit(ctx, 7, versions[7]), comm.ErrArgument)
	for from := range 8 {
		s, err := NewSubscriber(ctx, nil, nil, Config{Tensors: versions[from].clone(), Version: uint64(from)})
		require.NoError(t, err)
		if from == 0 {
			require.ErrorIs(t, s.View(nil), ErrNoVersion)
		}
		var b bytes.Buffer
		require.NoError(t, p.WriteSince(ctx, &b, uint64(from)))
		length := b.Len()
		b.WriteString("next")
		v, err := s.Read(ctx, &b)
		require.NoError(t, err)
		require.Equal(t, uint64(7), v)
		require.Equal(t, "next", b.String())
		shows(t, s, 7, versions[7])
		if from == 7 { // nothing is new
			require.Less(t, length, 40)
		}
		if from > 1 && from < 7 { // those between, folded
			sum := 0
			for _, d := range steps[from:] {
				sum += int(d.Stat().Bytes)
			}
			assert.LessOrEqual(t, length, sum)
		}
	}

	// Of another version, and of other tensors.
	s, err := NewSubscriber(ctx, nil, nil, Config{Tensors: versions[3].clone(), Version: 4})
	require.NoError(t, err)
	var b bytes.Buffer
	require.NoError(t, p.WriteSince(ctx, &b, 5))
	var version *VersionError
	message := slices.Clone(b.Bytes())
	_, err = s.Read(ctx, &b)
	require.ErrorAs(t, err, &version)
	require.Equal(t, VersionError{Have: 4, Need: 5}, *version)
	require.NoError(t, p.WriteSince(ctx, &b, 4))
	_, err = s.Read(ctx, &b)
	require.ErrorAs(t, err, &version)
	require.True(t, version.Differ, err)
	shows(t, s, 4, versions[3])
	require.NoError(t, p.WriteSince(ctx, &b, 0))
	_, err = s.Read(ctx, &b)
	require.NoError(t, err)
	shows(t, s, 7, versions[7])

	// Damaged anywhere, and cut short.
	for i := range message {
		damaged := slices.Clone(message)
		damaged[i] ^= 1 << (i % 8)
		_, err := Read(bytes.NewReader(damaged))
		require.Error(t, err, i)
		_, err = Read(bytes.NewReader(message[:i]))
		require.ErrorIs(t, err, map[bool]error{true: io.EOF, false: io.ErrUnexpectedEOF}[i == 0], i)
	}
}

// TestSmaller: who has missed versions gets the shorter one of what has changed and of a full copy, whatever share
// was set to zero in between.
func TestSmaller(t *testing.T) {
	const seed, n = 13, 200_000
	r, ctx := rand.New(rand.NewPCG(seed, 0)), t.Context()
	sent := map[uint64]int{}
	for _, share := range []float64{0, 0.02, 0.3, 0.9, 1} {
		versions := []model{{newTensor(r, "w", dtype.I8, n)}}
		clear(versions[0][0].Memory.(Host)[:n*7/10])
		p := NewPublisher(nil, nil)
		require.NoError(t, p.Commit(ctx, 1, versions[0]))
		for v := uint64(2); v < 4; v++ {
			next := versions[v-2].train(r, 0.0001)
			clear(next[0].Memory.(Host)[n-int(share*n*0.3):])
			versions = append(versions, next)
			require.NoError(t, p.Commit(ctx, v, next))
		}
		var got, full bytes.Buffer
		require.NoError(t, p.WriteSince(ctx, &got, 1))
		require.NoError(t, p.WriteSince(ctx, &full, 0))
		changes, err := Diff(ctx, versions[0], versions[2], nil)
		require.NoError(t, err)
		assert.LessOrEqual(t, got.Len(), min(full.Len(), int(changes.Stat().Bytes)), "share %v, seed %d", share, seed)
		assert.True(t, share < 1 || full.Len() < n/500, "%d bytes of zeros", full.Len())
		d, err := Read(&got)
		require.NoError(t, err)
		sent[d.Base]++
	}
	assert.Len(t, sent, 2, "deltas and full copies")
}

// TestLayouts: tensors come, go, change their shapes and types, in memory of a runtime and of others.
func TestLayouts(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	ctx := t.Context()
	rt := cpu.New()
	s, err := NewSubscriber(ctx, rt, nil, Config{})
	require.NoError(t, err)
	p := NewPublisher(nil, nil)
	m := newModel(r, "")
	var before [2]model
	for v := uint64(1); v < 12; v++ {
		switch v {
		case 3:
			m = m.train(r, 0.1)[1:]
		case 5:
			m = append(m.clone(), newTensor(r, "new", dtype.F32, 7, 7))
		case 6:
			m = m.clone()
			m[0] = newTensor(r, m[0].Name, m[0].DType, 3, 5)
		case 7:
			m = m.clone()
			m[1].DType = dtype.I16
		case 8:
			big := newTensor(r, "big", dtype.BF16, blockLen+5) // two blocks
			clear(big.Memory.(Host)[:2*blockLen])              // zeros, which a code of a few bytes would hold
			m = append(m.clone(), big)
		case 9:
			m = m.clone()[:3]
		case 10: // and not contiguous in the memory of a runtime
			x, err := runtime.New(rt, dtype.F32, 4, 6)
			require.NoError(t, err)
			view, err := x.Transpose(0, 1)
			require.NoError(t, err)
			_, err = Of("view", view)
			require.ErrorIs(t, err, runtime.ErrShape)
			require.ErrorContains(t, err, "contiguous")
			require.NoError(t, x.Free())
		default:
			m = m.train(r, 0.1)
		}
		require.NoError(t, p.Commit(ctx, v, m))
		var b bytes.Buffer
		require.NoError(t, p.WriteSince(ctx, &b, v-1))
		_, err := s.Read(ctx, &b)
		require.NoError(t, err, v)
		shows(t, s, v, m)
		if v > 2 { // and from the version before that
			b.Reset()
			require.NoError(t, p.WriteSince(ctx, &b, v-2))
			far, err := NewSubscriber(ctx, nil, nil, Config{Tensors: before[0], Version: v - 2})
			require.NoError(t, err)
			_, err = far.Read(ctx, &b)
			require.NoError(t, err, v)
			shows(t, far, v, m)
		}
		before = [2]model{before[1], m.clone()}
	}
	require.NoError(t, s.View(func(_ uint64, tensors []Tensor) error {
		require.NotNil(t, tensors[0].Runtime())
		return nil
	}))
	s.Close()
	require.Zero(t, rt.Stats().LiveBlocks)
	require.NoError(t, rt.Close())
}

// world runs a function for each rank; one that fails takes the communicator down, as a process that dies.
func world(t *testing.T, ranks int, f func(ctx context.Context, c comm.Communicator) error) []error {
	comms, err := local.New(ranks)
	require.NoError(t, err)
	errs := make([]error, ranks)
	var wg sync.WaitGroup
	for rank, c := range comms {
		wg.Go(func() {
			if errs[rank] = f(t.Context(), c); errs[rank] != nil {
				c.Abort(errs[rank])
			}
		})
	}
	wg.Wait()
	for _, c := range comms {
		_ = c.Close()
	}
	return errs
}

// TestShards: two trainers publish each their own tensors, to subscribers that follow, that miss versions, that know
// another one, and that come later.
func TestShards(t *testing.T) {
	rt := cpu.New()
	defer rt.Close()
	r := rand.New(rand.NewPCG(3, 3))
	left, right := []model{newModel(r, "left ")}, []model{newModel(r, "right ")}
	for v := range 9 {
		left, right = append(left, left[v].train(r, 0.1)), append(right, right[v].train(r, 0.1))
	}
	publishers := []*Publisher{NewPublisher(rt, nil), NewPublisher(rt, nil)}
	subscribers := make([]*Subscriber, 3)
	for i := range subscribers {
		var err error
		subscribers[i], err = NewSubscriber(t.Context(), rt, nil, Config{})
		require.NoError(t, err)
	}
	for v := 1; v < 10; v++ {
		present := []int{0, 1, 2}
		if v == 3 || v == 4 || v == 7 {
			present = []int{0, 2} // and 1 misses versions
		}
		if v == 6 { // one is lost, and one begins anew with the tensors of some version
			publishers[1] = NewPublisher(rt, nil)
			subscribers[2].Close()
			var err error
			subscribers[2], err = NewSubscriber(t.Context(), rt, nil, Config{Version: 4, Tensors: left[4].clone()})
			require.NoError(t, err)
		}
		errs := world(t, 2+len(present), func(ctx context.Context, c comm.Communicator) error {
			if rank := c.Rank(); rank < 2 {
				publishers[rank].Rebind(c)
				return publishers[rank].Publish(ctx, uint64(v), [][]model{left, right}[rank][v])
			}
			s := subscribers[present[c.Rank()-2]]
			s.Rebind(c)
			got, err := s.Update(ctx)
			assert.Equal(t, uint64(v), got)
			return err
		})
		require.NoError(t, errors.Join(errs...), "version %d", v)
		for _, i := range present {
			shows(t, subscribers[i], uint64(v), left[v], right[v])
		}
	}
	// A file has the tensors of one publisher.
	var b bytes.Buffer
	require.NoError(t, publishers[0].WriteSince(t.Context(), &b, 0))
	_, err := subscribers[0].Read(t.Context(), &b)
	require.ErrorIs(t, err, comm.ErrArgument)
	shows(t, subscribers[0], 9, left[9], right[9])
	for _, s := range subscribers {
		s.Close()
	}
	require.Zero(t, rt.Stats().LiveBlocks)
}

var errKilled = errors.New("killed")

// kill counts steps, and fails at one: then only, or from then on.
type kill struct {
	at, steps atomic.Int64
	forever   bool
}

func (k *kill) step() error {
	if n, at := k.steps.Add(1), k.at.Load(); n == at || k.forever && n > at {
		return errKilled
	}
	return nil
}

// TestKills fails at every step of every rank that publishes, transfers or applies a version, once or forever (as a
// rank that dies), and looks that each subscriber shows the version before or the new one, bit for bit, and those of a
// set the same one, but for one that fails while it applies what all have voted for; and that all have the new one
// after another attempt.
func TestKills(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	old := append(newModel(r, "1 "), newModel(r, "2 ")...)
	new := old.train(r, 0.1)
	other := append(old.train(r, 1)[1:], newTensor(r, "new", dtype.F32, 40))
	points, outcomes := 0, map[string]int{}
	for _, c := range []struct {
		name     string
		next     model
		together bool
		known    uint64 // the version of the last subscriber
		device   bool   // memory that is read and written
	}{
		{"together", new, true, 1, false},
		{"each", new, false, 1, false},
		{"layout", other, true, 1, false},
		{"device", new, true, 1, true},
		{"full copy", new, true, 0, false},
	} {
		if testing.Short() && c.name != "together" {
			continue
		}
		for victim := range 4 {
			for _, forever := range []bool{false, true} {
				for at := int64(1); ; at++ {
					k := killing{t: t, old: old, next: c.next, together: c.together, known: c.known, device: c.device}
					if !k.run(victim, at, forever, outcomes) {
						break
					}
					points++
				}
			}
		}
	}
	t.Logf("%d points: %v", points, outcomes)
	assert.True(t, points >= 1000 || testing.Short())
	for _, kind := range []string{"old", "new", "in doubt", "left"} {
		assert.NotZero(t, outcomes[kind], kind)
	}
}

type killing struct {
	t                *testing.T
	old, next        model
	together, device bool
	known            uint64
}

// subscriber has the old version, or none.
func (k *killing) subscriber(version uint64) *Subscriber {
	cfg := Config{Together: k.together}
	if version != 0 {
		cfg.Version, cfg.Tensors = 1, k.old.clone()
		for i := range cfg.Tensors {
			if k.device {
				cfg.Tensors[i].Memory = elsewhere{cfg.Tensors[i].Memory.(Host)}
			}
		}
	}
	s, err := NewSubscriber(k.t.Context(), nil, nil, cfg)
	require.NoError(k.t, err)
	return s
}

// run returns false if the victim makes fewer steps.
func (k *killing) run(victim int, at int64, forever bool, outcomes map[string]int) bool {
	rt := cpu.New()
	defer rt.Close()
	t := k.t
	p := NewPublisher(rt, nil)
	require.NoError(t, p.Commit(t.Context(), 1, k.old))
	subs := []*Subscriber{nil, k.subscriber(1), k.subscriber(1), k.subscriber(k.known)}
	for _, s := range subs[1:] {
		s.rt = rt
	}
	hook := &kill{forever: forever}
	hook.at.Store(at)
	if victim == 0 {
		p.replica.hook = hook.step
	} else {
		subs[victim].hook = hook.step
		for _, r := range subs[victim].parts {
			r.hook = hook.step
		}
	}
	errs := world(t, 4, func(ctx context.Context, c comm.Communicator) error {
		if c.Rank() == 0 {
			p.Rebind(c)
			return p.Publish(ctx, 2, k.next)
		}
		subs[c.Rank()].Rebind(c)
		_, err := subs[c.Rank()].Update(ctx)
		return err
	})
	where := fmt.Sprintf("victim %d, step %d, forever %v: %v", victim, at, forever, errs)
	if hook.steps.Load() < at {
		require.NoError(t, errors.Join(errs...), where)
		return false
	}
	require.ErrorIs(t, errs[victim], errKilled, where)

	seen := map[uint64]bool{} // by those that have not failed
	shown := uint64(0)        // by the victim
	for rank, s := range subs[1:] {
		if rank+1 == victim && forever {
			continue // it is dead
		}
		err := s.View(func(version uint64, tensors []Tensor) error {
			if rank+1 == victim {
				shown = version
			} else {
				seen[version] = true
			}
			outcomes[[]string{"", "old", "new"}[version]]++
			return same(tensors, []model{nil, k.old, k.next}[version])
		})
		switch {
		case errors.Is(err, ErrInDoubt) && k.together:
			outcomes["in doubt"]++
		case errors.Is(err, ErrNoVersion) && rank == 2 && k.known == 0:
			outcomes["none"]++
		default:
			require.NoError(t, err, where)
		}
	}
	if k.together && k.known == 1 {
		require.LessOrEqual(t, len(seen), 1, where)
		if shown == 1 && seen[2] { // it has failed when the others had its vote
			outcomes["left"]++
			for rank, err := range errs {
				if rank == victim || err == nil {
					continue
				}
				// The victim aborted before this one had all votes. A publisher has the version in any case.
				want := ErrInDoubt
				if rank == 0 {
					want = comm.ErrPeerFailed
				}
				require.ErrorIs(t, err, want, where)
			}
		}
		require.False(t, shown == 2 && seen[1], where)
	}

	// Another attempt, with those that are left and others instead of dead ones.
	hook.at.Store(math.MaxInt64)
	if forever && victim == 0 {
		p = NewPublisher(rt, nil)
	} else if forever {
		subs[victim] = k.subscriber(0)
		subs[victim].rt = rt
	}
	errs = world(t, 4, func(ctx context.Context, c comm.Communicator) error {
		if c.Rank() == 0 {
			p.Rebind(c)
			if p.Version() < 2 {
				return p.Publish(ctx, 2, k.next)
			}
			return p.Send(ctx)
		}
		subs[c.Rank()].Rebind(c)
		_, err := subs[c.Rank()].Update(ctx)
		return err
	})
	require.NoError(t, errors.Join(errs...), where)
	for _, s := range subs[1:] {
		shows(t, s, 2, k.next)
		s.Close()
	}
	return true
}

// TestMisuse: what a program gets wrong is an error that says so, on every rank.
func TestMisuse(t *testing.T) {
	ctx := t.Context()
	one := Tensor{Name: "w", DType: dtype.I8, Shape: []int{3}, Memory: make(Host, 3)}
	with := func(change func(x *Tensor)) []Tensor {
		x := one
		change(&x)
		return []Tensor{x}
	}
	for text, tensors := range map[string][]Tensor{
		`two tensors have the name "w"`: {one, one},
		"has no element type":           with(func(x *Tensor) { x.DType = dtype.Invalid }),
		"is larger than memory":         with(func(x *Tensor) { x.Shape = []int{1 << 40, 1 << 40} }),
		"memory of another length":      with(func(x *Tensor) { x.Memory = make(Host, 2) }),
	} {
		require.ErrorContains(t, NewPublisher(nil, nil).Publish(ctx, 1, tensors), text)
		_, err := NewSubscriber(ctx, nil, nil, Config{Version: 1, Tensors: tensors})
		require.ErrorContains(t, err, text)
		_, err = Diff(ctx, nil, tensors, nil)
		require.ErrorContains(t, err, text)
	}
	_, err := NewSubscriber(ctx, nil, nil, Config{Version: 1})
	require.ErrorIs(t, err, comm.ErrArgument)
	p := NewPublisher(nil, nil)
	require.Zero(t, p.Stat())
	require.ErrorIs(t, p.Publish(ctx, 1, []Tensor{one}), comm.ErrArgument) // without a communicator
	s, err := NewSubscriber(ctx, nil, nil, Config{})
	require.NoError(t, err)
	_, err = s.Update(ctx)
	require.ErrorIs(t, err, comm.ErrArgument)
	d, err := Diff(ctx, nil, []Tensor{one}, nil)
	require.NoError(t, err)
	require.ErrorIs(t, d.Apply(ctx, nil, func(Tensor) (Memory, error) { return nil, io.ErrShortWrite }, nil), io.ErrShortWrite)

	rt := cpu.New()
	defer rt.Close()
	for publishers, text := range []string{"no rank publishes", "", "rank 0 publishes version 1, rank 1 2"} {
		errs := world(t, 3, func(ctx context.Context, c comm.Communicator) error {
			if c.Rank() < publishers {
				return NewPublisher(rt, c).Publish(ctx, uint64(c.Rank()+1), []Tensor{one})
			}
			s, err := NewSubscriber(ctx, rt, c, Config{})
			if err == nil {
				defer s.Close()
				_, err = s.Update(ctx)
			}
			return err
		})
		for _, err := range errs {
			if text == "" {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, comm.ErrMismatch)
				require.ErrorContains(t, err, text)
			}
		}
	}
}

// sealed appends the checksum.
func sealed(body []byte) []byte {
	return binary.LittleEndian.AppendUint32(slices.Clone(body), crc32.Checksum(body, castagnoli))
}

// FuzzRead: any bytes as a message are an error, or a delta that is written as it was and applied or refused.
func FuzzRead(f *testing.F) {
	r := rand.New(rand.NewPCG(5, 5))
	p := NewPublisher(nil, nil)
	old := newModel(r, "")
	require.NoError(f, p.Commit(f.Context(), 1, old))
	next := append(old.train(r, 0.2)[1:], newTensor(r, "new", dtype.BF16, 30))
	require.NoError(f, p.Commit(f.Context(), 2, next))
	for v := range uint64(2) {
		var b bytes.Buffer
		require.NoError(f, p.WriteSince(f.Context(), &b, v))
		f.Add(b.Bytes()[6 : b.Len()-4])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		d, err := parse(sealed(body))
		if err != nil {
			return
		}
		var b bytes.Buffer
		_, err = d.WriteTo(&b)
		require.NoError(t, err)
		again, err := Read(&b)
		require.NoError(t, err)
		require.Equal(t, d.Stat(), again.Stat())
		s, err := NewSubscriber(t.Context(), nil, nil, Config{Version: 1, Tensors: old.clone()})
		require.NoError(t, err)
		u, err := s.parts[0].prepare(d, nil, s.alloc)
		if err == nil {
			err = u.apply(t.Context(), nil)
		}
		if err != nil {
			require.NoError(t, same(s.parts[0].tensors, old))
		}
	})
}

// TestSharedMemory: tensors that would be changed twice are refused, those that are only read are not.
func TestSharedMemory(t *testing.T) {
	ctx := t.Context()
	memory := make(Host, 80)
	tensor := func(name string, from, to int) Tensor {
		return Tensor{Name: name, DType: dtype.F32, Shape: []int{(to - from) / 4}, Memory: memory[from:to]}
	}
	for _, from := range []int{0, 20, 36} {
		tensors := []Tensor{tensor("a", 0, 40), tensor("b", from, from+40)}
		_, err := NewSubscriber(ctx, nil, nil, Config{Tensors: tensors, Version: 1})
		require.ErrorIs(t, err, comm.ErrArgument)
		require.ErrorContains(t, err, `"a" and "b"`)
		d, err := Diff(ctx, tensors, tensors, nil)
		require.NoError(t, err)
		apply := func(memory Host) error { // the targets lie as the base does
			return d.Apply(ctx, tensors, func(x Tensor) (Memory, error) {
				at := 0
				if x.Name == "b" {
					at = from
				}
				return memory[at:][:40], nil
			}, nil)
		}
		require.ErrorIs(t, apply(make(Host, 80)), comm.ErrArgument)
		require.ErrorIs(t, apply(memory), comm.ErrArgument)
		require.NoError(t, d.Apply(ctx, tensors, func(x Tensor) (Memory, error) { return make(Host, 40), nil }, nil))
	}
	tensors := []Tensor{tensor("a", 0, 40), tensor("b", 40, 80)}
	_, err := NewSubscriber(ctx, nil, nil, Config{Tensors: tensors, Version: 1})
	require.NoError(t, err)
	d, err := Diff(ctx, tensors, tensors, nil)
	require.NoError(t, err)
	require.ErrorIs(t, d.Apply(ctx, tensors, func(Tensor) (Memory, error) { return memory[20:60], nil }, nil), comm.ErrArgument)
}
