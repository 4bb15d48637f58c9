package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// entry is a tensor to be written.
type entry struct {
	name, kind string
	shape      []int
	data       []byte
}

// encoded returns the file of tensors in that order.
func encoded(metadata string, entries ...entry) []byte {
	parts := []string{`"__metadata__":` + metadata}
	var data []byte
	for _, e := range entries {
		shape, _ := json.Marshal(e.shape)
		parts = append(parts, fmt.Sprintf(`%q:{"dtype":%q,"shape":%s,"data_offsets":[%d,%d]}`,
			e.name, e.kind, shape, len(data), len(data)+len(e.data)))
		data = append(data, e.data...)
	}
	return bytesOf("{"+strings.Join(parts, ",")+"}", data)
}

// folder is the content of files by name.
type folder map[string][]byte

// store writes an index and shards of entries, and returns what it has written.
func store(t *testing.T, dir string, shards map[string][]entry) folder {
	weights := map[string]string{}
	files := folder{}
	for _, name := range slices.Sorted(maps.Keys(shards)) {
		for _, e := range shards[name] {
			weights[e.name] = name // of several shards the last one, in the order of names
		}
		files[name] = encoded(`{"format":"pt"}`, shards[name]...)
	}
	index, err := json.MarshalIndent(map[string]any{"metadata": map[string]int{"total_size": 1}, "weight_map": weights}, "", "  ")
	require.NoError(t, err)
	files[indexName] = index
	require.NoError(t, os.MkdirAll(dir, 0o777))
	for name, content := range files {
		put(t, dir, name, content)
	}
	return files
}

// load reads all files of a folder.
func load(t *testing.T, dir string) folder {
	files := folder{}
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		files[e.Name()], err = os.ReadFile(filepath.Join(dir, e.Name()))
		require.NoError(t, err)
	}
	return files
}

// layers returns tensors of random bf16 weights around zero.
func layers(r *rand.Rand, n int) (all []entry) {
	for i := range n {
		data := make([]byte, 2*4000)
		for k := range len(data) / 2 {
			binary.LittleEndian.PutUint16(data[2*k:], uint16(0x3c00+r.IntN(1<<10)|r.IntN(2)<<15))
		}
		all = append(all, entry{fmt.Sprintf("model.layers.%d.weight", i), "BF16", []int{40, 100}, data})
	}
	return all
}

// step moves one weight in a hundred.
func step(entries []entry) []entry {
	entries = slices.Clone(entries)
	for i := range entries {
		entries[i].data = slices.Clone(entries[i].data)
		for k := 2 * (i % 50); k < len(entries[i].data); k += 200 {
			entries[i].data[k] ^= 1
		}
	}
	return entries
}

// TestShards: tensors that move to other shards cost what has changed of them, whatever number of shards there is on
// either side, and files and index are the same ones again.
func TestShards(t *testing.T) {
	r := rand.New(rand.NewPCG(31, 0))
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	all := layers(r, 12)
	next := step(all)
	two := store(t, path("two"), map[string][]entry{"a.safetensors": all[:6], "b.safetensors": all[6:]})
	three := store(t, path("three"), map[string][]entry{
		"model-1.safetensors": next[8:], "model-2.safetensors": next[3:8], "a.safetensors": next[:3],
	})
	single := encoded(`{}`, next...)
	put(t, dir, "single", single)
	changed := 12 * 40
	for _, c := range []struct {
		from, to string
		limit    int
	}{
		{path("two"), path("three"), 4*changed + 500},
		{path("three/" + indexName), path("two"), 4*changed + 500},
		{path("two"), path("single"), 4*changed + 500},
		{path("single"), path("three"), 1000}, // nothing changes but the files
		{path("three"), path("three"), 60},
	} {
		s, err := Diff(t.Context(), c.from, c.to, path("delta"), nil)
		require.NoError(t, err)
		assert.Less(t, int(s.Bytes), c.limit, "%s to %s", c.from, c.to)
		out := path("out")
		_, err = Apply(t.Context(), c.from, path("delta"), out, nil)
		require.NoError(t, err)
		if c.to == path("single") {
			got, err := os.ReadFile(out)
			require.NoError(t, err)
			require.Equal(t, single, got)
		} else {
			want := map[string]folder{path("two"): two, path("three"): three}[c.to]
			require.Equal(t, want, load(t, out))
			_, err = Apply(t.Context(), c.from, path("delta"), out, nil)
			require.ErrorIs(t, err, fs.ErrExist)
			require.Equal(t, want, load(t, out))
		}
		require.NoError(t, os.RemoveAll(out))
	}
	_, err := Diff(t.Context(), path("two"), path("three"), path("delta"), nil)
	require.NoError(t, err)
	_, err = Apply(t.Context(), path("three"), path("delta"), path("out"), nil)
	require.ErrorContains(t, err, "three is not the file that")
	require.NoFileExists(t, path("out"))
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 4, "two, three, single and delta")
}

// TestTied: a tensor that two shards have under one name.
func TestTied(t *testing.T) {
	r := rand.New(rand.NewPCG(32, 0))
	dir := t.TempDir()
	all := layers(r, 2)
	shards := func(e []entry) map[string][]entry {
		return map[string][]entry{"1.safetensors": {e[0], e[1]}, "2.safetensors": {e[0]}}
	}
	store(t, filepath.Join(dir, "old"), shards(all))
	want := store(t, filepath.Join(dir, "new"), shards(step(all)))
	s, err := Diff(t.Context(), filepath.Join(dir, "old"), filepath.Join(dir, "new"), filepath.Join(dir, "delta"), nil)
	require.NoError(t, err)
	require.Less(t, s.Bytes, uint64(3*40*4+200))
	_, err = Apply(t.Context(), filepath.Join(dir, "old"), filepath.Join(dir, "delta"), filepath.Join(dir, "out"), nil)
	require.NoError(t, err)
	require.Equal(t, want, load(t, filepath.Join(dir, "out")))
}

// TestContent: tensors with other names, shapes, types or places cost what has changed of them, and a word of the header.
func TestContent(t *testing.T) {
	r := rand.New(rand.NewPCG(33, 0))
	all := layers(r, 20)
	old := encoded(`{"step":"1000"}`, all...)
	change := func(edit func(i int, e *entry)) []byte {
		next := slices.Clone(all)
		for i := range next {
			edit(i, &next[i])
		}
		return encoded(`{"step":"1000"}`, next...)
	}
	shuffled := slices.Clone(all)
	r.Shuffle(len(shuffled), func(i, k int) { shuffled[i], shuffled[k] = shuffled[k], shuffled[i] })
	moved := step(all)
	dir := t.TempDir()
	from := put(t, dir, "old", old)
	for name, c := range map[string]struct {
		content []byte
		limit   int
	}{
		"metadata":  {encoded(`{"step":"1010"}`, all...), 100},
		"reordered": {encoded(`{"step":"1000"}`, shuffled...), 200},
		"renamed":   {change(func(_ int, e *entry) { e.name = "module." + e.name }), 400},
		"reshaped":  {change(func(_ int, e *entry) { e.shape = []int{1, 4000} }), 300},
		"retyped":   {change(func(_ int, e *entry) { e.kind = "F16" }), 300},
		"wider":     {change(func(_ int, e *entry) { e.kind, e.shape = "F32", []int{40, 50} }), 300},
		"bytes":     {change(func(_ int, e *entry) { e.kind, e.shape = "U8", []int{8000} }), 300},
		"twice":     {encoded(`{"step":"1000"}`, append(slices.Clone(all), entry{"tied", "BF16", []int{40, 100}, all[3].data})...), 300},
		"one gone":  {encoded(`{"step":"1000"}`, all[1:]...), 300},
		"moved": {change(func(i int, e *entry) {
			e.name = fmt.Sprint("renamed", i)
			e.data = moved[i].data
		}), 20*40*4 + 400},
	} {
		to, patch := put(t, dir, "new", c.content), filepath.Join(dir, "delta")
		s, err := Diff(t.Context(), from, to, patch, nil)
		require.NoError(t, err)
		t.Logf("%s: %d bytes", name, s.Bytes)
		assert.Less(t, int(s.Bytes), c.limit, name)
		_, err = Apply(t.Context(), from, patch, filepath.Join(dir, "out"), nil)
		require.NoError(t, err, name)
		got, err := os.ReadFile(filepath.Join(dir, "out"))
		require.NoError(t, err)
		require.True(t, bytes.Equal(c.content, got), name)
	}
}

// TestIndexRefused: indices that name files elsewhere, shards that are not there, and tensors that a shard lacks.
func TestIndexRefused(t *testing.T) {
	dir := t.TempDir()
	shard := encoded("{}", entry{"w", "U8", []int{1}, []byte{1}})
	put(t, dir, "a.safetensors", shard)
	put(t, dir, "cut.safetensors", shard[:len(shard)-1])
	for text, index := range map[string]string{
		"is no name of a shard":           `{"weight_map":{"w":"../a.safetensors"}}`,
		`"/etc/passwd" is no name`:        `{"weight_map":{"w":"/etc/passwd"}}`,
		`"" is no name`:                   `{"weight_map":{"w":""}}`,
		"no such file":                    `{"weight_map":{"w":"b.safetensors"}}`,
		`has tensor "v" in shard`:         `{"weight_map":{"w":"a.safetensors","v":"a.safetensors"}}`,
		"the file at":                     `{"weight_map":{"w":"cut.safetensors"}}`,
		"a header of 999":                 "",
		"neither a safetensors file nor":  `{"weight_map"`,
		"whose weight_map names no shard": `{"metadata":{}}`,
	} {
		path := put(t, dir, indexName, []byte(index))
		if index == "" {
			put(t, dir, indexName, append(binary.LittleEndian.AppendUint64(nil, 999), 0))
		}
		for _, from := range []string{path, dir} {
			_, err := Diff(t.Context(), from, filepath.Join(dir, "a.safetensors"), filepath.Join(dir, "out"), nil)
			require.ErrorContains(t, err, text)
			require.ErrorContains(t, err, indexName)
		}
	}
}

// FuzzText: any text is of no checkpoint, or of one whose text it is.
func FuzzText(f *testing.F) {
	f.Add([]byte(header))
	f.Add(relative([]byte(header)))
	f.Add(append([]byte{sharded, 1, 1, 'a', 2, '{', '}', 1, 'b'}, "index"...))
	f.Fuzz(func(t *testing.T, text []byte) {
		if !bytes.ContainsRune(text, relativeMark) {
			require.Equal(t, text, append([]byte{}, absolute(relative(text))...), "as a header")
		}
		c, err := parseText(text)
		if err != nil {
			return
		}
		for _, f := range c.files {
			require.NotContains(t, f.name, "/")
			require.Equal(t, uint64(len(f.header)-headerLength), binary.LittleEndian.Uint64(f.header))
		}
	})
}

// TestRelative: offsets become relative where a tensor begins at the end of the one before, in any style.
func TestRelative(t *testing.T) {
	for from, to := range map[string]string{
		`{"a":{"data_offsets":[0,4]},"b":{"data_offsets":[4,10]}}`:    "{\"a\":{\"data_offsets\":[\x014,]},\"b\":{\"data_offsets\":[\x016,]}}",
		`{"a":{"data_offsets": [0, 4]}}`:                              "{\"a\":{\"data_offsets\": [\x014, ]}}",
		`{"b":{"data_offsets":[4,10]},"c":{"data_offsets":[10,12]}}`:  "{\"b\":{\"data_offsets\":[4,10]},\"c\":{\"data_offsets\":[\x012,]}}",
		`{"a":{"data_offsets":[00,4]}}`:                               `{"a":{"data_offsets":[00,4]}}`,
		`{"a":{"data_offsets":[9999999999999999999999,4]}}`:           `{"a":{"data_offsets":[9999999999999999999999,4]}}`,
		"{\"a\":{\"data_offsets\":[\x014,]},\"data_offsets\":[0,4]}}": "{\"a\":{\"data_offsets\":[\x014,]},\"data_offsets\":[0,4]}}",
	} {
		got := relative([]byte(from))
		assert.Equal(t, to, string(got))
		if !strings.Contains(from, string(relativeMark)) {
			assert.Equal(t, from, string(absolute(got)))
		}
	}
}
