package distributedtest

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// RunSelector runs what holds with a [sparse.Selector] before each exchange as subtests of t, for each world
// size of b: the same bits on all ranks, and nothing lost, with families of gradients, of all types, with
// schedules, clipping, results as entries and with a gradient that is not finite; and oktopk's bound.
func RunSelector(t *testing.T, b commtest.Backend, selector sparse.Selector, opts ...Option) {
	t.Helper()
	cases := slices.DeleteFunc(patternCases(), func(c testCase) bool {
		// Without a residual, equal gradients need not have equal results, as Step differs.
		return strings.HasPrefix(c.name, sparsity.Dense) || c.name == sparsity.Auto ||
			strings.HasSuffix(c.name, "/NoFeedback")
	})
	runCases(t, b, cases, append(opts, func(s *suite) { s.selector = selector }))
}

// patternCases are the cases of every pattern.
func patternCases() []testCase {
	bodies := []struct {
		name   string
		body   func(r *rank, pattern string)
		sparse bool // also for the dense pattern
	}{
		{name: "Conservation", body: testConservation},
		{name: "Large", body: testLarge},
		{name: "NoFeedback", body: func(r *rank, p string) { r.noFeedback(config(p, 0.1)) }},
		{name: "FullDensity", body: testFullDensity},
		{name: "HalfTypes", body: testHalfTypes},
		{name: "Special", body: func(r *rank, p string) { special(r, dtype.F32, config(p, 0.1)) }},
		{name: "Schedule", body: func(r *rank, p string) { r.schedule(config(p, 0.01)) }},
		{name: "Clipping", body: testClipping, sparse: true},
		{name: "Entries", body: testEntries},
		{name: "Values", body: testValues, sparse: true},
	}
	var cases []testCase
	for _, pattern := range sparsity.Patterns() {
		for _, b := range bodies {
			cases = append(cases, testCase{name: pattern + "/" + b.name, sparse: b.sparse || pattern != sparsity.Dense,
				body: func(r *rank) { b.body(r, pattern) }})
		}
	}
	return append(cases, testCase{
		name:   "oktopk/Volume",
		sparse: true,
		body:   testVolume,
	},
		testCase{name: "auto", sparse: true, body: testAuto})
}

// run is a Sparse under test, with what the checks need to know about it.
type run struct {
	*rank
	cfg     engine.Config
	codec   kernel.Codec // of cfg
	reducer *engine.Reducer
	meter   *metered.Communicator
	t       *runtime.Tensor
	result  []float32
	stats   engine.Stats // of the last step
	sums    []float64    // scratch

	velocity []float32 // with momentum, this rank's

	notFinite bool // there was a NaN or an infinity, sums are not conserved
}

// reduces makes a Sparse for n elements of type dt, for a part of a case.
func (r *rank) reduces(label string, n int, dt dtype.DType, cfg engine.Config, body func(u *run)) {
	r.part(fmt.Sprintf("%s, %v, n=%d, density %v, values %q", label, dt, n, cfg.Density, cfg.Values), func() {
		cfg.Selector = r.selector
		u := &run{
			rank:  r,
			cfg:   cfg,
			codec: codecs[cfg.Values],
			meter: metered.New(r.c),
			t:     r.tensor(dt, make([]float32, n)),
		}
		s := got(engine.New(r.rt, u.meter, n, cfg))
		r.after(s.Close)
		u.reducer = s
		body(u)
	})
}

// codecs are what values travel as.
var codecs = map[string]kernel.Codec{
	sparsity.Lossless: kernel.CodecF32,
	sparsity.BF16:     kernel.CodecBF16,
	sparsity.F16:      kernel.CodecF16,
	sparsity.FP8:      kernel.CodecFP8,
	sparsity.I8:       kernel.CodecI8,
	sparsity.I4:       kernel.CodecI4,
	sparsity.I2:       kernel.CodecI2,
	sparsity.Bit:      kernel.CodecSign,
}

// reduce runs one step on a gradient and reads the result.
func (u *run) reduce(gradient []float32) {
	u.write(u.t, gradient)
	must(u.reducer.AllReduce(u.ctx, u.t))
	u.result = u.read(u.t)
}

// residual returns what this rank's residual holds of each element, zeros if the
// pattern has none.
func (u *run) residual() []float32 {
	all := make([]float32, u.t.Len())
	t, err := u.reducer.Residual()
	if u.mayBeDense() && errors.Is(err, comm.ErrUnsupported) {
		return all
	}
	must(err)
	copy(all, u.read(t))
	return all
}

// mayBeDense reports whether the backend may add up, without a residual.
func (u *run) mayBeDense() bool {
	exact := u.cfg.Values == "" || u.cfg.Values == sparsity.F32
	return u.cfg.Pattern == sparsity.Dense && exact || u.cfg.Pattern == sparsity.Auto
}

// step runs one step and checks everything that holds for finite gradients:
// same bits everywhere, conservation (with error feedback) and statistics.
func (u *run) step(gradient []float32) {
	before := u.residual()
	sent := u.meter.Totals()
	if u.t.DType() != dtype.F32 { // what counts is the gradient as its type holds it
		u.write(u.t, gradient)
		gradient = u.read(u.t)
	}
	u.reduce(gradient)
	total := u.meter.Totals()
	u.sameBits()
	stats := got(u.reducer.Stats(u.ctx))
	chose := u.stats.Chosen == "" && stats.Chosen != "" // what that sent does not count
	if got, want := stats.SentElements, total.SentElements-sent.SentElements; got != want && !chose {
		fail("stats say %d elements were sent, a meter counted %d", got, want)
	}
	if got, want := stats.SentBytes, total.SentBytes-sent.SentBytes; got != want && !chose {
		fail("stats say %d bytes were sent, a meter counted %d", got, want)
	}
	u.stats = stats
	u.inBudget()
	if u.cfg.Momentum > 0 {
		gradient = u.advance(gradient)
	}
	if !u.cfg.NoErrorFeedback && !u.notFinite {
		u.conserved(before, gradient)
	}
	if u.cfg.Momentum > 0 && !stats.Dense && got(u.reducer.SelectedEntries()).Idx != 0 {
		idx, _, err := u.reducer.Read(u.ctx, got(u.reducer.SelectedEntries()))
		must(err)
		for _, i := range idx { // what was selected starts anew
			u.velocity[i] = 0
		}
	}
}

// advance returns the velocity, which a step reduces instead of the gradient.
func (u *run) advance(gradient []float32) []float32 {
	if u.velocity == nil {
		u.velocity = make([]float32, len(gradient))
	}
	for i, g := range gradient {
		u.velocity[i] = float32(u.cfg.Momentum*float64(u.velocity[i])) + g
	}
	return u.velocity
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sameBits checks that all ranks have the same result.
func (u *run) sameBits() {
	sums := make([]float64, u.size)
	sums[u.rank.rank] = float64(crc32.Checksum(u.bytes(u.t), castagnoli))
	u.sum(sums)
	for peer, sum := range sums {
		if sum != sums[0] {
			fail("results of ranks %d and 0 differ", peer)
		}
	}
}

// conserved checks for every index that what the ranks put in (gradient and
// old residual) is what came out (P times the result, and the new residuals).
func (u *run) conserved(before, gradient []float32) {
	after := u.residual()
	n := len(gradient)
	// One exchange for both: the difference, and the magnitude that rounding
	// errors are measured against.
	if len(u.sums) != 2*n {
		u.sums = make([]float64, 2*n)
	}
	sums := u.sums
	for i, g := range gradient {
		in := float64(g) + float64(before[i])
		sums[i] = in - float64(u.result[i]) - float64(after[i])
		sums[n+i] = math.Abs(float64(g)) + math.Abs(float64(before[i]))
	}
	u.sum(sums)
	// Float32 sums of 2P numbers, divided and multiplied by P; then rounded to
	// the type of the tensor. Subnormal numbers have an absolute error instead,
	// and where each of P shares is divided before they are added up, each has
	// the error of a division, multiplied by P.
	relative := float64(2*u.size+4) * 0x1p-24
	smallest := float64((u.size+2)*(u.size+2)) * 0x1p-149
	rounded := 1.0
	if u.mayBeDense() {
		rounded = halfRoundings(u.size) // the backend adds up
	}
	switch u.t.DType() {
	case dtype.BF16:
		relative += rounded * 0x1p-8
	case dtype.F16:
		relative += rounded * 0x1p-11
		smallest += float64(u.size) * 0x1p-24
	}
	switch u.cfg.Values {
	case sparsity.I2, sparsity.Bit: // what an element loses is as large as the mean of others may be
		smallest += relative * slices.Max(append(sums[n:], 0))
	case "", sparsity.F32:
	default: // a code may be twice the number
		relative *= 2
	}
	for i, diff := range sums[:n] {
		if tolerance := sums[n+i]*relative + smallest; !(math.Abs(diff) <= tolerance) {
			fail("step %d: %v got lost at index %d of %d, tolerance %v (result %v)",
				u.stats.Step, diff, i, n, tolerance, u.result[i])
		}
	}
}

// halfRoundings is how often a backend may round in a sum of two-byte numbers
// over size ranks: each input, and each sum on its way.
func halfRoundings(size int) float64 { return float64(size + 1) }

// tuned has thresholds and partitions computed anew, and reused, within a few steps,
// and only short messages travel in one part.
var tuned = tuning.Tuning{
	ThresholdInterval: 3,
	RebalanceInterval: 4,
	TrimFrom:          150,
}

// config has a pattern select a share of the entries.
func config(pattern string, density float64) engine.Config {
	return engine.Config{Pattern: pattern, Density: density}
}

// sequence runs steps of a family of gradients.
func (r *rank) sequence(k family, n, steps int, dt dtype.DType, cfg engine.Config) {
	r.reduces(k.name, n, dt, cfg, func(u *run) {
		for step := range steps {
			u.step(r.gradient(k, n, r.rank, r.size, step))
		}
	})
}

// testConservation runs all families of gradients through a small tensor with enough
// elements for every part of a pattern, and the first through tensors of all lengths.
func testConservation(r *rank, pattern string) {
	shapes := []struct {
		n       int
		density float64
	}{{0, 0.5}, {1, 1}, {3, 0.4}, {64, 0.05}, {1000, 0.01}, {1000, 0.25}}
	steps := 6
	if r.extended {
		steps = 20
	}
	turn := slices.Index(sparsity.Patterns(), pattern)
	for i, k := range families {
		for j, s := range shapes {
			first := i == 0
			if !first && (s.n < 64 || !r.sampled(3, turn+i+j)) && !r.extended {
				continue
			}
			r.sequence(k, s.n, steps, dtype.F32, config(pattern, s.density))
		}
	}
}

// sampled reports whether the world's turn is case i of a sweep of which each world has one part: worlds of 1, 3
// and 5 ranks have different ones. An extended suite has all.
func (r *rank) sampled(parts, i int) bool {
	return r.extended || (i+r.size/2)%parts == 0
}

// testAuto runs some families through what was chosen, which may be any pattern.
func testAuto(r *rank) {
	for i, k := range families[:3] {
		for _, n := range [][]int{{0, 3, 1000, r.large()}, {1000}}[min(i, 1)] {
			r.sequence(k, n, 4, dtype.F32, config(sparsity.Auto, 0.02))
		}
	}
	r.sequence(families[0], 1000, 4, dtype.F16, config(sparsity.Auto, 0.1))
}

// large is the length of tensors that every part of a pattern has work with where 1000 entries are selected.
func (s *suite) large() int {
	if s.extended {
		return 100_000
	}
	return 20_000
}

// testLarge runs some families through large tensors.
func testLarge(r *rank, pattern string) {
	steps := 3
	if r.extended {
		steps = 6
	}
	for _, k := range families {
		if r.extended || slices.Contains([]string{"normal", "own cluster"}, k.name) {
			r.sequence(k, r.large(), steps, dtype.F32, config(pattern, 1000/float64(r.large())))
		}
	}
}

// noFeedback checks that without error feedback nothing is carried over:
// two steps that select exactly from the same gradient have the same result, which holds only
// averages of entries of that gradient.
func (r *rank) noFeedback(cfg engine.Config) {
	cfg.NoErrorFeedback = true
	r.reduces("no feedback", 2000, dtype.F32, cfg, func(u *run) {
		g := r.gradient(families[0], 2000, r.rank, r.size, 0)
		u.step(g)
		first := slices.Clone(u.result)
		for range tuned.ThresholdInterval { // a corrected threshold would be state
			u.step(g)
		}
		// Partitions are balanced in the first step only, and which entries are cut
		// depends on partitions: compare without cuts.
		if cfg.Pattern != sparsity.Oktopk && !slices.Equal(first, u.result) {
			fail("a later step with the same gradient has another result")
		}
	})
}

// testFullDensity compares every pattern at density 1 with a dense average in
// float64.
func testFullDensity(r *rank, pattern string) {
	for _, n := range []int{1, 5, 1000} {
		r.reduces("full", n, dtype.F32, config(pattern, 1), func(u *run) {
			for step := range 3 {
				u.step(r.gradient(families[0], n, r.rank, r.size, step))
				want, scale := r.average(families[0], n, step)
				for i, got := range u.result {
					if diff := math.Abs(float64(got) - want[i]); diff > scale[i]*1e-6 {
						fail("step %d: result %v at index %d, want %v", step, got, i, want[i])
					}
				}
			}
		})
	}
}

// average returns the dense average of all ranks' gradients in float64, and
// the mean of their magnitudes.
func (r *rank) average(k family, n, step int) (mean, magnitude []float64) {
	mean = make([]float64, n)
	magnitude = make([]float64, n)
	for peer := range r.size {
		for i, g := range r.gradient(k, n, peer, r.size, step) {
			mean[i] += float64(g) / float64(r.size)
			magnitude[i] += math.Abs(float64(g)) / float64(r.size)
		}
	}
	return mean, magnitude
}

// testHalfTypes runs gradients of 16 bits.
func testHalfTypes(r *rank, pattern string) {
	for _, dt := range []dtype.DType{dtype.F16, dtype.BF16} {
		r.sequence(families[0], 3000, 4, dt, config(pattern, 0.1))
	}
}

// special puts a NaN on one rank and an infinity on another: every rank
// sees them in the same step, at their place and nowhere else, and later steps
// are clean again.
func special(r *rank, dt dtype.DType, cfg engine.Config) {
	for _, cfg.NonFinite = range []engine.NonFinitePolicy{engine.PassNonFinite, engine.SkipNonFinite} {
		if r.selector != nil && cfg.NonFinite == engine.PassNonFinite {
			continue // entries wait until they are selected
		}
		r.reduces("special", specialLen, dt, cfg, (*run).special)
	}
}

const specialLen = 3000

func (u *run) special() {
	const nan, inf = 17, 2900
	// Scaled codes have a NaN for all that is not finite, and bins have no code for it: all that share a table or a
	// magnitude are NaN, and so are, in later steps, the entries left in the residual.
	scaled := slices.Contains([]string{sparsity.FP8, sparsity.I8, sparsity.I4}, u.cfg.Values)
	means := slices.Contains([]string{sparsity.I2, sparsity.Bit}, u.cfg.Values)
	spreads := means && u.cfg.NonFinite == engine.PassNonFinite
	for step := range 6 {
		g := u.gradient(families[0], specialLen, u.rank.rank, u.size, step)
		special := step%3 == 1
		if special && u.rank.rank == 0 {
			g[nan] = float32(math.NaN())
		}
		if special && u.rank.rank == u.size-1 {
			g[inf] = float32(math.Inf(-1))
		}
		before := u.residual()
		u.reduce(g)
		u.sameBits()
		drops := special && u.cfg.NonFinite == engine.SkipNonFinite
		if stats := got(u.reducer.Stats(u.ctx)); stats.Skipped != drops {
			fail("step %d: Skipped is %v, want %v", step, stats.Skipped, drops)
		}
		if spreads && special {
			if !slices.ContainsFunc(u.result, func(v float32) bool { return v != v }) {
				fail("step %d has no NaN", step)
			}
			return
		}
		for i, v := range u.result {
			x := float64(v)
			ok := !math.IsNaN(x) && !math.IsInf(x, 0)
			switch {
			case drops:
				ok = v == 0
			case special && i == nan:
				ok = math.IsNaN(x)
			case special && i == inf:
				ok = math.IsInf(x, -1) || scaled && math.IsNaN(x)
			}
			if !ok {
				fail("step %d: result %v at index %d", step, v, i)
			}
		}
		for i, v := range u.residual() {
			if drops && math.Float32bits(v) != math.Float32bits(before[i]) {
				fail("step %d was skipped, but the residual at %d is %v, and was %v", step, i, v, before[i])
			}
		}
	}
}

// fails checks [engine.FailNonFinite]: every rank has the error, gradient and residual are as before, and the next step
// loses nothing.
func (u *run) fails() {
	n := u.t.Len()
	for step := range 4 {
		g := u.gradient(families[0], n, u.rank.rank, u.size, step)
		if step%2 == 0 {
			u.step(g)
			continue
		}
		if u.rank.rank == u.size-1 {
			g[step*n/5] = float32([]float64{math.NaN(), math.Inf(1)}[step/2])
		}
		before := u.residual()
		u.write(u.t, g)
		held := u.bytes(u.t)
		if err := u.reducer.AllReduce(u.ctx, u.t); !errors.Is(err, engine.ErrNonFinite) {
			fail("step %d: the error is %v", step, err)
		}
		if !slices.Equal(held, u.bytes(u.t)) {
			fail("step %d failed, and the gradient has changed", step)
		}
		for i, v := range u.residual() {
			if math.Float32bits(v) != math.Float32bits(before[i]) {
				fail("step %d failed, and the residual at %d is %v, and was %v", step, i, v, before[i])
			}
		}
	}
}

// testValues checks what holds for every pattern, as what values soever they travel: with gradients that are hard to
// round, of all types, with a NaN and an infinity, over a warm-up, as entries, with momentum, clipped, with an error
// for what is not finite, and without error feedback. Unless the suite is extended, each of these has one of the
// types in a world, and another one in the next, so that worlds of three sizes have all of them; and a world has half
// of the gradients that are hard to round, and half of the ways to work with each of the values.
func testValues(r *rank, pattern string) {
	hard := []string{"normal", "own cluster", "zero", "ties", "canceling", "subnormal", "huge", "one sign"}
	types := []dtype.DType{dtype.F32, dtype.F16, dtype.BF16}
	turn := func(i, which int) bool {
		return r.extended || (r.size+which)%len(types) == i
	}
	place := slices.Index(sparsity.Patterns(), pattern)
	for v, values := range sparsity.Values()[1:] {
		cfg := config(pattern, 0.1)
		cfg.Values = values
		for f, k := range families {
			for i, dt := range types {
				runs := slices.Contains(hard, k.name) && r.sampled(2, place+v+f) && turn(i, v+f)
				if runs && (k.name != "huge" || dt != dtype.F16) {
					r.sequence(k, []int{700, 300, 300}[i], 3, dt, cfg)
				}
			}
		}
		r.sequence(families[0], 9000, 3, dtype.F32, cfg)
		if r.size > 3 && !r.extended {
			continue
		}
		for i, dt := range types {
			if turn(i, v) {
				special(r, dt, cfg)
			}
		}
		if !r.sampled(2, place+v) {
			continue
		}
		with := func(label string, dt dtype.DType, set func(*engine.Config), body func(*run)) {
			changed := cfg
			set(&changed)
			r.reduces(label, 700, dt, changed, body)
		}
		with("fail", dtype.BF16, func(c *engine.Config) {
			c.NonFinite = engine.FailNonFinite
		}, (*run).fails)
		with("clip local", dtype.F16, func(c *engine.Config) { c.ClipNorm = 0.5 }, (*run).clip)
		with("clip global", dtype.F32, func(c *engine.Config) {
			c.ClipNorm = 0.5
			c.ClipGlobal = true
		}, (*run).clip)
		with("momentum", dtype.F32, func(c *engine.Config) { c.Momentum = 0.5 }, func(u *run) {
			for step := range 5 {
				u.step(r.gradient(families[0], 700, r.rank, r.size, step))
			}
		})
		if r.selector == nil { // which selects others in each step
			r.noFeedback(cfg)
		}
		cfg.Density = 0.01
		r.schedule(cfg)
		if pattern != sparsity.Dense {
			r.entries(cfg, 1009, families[0])
		}
	}
}

// testSameBits compares coded steps with those over the other backend, if there is one, by their bits.
func testSameBits(r *rank) {
	if r.reference == nil {
		return
	}
	sums := r.checksums()
	must(r.reference(r.ctx, r.size, func(ctx context.Context, cr commtest.Rank) error {
		o := newRank(ctx, &suite{}, cr)
		return o.run(func(*rank) {
			for cell, sum := range o.checksums() {
				if o.rank == r.rank && sum != sums[cell] {
					fail("%s: results or residuals differ between backends", cell)
				}
			}
		})
	}))
}

// checksums are the checksums of results and residuals of every pattern and codec.
func (r *rank) checksums() map[string]uint32 {
	sums := map[string]uint32{}
	for _, pattern := range sparsity.Patterns() {
		for _, values := range sparsity.Values()[1:] {
			cfg := config(pattern, 0.1)
			cfg.Values = values
			r.reduces("bits", 900, dtype.BF16, cfg, func(u *run) {
				cell := pattern + " " + values
				for step := range 5 {
					u.reduce(r.gradient(families[step%2], 900, r.rank, r.size, step))
					sums[cell] = crc32.Update(sums[cell], castagnoli, append(u.bytes(u.t), hostmem.Bytes(u.residual())...))
				}
			})
		}
	}
	return sums
}

// schedule checks warm-up steps, densities by epoch, and an epoch of
// density 0.
func (r *rank) schedule(cfg engine.Config) {
	const n = 2000
	dense := cfg.Pattern == sparsity.Dense
	cfg.Schedule = engine.Schedule{
		WarmupSteps:   2,
		Densities:     []float64{0.25, 0},
		StepsPerEpoch: 2,
	}
	r.reduces("schedule", n, dtype.F32, cfg, func(u *run) {
		for step, k := range []int{n, n, 500, 500, 0, 0, 20, 20} {
			u.step(r.gradient(families[0], n, r.rank, r.size, step))
			stats := u.stats
			if dense {
				k = n
			}
			if stats.Step != step || stats.K != k || stats.Dense != (step < 2 || dense) {
				fail("step %d: stats %+v, want k %d", step, stats, k)
			}
			if k == 0 && stats.SentElements != 0 {
				fail("step %d sent %d elements at density 0", step, stats.SentElements)
			}
		}
	})
}

// testClipping checks the norm of what goes into result and residual.
func testClipping(r *rank, pattern string) {
	for _, global := range []bool{false, true} {
		for _, dt := range []dtype.DType{dtype.F32, dtype.BF16} {
			if pattern == sparsity.Dense && dt == dtype.BF16 {
				continue // there, clipped gradients are rounded before they are summed
			}
			cfg := config(pattern, 0.1)
			cfg.ClipNorm = 0.5
			cfg.ClipGlobal = global
			r.reduces(fmt.Sprintf("clip global %t", global), 2000, dt, cfg, (*run).clip)
		}
	}
}

// clip runs one step and checks that the gradient counts as clipped.
func (u *run) clip() {
	n := u.t.Len()
	// Rank 0's gradient is small, so that it is scaled only with the others.
	g := u.gradient(families[0], n, u.rank.rank, u.size, 0)
	if u.rank.rank == 0 {
		for i := range g {
			g[i] *= 1e-4
		}
	}
	u.write(u.t, g)
	g = u.read(u.t)
	norms := make([]float64, u.size)
	for _, x := range g {
		norms[u.rank.rank] += float64(x) * float64(x)
	}
	factor := min(1, u.cfg.ClipNorm/math.Sqrt(float64(u.size)*norms[u.rank.rank]))
	if u.cfg.ClipGlobal {
		u.sum(norms)
		mean := 0.0
		for _, square := range norms {
			mean += square / float64(u.size)
		}
		factor = min(1, u.cfg.ClipNorm/math.Sqrt(mean))
	}
	u.reduce(g)
	for i := range g {
		g[i] = float32(float64(g[i]) * factor)
	}
	u.conserved(make([]float32, n), g)
}

// testVolume runs oktopk with various sizes of k through all families of
// gradients; every step is checked against its bound.
func testVolume(r *rank) {
	shapes := []struct {
		n       int
		density float64
	}{{300, 0.01}, {3000, 0.02}, {20_000, 0.1}, {20_000, 0.01}}
	if testing.Short() {
		shapes = shapes[:2]
	}
	for i, k := range families {
		for j, s := range shapes {
			if !r.sampled(4, i+j) { // each family has one shape
				continue
			}
			r.sequence(k, s.n, 7, dtype.F32, config(sparsity.Oktopk, s.density))
		}
	}
}
