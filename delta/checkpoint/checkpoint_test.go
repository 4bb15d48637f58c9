package checkpoint

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/delta"
)

// bytesOf is a file with a header and data of that length.
func bytesOf(header string, data []byte) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), data...)
}

func put(t *testing.T, dir, name string, content []byte) string {
	path := filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(path, content, 0o666))
	return path
}

const header = `{"__metadata__":{"step":"1"},"b":{"dtype":"BF16","shape":[100,10],"data_offsets":[0,2000]},` +
	`"a":{"dtype":"F32","shape":[],"data_offsets":[2000,2004]},"c":{"dtype":"F4","shape":[7,2],"data_offsets":[2004,2011]},"e":{"dtype":"I8","shape":[0],"data_offsets":[2011,2011]}}   `

// TestFiles makes deltas of files with the same header, other metadata, and other tensors.
func TestFiles(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 2011)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	old := bytesOf(header, data)
	moved := append([]byte(nil), data...)
	moved[20]++
	moved[2003] ^= 128
	moved[2010] = 3
	dir := t.TempDir()
	from := put(t, dir, "old", old)
	for name, content := range map[string][]byte{
		"same":     old,
		"moved":    bytesOf(header, moved),
		"metadata": bytesOf(strings.Replace(header, `"1"`, `"2"`, 1), moved),
		"tensors": bytesOf(`{"c":{"dtype":"F4","shape":[7,2],"data_offsets":[2004,2011]},"new":{"dtype":"F16","shape":[1,2],"data_offsets":[2000,2004]},`+
			`"b":{"dtype":"BF16","shape":[10,100],"data_offsets":[0,2000]}}`, moved),
		"empty": bytesOf("{}", nil),
	} {
		to, patch, out := put(t, dir, name, content), filepath.Join(dir, name+".delta"), filepath.Join(dir, name+".out")
		stat, err := Diff(t.Context(), from, to, patch, nil)
		require.NoError(t, err, name)
		again, err := Apply(t.Context(), from, patch, out, nil)
		require.NoError(t, err, name)
		require.Equal(t, stat, again)
		got, err := os.ReadFile(out)
		require.NoError(t, err)
		require.Equal(t, content, got, name)
		info, err := os.Stat(patch)
		require.NoError(t, err)
		assert.Equal(t, uint64(info.Size()), stat.Bytes)
		if name == "moved" {
			assert.Equal(t, delta.Stat{Weights: 1008, Changed: 3, Bytes: stat.Bytes}, stat)
			_, err := Apply(t.Context(), to, patch, out, nil)
			require.ErrorContains(t, err, "moved is not the file that "+patch+" was made of")
		}
	}
	// Instead of the old file.
	_, err := Apply(t.Context(), from, filepath.Join(dir, "moved.delta"), from, nil)
	require.NoError(t, err)
	got, err := os.ReadFile(from)
	require.NoError(t, err)
	require.Equal(t, bytesOf(header, moved), got)
}

// TestRefused: what is no file of weights is an error that says why.
func TestRefused(t *testing.T) {
	dir := t.TempDir()
	good := put(t, dir, "good", bytesOf("{}", nil))
	tensor := func(text string) []byte { return bytesOf(`{"w":{`+text+`}}`, make([]byte, 8)) }
	for text, content := range map[string][]byte{
		"the file has 5 bytes":             []byte("short"),
		"the file has 0 bytes":             {},
		"whose weight_map names no shards": []byte(`{"weight_map":{}}`),
		"nor an index of shards: json":     []byte(`{"weight_map":[]}`),
		"a header of 999 bytes":            append(binary.LittleEndian.AppendUint64(nil, 999), '{'),
		"the header: unexpected":           bytesOf(`{"w`, nil),
		"has 4 bytes":                      tensor(`"dtype":"F32","shape":[2],"data_offsets":[0,4]`),
		"has 8 bytes":                      tensor(`"dtype":"F32","shape":[-2],"data_offsets":[0,8]`),
		"the file at":                      tensor(`"dtype":"F32","shape":[1],"data_offsets":[0,4]`),
		"begins at byte":                   tensor(`"dtype":"F32","shape":[1],"data_offsets":[4,8]`),
		`the header, tensor "w": j`:        tensor(`"dtype":"F32","shape":"x"`),
		"no such file":                     nil,
	} {
		path := filepath.Join(dir, "bad")
		if os.Remove(path); content != nil {
			put(t, dir, "bad", content)
		}
		for _, files := range [][2]string{{path, good}, {good, path}} {
			_, err := Diff(t.Context(), files[0], files[1], filepath.Join(dir, "out"), nil)
			require.ErrorContains(t, err, text)
			require.ErrorContains(t, err, path)
			require.NoFileExists(t, filepath.Join(dir, "out"))
		}
	}
	_, err := Apply(t.Context(), good, good, filepath.Join(dir, "out"), nil)
	require.ErrorContains(t, err, good+": invalid delta")
	_, err = Diff(t.Context(), good, good, filepath.Join(dir, "none", "out"), nil)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestOutputs: an output is looked at before the work, replaces the file that a link leads to, and may be a pipe
// where it is written from its beginning to its end.
func TestOutputs(t *testing.T) {
	dir := t.TempDir()
	old, new := put(t, dir, "old", bytesOf(header, make([]byte, 2011))), put(t, dir, "new", bytesOf(header, append(make([]byte, 2010), 1)))
	path := func(name string) string { return filepath.Join(dir, name) }
	for text, out := range map[string]string{
		"no such file": path("none/out"),
		"is a folder, and a delta is one file: name it, such as " + path("new.delta"):       dir,
		"is a folder, and a delta is one file: name it, such as " + path("none2/new.delta"): path("none2") + "/",
		"old is both read and wri": old,
	} {
		_, err := Diff(t.Context(), old, new, out, func(int, int) { t.Error("work that is for nothing") })
		require.ErrorContains(t, err, text)
	}
	_, err := Diff(t.Context(), old, new, path("delta"), nil)
	require.NoError(t, err)
	want, err := os.ReadFile(path("delta"))
	require.NoError(t, err)

	put(t, dir, "target", []byte("before"))
	if err := os.Symlink("target", path("link")); err != nil {
		t.Skipf("needs links: %v", err)
	}
	_, err = Diff(t.Context(), old, new, path("link"), nil)
	require.NoError(t, err)
	got, err := os.ReadFile(path("target"))
	require.NoError(t, err)
	require.Equal(t, want, got)
	link, err := os.Readlink(path("link"))
	require.NoError(t, err)
	require.Equal(t, "target", link)

	if err := exec.Command("mkfifo", path("pipe")).Run(); err != nil {
		t.Skipf("needs named pipes: %v", err)
	}
	read := func() (got []byte) {
		f, err := os.OpenFile(path("pipe"), os.O_RDONLY, 0)
		if assert.NoError(t, err) {
			got, err = io.ReadAll(f)
			assert.NoError(t, errors.Join(err, f.Close()))
		}
		return got
	}
	var reading sync.WaitGroup
	reading.Go(func() { assert.Equal(t, want, read()) })
	_, err = Diff(t.Context(), old, new, path("pipe"), nil)
	require.NoError(t, err)
	reading.Wait()
	_, err = Apply(t.Context(), old, path("delta"), path("pipe"), nil)
	require.ErrorContains(t, err, "pipe: not a regular file") // at once: nobody reads
	info, err := os.Stat(path("pipe"))
	require.NoError(t, err)
	require.Equal(t, os.ModeNamedPipe, info.Mode().Type())
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 6, "old, new, delta, target, link and pipe")
}

// TestAnotherOld: a delta is for one file. Files with the same tensors and another header, or in another order, are
// refused, and nothing is written.
func TestAnotherOld(t *testing.T) {
	const first = `"a":{"dtype":"U8","shape":[4],"data_offsets":[`
	const second = `"b":{"dtype":"U8","shape":[4],"data_offsets":[`
	one := bytesOf(`{"__metadata__":{"step":"1"},`+first+`0,4]},`+second+`4,8]}}`, []byte("aaaabbbb"))
	two := bytesOf(`{"__metadata__":{"step":"1"},`+first+`0,4]},`+second+`4,8]}}`, []byte("aaxabbbb"))
	dir := t.TempDir()
	from, to := put(t, dir, "from", one), put(t, dir, "to", two)
	patch, out := filepath.Join(dir, "delta"), filepath.Join(dir, "out")
	_, err := Diff(t.Context(), from, to, patch, nil)
	require.NoError(t, err)
	for name, content := range map[string][]byte{
		"metadata":  bytesOf(`{"__metadata__":{"step":"2"},`+first+`0,4]},`+second+`4,8]}}`, []byte("aaaabbbb")),
		"without":   bytesOf(`{`+first+`0,4]},`+second+`4,8]}}`, []byte("aaaabbbb")),
		"padded":    bytesOf(`{"__metadata__":{"step":"1"},`+first+`0,4]},`+second+`4,8]}} `, []byte("aaaabbbb")),
		"keys":      bytesOf(`{"__metadata__":{"step":"1"},`+second+`4,8]},`+first+`0,4]}}`, []byte("aaaabbbb")),
		"reordered": bytesOf(`{"__metadata__":{"step":"1"},`+first+`4,8]},`+second+`0,4]}}`, []byte("bbbbaaaa")),
		"data":      bytesOf(`{"__metadata__":{"step":"1"},`+first+`0,4]},`+second+`4,8]}}`, []byte("aaaabbbc")),
		"target":    two,
	} {
		other := put(t, dir, "other", content)
		_, err := Apply(t.Context(), other, patch, out, nil)
		require.ErrorContains(t, err, other+" is not the file that "+patch+" was made of", name)
		require.NoFileExists(t, out)
	}
	_, err = Apply(t.Context(), from, patch, out, nil)
	require.NoError(t, err)
	got, err := os.ReadFile(out)
	require.NoError(t, err)
	require.Equal(t, two, got)
}

// TestMetadata: what changes in a header travels, not the header.
func TestMetadata(t *testing.T) {
	var text strings.Builder
	text.WriteString(`{"__metadata__":{"step":"1000"}`)
	for i := range 1000 {
		fmt.Fprintf(&text, `,"layer.%d.weight":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}`, i)
	}
	text.WriteString("}")
	dir := t.TempDir()
	from := put(t, dir, "from", bytesOf(text.String(), nil))
	to := put(t, dir, "to", bytesOf(strings.Replace(text.String(), "1000", "1010", 1), nil))
	s, err := Diff(t.Context(), from, to, filepath.Join(dir, "delta"), nil)
	require.NoError(t, err)
	assert.Less(t, s.Bytes, uint64(64))
	_, err = Apply(t.Context(), from, filepath.Join(dir, "delta"), filepath.Join(dir, "out"), nil)
	require.NoError(t, err)
	want, err := os.ReadFile(to)
	require.NoError(t, err)
	got, err := os.ReadFile(filepath.Join(dir, "out"))
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// TestInputsStay: inputs and other files with names near the output's are as before, whatever they are.
func TestInputsStay(t *testing.T) {
	for _, suffix := range []string{".tmp", ".new", ".part", "~"} {
		dir := t.TempDir()
		data := make([]byte, 2011)
		old := bytesOf(header, data)
		data[3]++
		target := bytesOf(header, data)
		path := func(name string) string { return filepath.Join(dir, name) }
		from, to := put(t, dir, "a"+suffix, old), put(t, dir, "b", target)
		stranger := put(t, dir, "c"+suffix, []byte("precious"))
		_, err := Diff(t.Context(), from, to, path("a"), nil)
		require.NoError(t, err)
		_, err = Diff(t.Context(), from, to, path("c"), nil)
		require.NoError(t, err)
		patch, err := os.ReadFile(path("a"))
		require.NoError(t, err)
		put(t, dir, "d"+suffix, patch)
		_, err = Apply(t.Context(), from, path("d"+suffix), path("d"), nil)
		require.NoError(t, err)
		require.NoError(t, os.Rename(path("d"), path("made")))
		require.NoError(t, os.Rename(from, path("e"+suffix)))
		_, err = Apply(t.Context(), path("e"+suffix), path("a"), path("e"), nil)
		require.NoError(t, err)
		for name, want := range map[string][]byte{
			"b": target, "made": target, "e": target, "e" + suffix: old, "d" + suffix: patch, "a": patch, "c": patch,
		} {
			got, err := os.ReadFile(path(name))
			require.NoError(t, err)
			require.Equal(t, want, got, "%s %s", name, suffix)
		}
		got, err := os.ReadFile(stranger)
		require.NoError(t, err)
		require.Equal(t, "precious", string(got))
		files, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Len(t, files, 8)
	}
}

// TestTwoWriters of one output: both succeed, and it is the file of one of them.
func TestTwoWriters(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "out")
	data := make([]byte, 2011)
	from := put(t, dir, "from", bytesOf(header, data))
	var targets [2][]byte
	var patches [2]string
	for i := range targets {
		for k := range data {
			data[k] = byte(i + k%100)
		}
		targets[i] = bytesOf(header, data)
		patches[i] = filepath.Join(dir, "delta"+string(rune('0'+i)))
		_, err := Diff(t.Context(), from, put(t, dir, "to", targets[i]), patches[i], nil)
		require.NoError(t, err)
	}
	for range 50 {
		var group, both sync.WaitGroup
		both.Add(len(patches))
		for _, patch := range patches {
			var once sync.Once
			group.Go(func() {
				_, err := Apply(t.Context(), from, patch, out, func(int, int) {
					once.Do(func() { both.Done(); both.Wait() }) // each has opened its output
				})
				assert.NoError(t, err)
			})
		}
		group.Wait()
		got, err := os.ReadFile(out)
		require.NoError(t, err)
		require.Contains(t, targets[:], got)
	}
}

// TestStreams: inputs that cannot be read twice, and outputs that cannot be written in any order.
func TestStreams(t *testing.T) {
	dir := t.TempDir()
	old, patch := put(t, dir, "old", bytesOf(header, make([]byte, 2011))), filepath.Join(dir, "delta")
	_, err := Diff(t.Context(), old, old, patch, nil)
	require.NoError(t, err)
	for path, text := range map[string]string{
		os.DevNull: " is not a regular file",
		dir:        " has neither model.safetensors.index.json nor model.safetensors",
	} {
		_, err := Diff(t.Context(), path, old, filepath.Join(dir, "out"), nil)
		require.ErrorContains(t, err, path+text)
		_, err = Apply(t.Context(), path, patch, filepath.Join(dir, "out"), nil)
		require.ErrorContains(t, err, path+text)
	}
	log, err := os.OpenFile(put(t, dir, "log", []byte("before")), os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer log.Close()
	stdout := os.Stdout
	defer func() { os.Stdout = stdout }()
	os.Stdout = log
	_, err = Diff(t.Context(), old, old, Stdout, nil)
	require.NoError(t, err)
	_, err = Apply(t.Context(), old, patch, Stdout, nil)
	require.ErrorContains(t, err, "not the standard output")
	want, err := os.ReadFile(patch)
	require.NoError(t, err)
	got, err := os.ReadFile(log.Name())
	require.NoError(t, err)
	require.Equal(t, "before"+string(want), string(got))

	os.Stdout, err = os.OpenFile(old, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer os.Stdout.Close()
	_, err = Diff(t.Context(), old, patch, Stdout, nil)
	require.Error(t, err)
	_, err = Diff(t.Context(), old, old, Stdout, nil)
	require.ErrorContains(t, err, "old is both read and written")
}

// FuzzTensors: any text is no header, or one of tensors that lie one after the other.
func FuzzTensors(f *testing.F) {
	f.Add(header)
	f.Add(`{"w":{"dtype":"?","shape":[],"data_offsets":[0,9223372036854775807]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		head := bytesOf(text, nil)
		all, err := tensors(head, nil, -1)
		if err != nil {
			return
		}
		at := int64(len(head))
		for _, x := range all {
			s := x.Memory.(section)
			require.Equal(t, at, s.offset)
			require.GreaterOrEqual(t, s.bytes, int64(0))
			at += s.bytes
		}
	})
}
