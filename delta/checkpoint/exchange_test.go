package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/adler32"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/zeebo/blake3"
	"github.com/zeebo/xxh3"

	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/dtype"
)

// trainer writes deltas as one of the projects does, after its description.
type trainer struct {
	version  func(n int) string
	folder   func(n int) string
	encoding string
	checksum string
	shards   int // as many ranks write, each its own
}

func six(n int) string { return fmt.Sprintf("%06d", n) }

// slime is the trainer of slime and miles, with either encoding.
func slime(encoding, checksum string) trainer {
	folder := func(n int) string { return "weight_v" + six(n) }
	return trainer{version: six, folder: folder, encoding: encoding, checksum: checksum, shards: 2}
}

// modelexpress has texts for versions, and one encoding and checksum.
var modelexpress = trainer{
	version:  func(n int) string { return fmt.Sprint("v", n) },
	folder:   func(n int) string { return fmt.Sprint("v", n) },
	encoding: "xor",
	checksum: "adler32",
	shards:   4,
}

func digest(checksum string, data []byte) string {
	switch checksum {
	case "xxh3-128":
		sum := xxh3.Hash128(data)
		return fmt.Sprintf("%016x%016x", sum.Hi, sum.Lo)
	case "blake3":
		sum := blake3.Sum256(data)
		return hex.EncodeToString(sum[:])
	}
	return fmt.Sprintf("%08x", adler32.Checksum(data))
}

// publish writes the folder of version n, and returns its path.
func (w trainer) publish(t *testing.T, root string, n int, old, now []entry) string {
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.EncoderLevelFromZstd(1)))
	require.NoError(t, err)
	dir := filepath.Join(root, w.folder(n))
	require.NoError(t, os.MkdirAll(dir, 0o777))
	parts := make([][]entry, w.shards)
	sums := make([]map[string]string, w.shards)
	weights := map[string]string{}
	for i := range now {
		if bytes.Equal(old[i].data, now[i].data) {
			continue
		}
		var diff []byte
		if w.encoding == "xor" {
			for k, b := range now[i].data {
				diff = append(diff, b^old[i].data[k])
			}
		} else {
			var positions, values []byte
			for k, b := range now[i].data {
				if b != old[i].data[k] {
					positions = binary.LittleEndian.AppendUint32(positions, uint32(k))
					values = append(values, b)
				}
			}
			diff = slices.Concat(binary.LittleEndian.AppendUint32(nil, uint32(len(values))), positions, values)
		}
		frame := encoder.EncodeAll(diff, nil)
		shard := i % w.shards
		parts[shard] = append(parts[shard], entry{now[i].name, "U8", []int{len(frame)}, frame})
		if sums[shard] == nil {
			sums[shard] = map[string]string{}
		}
		sums[shard][now[i].name] = digest(w.checksum, now[i].data)
		weights[now[i].name] = fmt.Sprintf("model-%05d-of-%05d.safetensors", shard, w.shards)
	}
	for shard, entries := range parts {
		if entries == nil {
			continue
		}
		metadata, err := json.Marshal(sums[shard])
		require.NoError(t, err)
		put(t, dir, fmt.Sprintf("model-%05d-of-%05d.safetensors", shard, w.shards), encoded(string(metadata), entries...))
	}
	index, err := json.Marshal(map[string]any{
		"metadata": map[string]string{
			"version": w.version(n), "base_version": w.version(n - 1), "delta_encoding": w.encoding,
			"compression_format": "zstd", "checksum_format": w.checksum,
		},
		"weight_map": weights,
	})
	require.NoError(t, err)
	put(t, dir, indexName, index)
	return dir
}

// receive applies a folder as an engine of these projects does, and checks what such an engine checks.
func receive(t *testing.T, dir, version, base string, old []entry) []entry {
	var index struct {
		Metadata  map[string]string `json:"metadata"`
		WeightMap map[string]string `json:"weight_map"`
	}
	text, err := os.ReadFile(filepath.Join(dir, indexName))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &index))
	require.Equal(t, version, index.Metadata["version"])
	require.Equal(t, base, index.Metadata["base_version"])
	require.Equal(t, "zstd", index.Metadata["compression_format"])
	now := slices.Clone(old)
	for i := range now {
		e := &now[i]
		shard, ok := index.WeightMap[e.name]
		if !ok {
			continue
		}
		file, err := os.ReadFile(filepath.Join(dir, shard))
		require.NoError(t, err)
		length := binary.LittleEndian.Uint64(file)
		var header map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(file[8:8+length], &header))
		var sums map[string]string
		require.NoError(t, json.Unmarshal(header["__metadata__"], &sums))
		var tensor struct {
			DType   string `json:"dtype"`
			Offsets [2]int `json:"data_offsets"`
		}
		require.NoError(t, json.Unmarshal(header[e.name], &tensor))
		require.Equal(t, "U8", tensor.DType)
		frame := file[8+int(length)+tensor.Offsets[0]:][:tensor.Offsets[1]-tensor.Offsets[0]]
		var info zstd.Header
		require.NoError(t, info.Decode(frame))
		require.True(t, info.HasFCS, "engines want the length in the frame")
		decoder, err := zstd.NewReader(nil)
		require.NoError(t, err)
		diff, err := decoder.DecodeAll(frame, nil)
		require.NoError(t, err)
		e.data = slices.Clone(e.data)
		if index.Metadata["delta_encoding"] == "xor" {
			require.Len(t, diff, len(e.data))
			for k, b := range diff {
				e.data[k] ^= b
			}
		} else {
			n := int(binary.LittleEndian.Uint32(diff))
			require.Len(t, diff, 4+5*n)
			for k := range n {
				e.data[binary.LittleEndian.Uint32(diff[4+4*k:])] = diff[4+4*n+k]
			}
		}
		require.Equal(t, digest(index.Metadata["checksum_format"], e.data), sums[e.name])
	}
	return now
}

// trainers are those of two projects, with all encodings and checksums.
func trainers() map[string]trainer {
	return map[string]trainer{
		"slime xor":       slime("xor", "xxh3-128"),
		"slime overwrite": slime("overwrite", "xxh3-128"),
		"slime blake3":    slime("xor", "blake3"),
		"miles adler32":   slime("overwrite", "adler32"),
		"modelexpress":    modelexpress,
	}
}

// TestExchange has a delta of two projects come in, cross the link as one of ours, and go out again.
func TestExchange(t *testing.T) {
	for name, w := range trainers() {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(41, 0))
			root := t.TempDir()
			path := func(name string) string { return filepath.Join(root, name) }
			old := layers(r, 8)
			old = append(old, entry{"scalar", "F32", []int{}, []byte{1, 2, 3, 4}}, entry{"empty", "I8", []int{0}, nil})
			now := step(old)
			now[3].data = old[3].data
			now[8].data = []byte{1, 2, 3, 5}
			theirs := w.publish(t, root, 7, old, now)
			store(t, path("base"), map[string][]entry{"a.safetensors": old[:4], "b.safetensors": old[4:]})
			want := store(t, path("want"), map[string][]entry{"a.safetensors": now[:4], "b.safetensors": now[4:]})

			s, err := Import(t.Context(), path("base"), theirs, path("delta"), nil)
			require.NoError(t, err)
			assert.Equal(t, uint64(7*40+1), s.Changed)
			_, err = Apply(t.Context(), path("base"), path("delta"), path("out"), nil)
			require.NoError(t, err)
			require.Equal(t, want, load(t, path("out")))

			for _, change := range []string{path("delta"), path("want")} {
				f := Format{Encoding: w.encoding, Checksum: w.checksum, Version: w.version(7), Base: w.version(6)}
				_, err = Export(t.Context(), path("base"), change, path("again"), f, nil)
				require.NoError(t, err)
				require.Equal(t, now, receive(t, path("again"), w.version(7), w.version(6), old))
				require.NoError(t, os.RemoveAll(path("again")))
			}
			_, err = Export(t.Context(), path("base"), path("delta"), path("weight_v000012"), Format{}, nil)
			require.NoError(t, err)
			require.Equal(t, now, receive(t, path("weight_v000012"), "000012", "000011", old))
		})
	}
}

// TestChecksums: the checksums are those of their definitions.
func TestChecksums(t *testing.T) {
	for _, c := range []struct{ checksum, data, sum string }{
		{"xxh3-128", "", "99aa06d3014798d86001c324468d497f"},
		{"blake3", "", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"},
		{"adler32", "", "00000001"},
		{"adler32", "Wikipedia", "11e60398"},
	} {
		sum, err := Format{Checksum: c.checksum}.sum([]byte(c.data))
		require.NoError(t, err)
		require.Equal(t, c.sum, sum, c.checksum)
	}
}

// TestImportRefused: what is damaged, incomplete or for another base is refused, and nothing is written.
func TestImportRefused(t *testing.T) {
	r := rand.New(rand.NewPCG(42, 0))
	root := t.TempDir()
	old := layers(r, 4)
	now := step(old)
	base := put(t, root, "base", encoded("{}", old...))
	const shard = "model-00001-of-00002.safetensors"
	edit := func(name string, change func(b []byte) []byte) func(dir string) {
		return func(dir string) {
			b, err := os.ReadFile(filepath.Join(dir, name))
			require.NoError(t, err)
			put(t, dir, name, change(b))
		}
	}
	replace := func(name, from, to string) func(dir string) {
		return edit(name, func(b []byte) []byte {
			require.Contains(t, string(b), from)
			return bytes.Replace(b, []byte(from), []byte(to), 1)
		})
	}
	for name, c := range map[string]struct {
		damage func(dir string)
		text   string
	}{
		"another base":    {func(string) { put(t, root, "base", encoded("{}", now...)) }, "for another base"},
		"missing shard":   {func(dir string) { os.Remove(filepath.Join(dir, shard)) }, "no such file"},
		"missing index":   {func(dir string) { os.Remove(filepath.Join(dir, indexName)) }, "no such file"},
		"cut":             {edit(shard, func(b []byte) []byte { return b[:len(b)-1] }), "the file at"},
		"cut header":      {edit(shard, func(b []byte) []byte { return b[:20] }), "not a safetensors file"},
		"flipped":         {edit(shard, func(b []byte) []byte { b[len(b)-30] ^= 1; return b }), "tensor \"model.layers."},
		"checksum":        {edit(shard, func(b []byte) []byte { i := bytes.Index(b, []byte(`weight":"`)) + 9; b[i] ^= 1; return b }), "want "},
		"no checksum":     {replace(shard, "__metadata__", "__metadatx__"), "no bytes or no checksum"},
		"encoding":        {replace(indexName, `"xor"`, `"add"`), `encoding "add"`},
		"overwrite":       {replace(indexName, `"xor"`, `"overwrite"`), "not a delta in the shared format"},
		"compression":     {replace(indexName, `"zstd"`, `"lz4"`), `compressed by "lz4"`},
		"checksum format": {replace(indexName, `"xxh3-128"`, `"md5"`), `checksum "md5"`},
		"full":            {replace(indexName, `"delta_encoding"`, `"encoding"`), "no delta_encoding"},
		"elsewhere":       {replace(indexName, shard, "../"+shard), "is no name of a shard"},
		"unknown tensor":  {replace(indexName, "model.layers.1.", "model.layers.9."), "no bytes or no checksum"},
		"no JSON":         {edit(indexName, func([]byte) []byte { return []byte("{") }), "not a delta in the shared format"},
		"unknown to base": {func(string) { put(t, root, "base", encoded("{}", old[:3]...)) }, "which the base does not have"},
		"other shape": {func(string) {
			other := slices.Clone(old)
			other[1].data, other[1].shape = other[1].data[:2000], []int{1000}
			put(t, root, "base", encoded("{}", other...))
		}, "not a delta in the shared format"},
	} {
		t.Run(name, func(t *testing.T) {
			put(t, root, "base", encoded("{}", old...))
			dir := slime("xor", "xxh3-128").publish(t, root, 1, old, now)
			c.damage(dir)
			_, err := Import(t.Context(), base, dir, filepath.Join(root, "out"), nil)
			require.ErrorContains(t, err, c.text)
			require.NoFileExists(t, filepath.Join(root, "out"))
		})
	}
}

// FuzzDecode: any bytes as how a tensor changes are an error or change no other byte.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 2, 0, 0, 0, 9}, true)
	f.Add(make([]byte, 8), false)
	f.Fuzz(func(t *testing.T, diff []byte, overwrite bool) {
		format := Format{Encoding: encodingXor}
		if overwrite {
			format.Encoding = encodingOverwrite
		}
		_ = format.decode(diff, make([]byte, 8))
	})
}

// TestExportRefused: what the format cannot say, and a base that is another one.
func TestExportRefused(t *testing.T) {
	r := rand.New(rand.NewPCG(43, 0))
	root := t.TempDir()
	path := func(name string) string { return filepath.Join(root, name) }
	old := layers(r, 3)
	put(t, root, "base", encoded("{}", old...))
	put(t, root, "target", encoded("{}", step(old)...))
	put(t, root, "fewer", encoded("{}", old[:2]...))
	put(t, root, "more", encoded("{}", layers(r, 4)...))
	put(t, root, "cut", []byte("tdl"))
	store(t, path("tied"), map[string][]entry{"1.safetensors": old[:2], "2.safetensors": old[1:]})
	_, err := Diff(t.Context(), path("base"), path("target"), path("delta"), nil)
	require.NoError(t, err)
	for _, c := range []struct {
		base, change, text string
		f                  Format
	}{
		{"base", "fewer", "is gone", Format{}},
		{"base", "more", "no such tensor", Format{}},
		{"tied", "tied", "more than one shard", Format{}},
		{"target", "delta", "is not the file that", Format{}},
		{"base", "cut", "it ends before its length", Format{}},
		{"base", "none", "no such file", Format{}},
		{"base", "target", `encoding "add"`, Format{Encoding: "add"}},
		{"base", "target", `checksum "md5"`, Format{Checksum: "md5"}},
	} {
		_, err := Export(t.Context(), path(c.base), path(c.change), path("weight_v000001"), c.f, nil)
		require.ErrorContains(t, err, c.text)
		require.NoDirExists(t, path("weight_v000001"))
	}
	_, err = Export(t.Context(), path("base"), path("target"), path("folder"), Format{}, nil)
	require.ErrorContains(t, err, "no version")
}

// tensorsOf returns entries as tensors.
func tensorsOf(entries []entry) (all []delta.Tensor) {
	for _, e := range entries {
		all = append(all, delta.Tensor{
			Name: e.name, DType: dtype.BF16, Shape: e.shape, Memory: delta.Host(slices.Clone(e.data)),
		})
	}
	return all
}

// shows checks what a subscriber shows.
func shows(t *testing.T, s *delta.Subscriber, version uint64, want []entry) {
	require.NoError(t, s.View(func(v uint64, tensors []delta.Tensor) error {
		require.Equal(t, version, v)
		for i, x := range tensors {
			require.Equal(t, want[i].data, []byte(x.Memory.(delta.Host)), x.Name)
		}
		return nil
	}))
}

// TestPull follows versions in a folder and at a URL, of other trainers and of Publish, and stays where it is when the
// next one is damaged or for another base.
func TestPull(t *testing.T) {
	r := rand.New(rand.NewPCG(44, 0))
	versions := [][]entry{layers(r, 5)}
	for len(versions) < 6 {
		versions = append(versions, step(versions[len(versions)-1]))
	}
	for _, far := range []bool{false, true} {
		root := t.TempDir()
		source := root
		if far {
			server := httptest.NewServer(http.StripPrefix("/deltas", http.FileServer(http.Dir(root))))
			defer server.Close()
			source = server.URL + "/deltas"
		}
		s, err := delta.NewSubscriber(t.Context(), nil, nil, delta.Config{Tensors: tensorsOf(versions[0]), Version: 1})
		require.NoError(t, err)
		v, err := Pull(t.Context(), s, source)
		require.NoError(t, err)
		require.EqualValues(t, 1, v)
		slime("xor", "xxh3-128").publish(t, root, 1, versions[0], versions[1])
		slime("overwrite", "adler32").publish(t, root, 2, versions[1], versions[2])
		require.NoError(t, Publish(t.Context(), filepath.Join(root, "weight_v000003"),
			tensorsOf(versions[2]), tensorsOf(versions[3]), Format{}))
		slime("xor", "blake3").publish(t, root, 4, versions[3], versions[3]) // nothing changes
		v, err = Pull(t.Context(), s, source)
		require.NoError(t, err)
		require.EqualValues(t, 5, v)
		shows(t, s, 5, versions[3])

		dir := slime("xor", "xxh3-128").publish(t, root, 5, versions[3], versions[4])
		shard := filepath.Join(dir, "model-00001-of-00002.safetensors")
		whole, err := os.ReadFile(shard)
		require.NoError(t, err)
		for _, damaged := range [][]byte{whole[:len(whole)/2], nil, append(whole[:len(whole)-1:len(whole)-1], 0)} {
			require.NoError(t, os.Remove(shard))
			if damaged != nil {
				require.NoError(t, os.WriteFile(shard, damaged, 0o666))
			}
			_, err = Pull(t.Context(), s, source)
			require.ErrorIs(t, err, errFormat)
			require.NotErrorIs(t, err, fs.ErrNotExist)
			shows(t, s, 5, versions[3])
			require.NoError(t, os.WriteFile(shard, whole, 0o666))
		}
		index := filepath.Join(dir, indexName)
		text, err := os.ReadFile(index)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(index, bytes.Replace(text, []byte("000004"), []byte("000003"), 1), 0o666))
		_, err = Pull(t.Context(), s, source)
		var mismatch *delta.VersionError
		require.ErrorAs(t, err, &mismatch)
		shows(t, s, 5, versions[3])
		require.NoError(t, os.WriteFile(index, text, 0o666))
		v, err = Pull(t.Context(), s, source)
		require.NoError(t, err)
		require.EqualValues(t, 6, v)
		shows(t, s, 6, versions[4])
		left, err := filepath.Glob(filepath.Join(os.TempDir(), "tutti-delta-*"))
		require.NoError(t, err)
		require.Empty(t, left, "downloads")
	}
	_, err := locate("http://a b/")
	require.Error(t, err)
}
