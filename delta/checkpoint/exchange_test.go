package checkpoint

import (
	"bytes"
	"crypto/sha256"
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

// trainers are the trainers of two projects, with all encodings and checksums.
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
			_, err = Import(t.Context(), path("base"), theirs, root, nil)
			require.ErrorContains(t, err, "is a folder, and a delta is one file: name it, such as "+path(filepath.Base(theirs)+".delta"))
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

// TestLongTensors: tensors of several blocks, longer than what is kept in memory, go out and come in, and what is
// written does not depend on which one is finished first.
func TestLongTensors(t *testing.T) {
	r := rand.New(rand.NewPCG(45, 0))
	root := t.TempDir()
	path := func(name string) string { return filepath.Join(root, name) }
	var old []entry
	for i, n := range []int{2<<20 + 1, 1 << 20, 1<<20 + 7, 9} {
		data := make([]byte, n)
		for k := range data {
			data[k] = byte(r.Uint32())
		}
		old = append(old, entry{fmt.Sprint("w", i), "U8", []int{n}, data})
	}
	now := slices.Clone(old)
	for i := range now {
		now[i].data = slices.Clone(old[i].data)
		for k := 7; k < len(now[i].data); k += 1 + r.IntN(80) {
			now[i].data[k]++
		}
	}
	clear(now[2].data[:1<<19]) // and all of some blocks
	copy(now[2].data[1<<19:], old[2].data[1<<19:])
	put(t, root, "old", encoded("{}", old...))
	put(t, root, "new", encoded("{}", now...))
	for _, encoding := range []string{encodingXor, encodingOverwrite} {
		f := Format{Encoding: encoding, Checksum: checksumBLAKE3}
		_, err := Export(t.Context(), path("old"), path("new"), path("weight_v000002"), f, nil)
		require.NoError(t, err)
		require.Equal(t, now, receive(t, path("weight_v000002"), "000002", "000001", old))
		first := load(t, path("weight_v000002"))
		require.Len(t, first, 2, "nothing temporary is left")
		_, err = Import(t.Context(), path("old"), path("weight_v000002"), path("delta"), nil)
		require.NoError(t, err)
		_, err = Apply(t.Context(), path("old"), path("delta"), path("out"), nil)
		require.NoError(t, err)
		got, err := os.ReadFile(path("out"))
		require.NoError(t, err)
		require.True(t, bytes.Equal(encoded("{}", now...), got))
		for range 3 {
			require.NoError(t, os.RemoveAll(path("weight_v000002")))
			_, err = Export(t.Context(), path("old"), path("delta"), path("weight_v000002"), f, nil)
			require.NoError(t, err)
			require.Equal(t, first, load(t, path("weight_v000002")))
		}
		require.NoError(t, os.RemoveAll(path("weight_v000002")))
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
		sum, err := Format{Checksum: c.checksum}.hash()
		require.NoError(t, err)
		_, err = sum.Write([]byte(c.data))
		require.NoError(t, err)
		require.Equal(t, c.sum, hex.EncodeToString(sum.Sum(nil)), c.checksum)
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

// frameOf is a tensor of a delta in the shared format, with what its frame has, for a base of zeros.
func frameOf(t *testing.T, format Format, frame []byte, size int) *patched {
	return &patched{
		format: format,
		frame:  frameIn(t, frame),
		base:   delta.Host(make([]byte, size)),
		bytes:  int64(size),
	}
}

// frameIn writes a frame into a file.
func frameIn(t *testing.T, data []byte) frame {
	f, err := os.Create(filepath.Join(t.TempDir(), "frame"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	_, err = f.Write(data)
	require.NoError(t, err)
	return frame{section: section{f, 0, int64(len(data))}}
}

// zstdOf returns a frame as other encoders write it.
func zstdOf(t *testing.T, content []byte) []byte {
	encoder, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	return encoder.EncodeAll(content, nil)
}

// FuzzDecode: any bytes as how a tensor changes, and any frame, are an error or change no other byte.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 2, 0, 0, 0, 9}, true, true)
	f.Add(make([]byte, 8), false, true)
	f.Add([]byte("(\xb5/\xfd"), true, false)
	f.Fuzz(func(t *testing.T, frame []byte, overwrite, compressed bool) {
		format := Format{Encoding: encodingXor, Checksum: checksumAdler}
		if overwrite {
			format.Encoding = encodingOverwrite
		}
		if compressed {
			frame = zstdOf(t, frame)
		}
		p := frameOf(t, format, frame, 8)
		defer p.Close()
		data := make([]byte, 9)
		_, _ = p.ReadAt(data[:3], 0)
		_, _ = p.ReadAt(data[3:8], 3)
		require.Zero(t, data[8])
	})
}

// TestDamagedFrames: frames that do not have what they should are refused, in the encoding with several parts most
// of all.
func TestDamagedFrames(t *testing.T) {
	list := func(count uint32, positions []uint32, values string) (content []byte) {
		content = binary.LittleEndian.AppendUint32(content, count)
		for _, position := range positions {
			content = binary.LittleEndian.AppendUint32(content, position)
		}
		return append(content, values...)
	}
	for name, c := range map[string]struct {
		encoding string
		content  []byte
		damage   string // "" is none
	}{
		"xor":               {encodingXor, []byte("\x00\x01\x00\x00\x00\x00\x00\x00"), ""},
		"short xor":         {encodingXor, make([]byte, 7), "unexpected EOF"},
		"long xor":          {encodingXor, make([]byte, 9), "longer than its tensor"},
		"overwrite":         {encodingOverwrite, list(2, []uint32{1, 7}, "\x01\x00"), ""},
		"overwrite nothing": {encodingOverwrite, list(0, nil, ""), "its adler32 is"},
		"no count":          {encodingOverwrite, []byte{1}, "unexpected EOF"},
		"no values":         {encodingOverwrite, list(2, []uint32{1, 2}, ""), "unexpected EOF"},
		"a value too few":   {encodingOverwrite, list(2, []uint32{1, 2}, "\x01"), "unexpected EOF"},
		"a value too many":  {encodingOverwrite, list(1, []uint32{1}, "\x01\x01"), "longer than its tensor"},
		"no positions":      {encodingOverwrite, list(2, []uint32{1}, ""), "unexpected EOF"},
		"descending":        {encodingOverwrite, list(2, []uint32{2, 1}, "\x01\x01"), "changes after"},
		"twice":             {encodingOverwrite, list(2, []uint32{1, 1}, "\x01\x01"), "changes after"},
		"outside":           {encodingOverwrite, list(1, []uint32{8}, "\x01"), "of a tensor of 8"},
		"all and more":      {encodingOverwrite, list(1<<31, []uint32{1}, "\x01"), "bytes change of 8"},
	} {
		t.Run(name, func(t *testing.T) {
			want := []byte("\x00\x01\x00\x00\x00\x00\x00\x00")
			format := Format{Encoding: c.encoding, Checksum: checksumAdler}
			for _, step := range []int{8, 3, 1} {
				for cut := range 2 { // of the frame's end
					frame := zstdOf(t, c.content)
					p := frameOf(t, format, frame[:len(frame)-cut], 8)
					p.frame.sum = digest(checksumAdler, want)
					got := make([]byte, 8)
					var err error
					for from := 0; from < 8 && err == nil; from += step {
						_, err = p.ReadAt(got[from:min(from+step, 8)], int64(from))
					}
					p.Close()
					switch {
					case cut > 0:
						require.ErrorIs(t, err, errFormat)
					case c.damage == "":
						require.NoError(t, err)
						require.Equal(t, want, got)
					default:
						require.ErrorIs(t, err, errFormat)
						require.ErrorContains(t, err, c.damage)
					}
				}
			}
		})
	}
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
	require.ErrorContains(t, err, "does not name a version: give a version and a base")
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

// TestFramesWaitWithoutFiles: a frame that waits for one of an earlier tensor, as many do behind a long one, has no file
// open.
func TestFramesWaitWithoutFiles(t *testing.T) {
	const tensors = 50
	root, err := os.OpenRoot(t.TempDir())
	require.NoError(t, err)
	defer func() { assert.NoError(t, root.Close()) }()
	w := &shardWriter{dir: root, frames: map[int]*sink{}, weights: map[string]int{}}
	for number := tensors - 1; number >= 0; number-- {
		frame := &spool{dir: root}
		_, err := frame.Write(bytes.Repeat([]byte{byte(number)}, 2*spoolBytes))
		require.NoError(t, err)
		s := &sink{number: number, base: delta.Tensor{Name: fmt.Sprint(number)}, frame: frame, sum: sha256.New()}
		require.NoError(t, w.add(s))
		if number > 0 {
			assert.Nil(t, frame.file, number)
		}
	}
	var data bytes.Buffer
	_, err = w.data.WriteTo(&data)
	require.NoError(t, err)
	require.Equal(t, tensors*2*spoolBytes, data.Len())
	for number := range tensors {
		frame := data.Next(2 * spoolBytes)
		assert.Equal(t, bytes.Repeat([]byte{byte(number)}, len(frame)), frame, number)
	}
	require.NoError(t, w.data.Close())
	left, err := os.ReadDir(root.Name())
	require.NoError(t, err)
	assert.Empty(t, left)
}
