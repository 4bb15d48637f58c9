package delta

import (
	"bytes"
	"math/rand/v2"
	gort "runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
)

// TestApply makes the tensors of a target beside those of the base, in memory of several kinds, and leaves the base.
func TestApply(t *testing.T) {
	const seed = 21
	r, ctx := rand.New(rand.NewPCG(seed, 0)), t.Context()
	base := newModel(r, "")
	target := append(base.train(r, 0.1)[1:], newTensor(r, "new", dtype.BF16, 3, 7))
	target[0] = newTensor(r, target[0].Name, target[0].DType, 5)
	d, err := Diff(ctx, base, target, nil)
	require.NoError(t, err)
	p := NewPublisher(nil, nil) // whose first version is a full copy
	require.NoError(t, p.Commit(ctx, 1, target))
	var b bytes.Buffer
	require.NoError(t, p.WriteSince(ctx, &b, 0))
	full, err := Read(&b)
	require.NoError(t, err)
	for _, d := range []*Delta{d, full} {
		for _, far := range []bool{false, true} {
			from := base.clone()
			var got []Tensor
			require.NoError(t, d.Apply(ctx, from, func(x Tensor) (Memory, error) {
				memory := make(Host, x.elements*x.DType.Size())
				for i := range memory {
					memory[i] = 0xa5
				}
				if x.Memory = memory; far {
					x.Memory = elsewhere{memory}
				}
				got = append(got, x)
				return x.Memory, nil
			}, nil), "seed %d", seed)
			require.NoError(t, same(got, target), "seed %d", seed)
			require.NoError(t, same(from, base))
		}
	}
	other := base.clone()
	other[0].Memory.(Host)[0]++
	var version *VersionError
	err = d.Apply(ctx, other, func(x Tensor) (Memory, error) { return make(Host, x.bytes()), nil }, nil)
	require.ErrorAs(t, err, &version)
	require.True(t, version.Differ)
}

// synthetic is memory without any: elements of one value are read, and what is written is looked at and forgotten.
type synthetic struct {
	value byte
	check func(p []byte)
}

func (s synthetic) ReadAt(p []byte, _ int64) (int, error) {
	for i := range p {
		p[i] = s.value + byte(i&1)
	}
	return len(p), nil
}

func (s synthetic) WriteAt(p []byte, _ int64) (int, error) {
	s.check(p)
	return len(p), nil
}

// TestApplyMemory: Apply keeps some blocks, of not too many processors, and not the tensors.
func TestApplyMemory(t *testing.T) {
	defer gort.GOMAXPROCS(gort.GOMAXPROCS(0))
	for processors, limit := range map[int]int64{1: 8 << 20, 2: 16 << 20, 64: 64 << 20} {
		gort.GOMAXPROCS(processors)
		applyWithin(t, limit)
	}
}

// applyWithin applies a delta in the form that needs the block from before.
func applyWithin(t *testing.T, limit int64) {
	const blocks = 24 // of a MiB each
	tensor := func(value byte) []Tensor {
		return []Tensor{{Name: "w", DType: dtype.FP8E4M3, Shape: []int{blocks, blockLen}, Memory: synthetic{value: value}}}
	}
	base, target := tensor(8), tensor(8)
	target[0].Memory = flipped{synthetic{value: 8}}
	d, err := Diff(t.Context(), base, target, nil)
	require.NoError(t, err)
	forms := map[byte]int{}
	for _, b := range d.tensors[0].blocks {
		form, _ := formOf(b.code)
		forms[form]++
	}
	require.Equal(t, map[byte]int{formSorted: blocks}, forms)

	live := func() uint64 {
		var s gort.MemStats
		gort.GC()
		gort.ReadMemStats(&s)
		return s.HeapAlloc
	}
	coders = sync.Pool{New: coders.New} // without what Diff has left
	var mu sync.Mutex
	before, peak, written := live(), uint64(0), 0
	require.NoError(t, d.Apply(t.Context(), base, func(Tensor) (Memory, error) {
		return synthetic{check: func(p []byte) {
			mu.Lock()
			defer mu.Unlock()
			written += len(p)
			peak = max(peak, live())
		}}, nil
	}, nil))
	assert.Equal(t, blocks*blockLen, written)
	assert.Less(t, int64(peak-before), limit, "%d processors", gort.GOMAXPROCS(0))
}

// flipped is base with some elements changed, small ones more often.
type flipped struct{ synthetic }

func (f flipped) ReadAt(p []byte, at int64) (int, error) {
	n, err := f.synthetic.ReadAt(p, at)
	for i := 0; i < n; i += 40 { // even ones, which have the same class
		p[i]++
	}
	return n, err
}

// TestText: a program's text is sent as its changes, and is restored from the base's text alone.
func TestText(t *testing.T) {
	one := []Tensor{{Name: "w", DType: dtype.U8, Shape: []int{3}, Memory: Host("abc")}}
	long := strings.Repeat(`{"step":"1000"}`, 1000)
	for _, c := range []struct {
		base, target string
		bytes        int // of the delta, at most
	}{
		{long, long, 60},
		{long, strings.Replace(long, "1000", "1010", 1), 60},
		{long, long[1:], 60},
		{long, long + "x", 60},
		{"aaa", "aaaaa", 60},
		{"aaaaa", "aaa", 60},
		{"abcab", "ab", 60},
		{"", "text", 60},
		{"text", "", 60},
		{"", "", 60},
		{"one", "two", 60},
	} {
		d, err := Diff(t.Context(), one, one, nil)
		require.NoError(t, err)
		require.NoError(t, d.SetText([]byte(c.base), []byte(c.target)))
		var b bytes.Buffer
		_, err = d.WriteTo(&b)
		require.NoError(t, err)
		require.Less(t, b.Len(), c.bytes)
		require.Equal(t, uint64(b.Len()), d.Stat().Bytes)
		read, err := Read(bytes.NewReader(b.Bytes()))
		require.NoError(t, err)
		got, err := read.Text([]byte(c.base))
		require.NoError(t, err)
		require.Equal(t, c.target, string(got))
		for _, other := range []string{c.base + " ", "another", long[:len(long)-1]} {
			var version *VersionError
			_, err = read.Text([]byte(other))
			require.ErrorAs(t, err, &version)
			require.True(t, version.Differ)
		}
	}
	// Other lengths, and frames that are cut or no frames.
	target := strings.Replace(long, "1000", "1010", 1)
	for _, damage := range []func(p *packed){
		func(p *packed) { p.length++ },
		func(p *packed) { p.length = 0 },
		func(p *packed) { p.length = 1 << 62 },
		func(p *packed) { p.frame = nil; p.length-- },
		func(p *packed) { p.frame = p.frame[:len(p.frame)-1] },
		func(p *packed) { p.frame = append(p.frame, 0) },
		func(p *packed) { p.frame = []byte("no frame") },
	} {
		d, err := Diff(t.Context(), one, one, nil)
		require.NoError(t, err)
		require.NoError(t, d.SetText([]byte(long), []byte(target)))
		damage(d.text)
		got, err := d.Text([]byte(long))
		if err == nil && len(got) == 0 {
			continue // as it says
		}
		require.ErrorIs(t, err, ErrDelta)
	}
	d, err := Diff(t.Context(), one, one, nil)
	require.NoError(t, err)
	got, err := d.Text([]byte("stays"))
	require.NoError(t, err)
	require.Equal(t, "stays", string(got))
}

// TestVersions: deltas in other versions of the format are refused by its number, and what is none by its beginning.
func TestVersions(t *testing.T) {
	var b bytes.Buffer
	d, err := Diff(t.Context(), nil, nil, nil)
	require.NoError(t, err)
	_, err = d.WriteTo(&b)
	require.NoError(t, err)
	require.Equal(t, "tdl\x04", b.String()[:4])
	for text, head := range map[string]string{
		"version 1 of the format, and this program reads version 4": "tdl\x01",
		"version 2 of the format, and this program reads version 4": "tdl\x02",
		"version 3 of the format, and this program reads version 4": "tdl\x03",
		`begins with "PK\x03\x04"`:                                  "PK\x03\x04",
	} {
		_, err := Read(bytes.NewReader(slices.Concat([]byte(head), b.Bytes()[4:])))
		require.ErrorIs(t, err, ErrDelta)
		require.ErrorContains(t, err, text)
	}
}
