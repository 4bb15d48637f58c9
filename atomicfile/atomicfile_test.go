package atomicfile_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/atomicfile"
)

func text(s string) func(w io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, s)
		return err
	}
}

func create(t *testing.T, dir, name, content string, mode fs.FileMode) string {
	path := filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(path, []byte(content), mode))
	require.NoError(t, os.Chmod(path, mode))
	return path
}

func link(t *testing.T, to, path string) {
	if err := os.Symlink(to, path); err != nil {
		t.Skipf("needs links: %v", err)
	}
}

func content(t *testing.T, path string) string {
	t.Helper()
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(got)
}

// names are what is in a folder.
func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// TestPermissions: a file that is replaced keeps them, and a new file has the usual ones.
func TestPermissions(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("needs permissions")
	}
	dir := t.TempDir()
	for _, mode := range []fs.FileMode{0o600, 0o640, 0o444, 0o666, 0o755} {
		path := create(t, dir, "file", "before", mode)
		require.NoError(t, atomicfile.Write(path, func(w io.Writer) error {
			for _, name := range names(t, dir) { // nobody may read meanwhile what nobody may read afterwards
				info, err := os.Stat(filepath.Join(dir, name))
				require.NoError(t, err)
				assert.Equal(t, mode, info.Mode().Perm(), name)
			}
			return text("after")(w)
		}))
		info, err := os.Stat(path)
		require.NoError(t, err)
		assert.Equal(t, mode, info.Mode())
		assert.Equal(t, "after", content(t, path))
		require.NoError(t, os.Remove(path))
	}
	f, err := os.Create(filepath.Join(dir, "usual"))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	want, err := os.Stat(f.Name())
	require.NoError(t, err)
	require.NoError(t, atomicfile.Write(filepath.Join(dir, "made"), text("")))
	got, err := os.Stat(filepath.Join(dir, "made"))
	require.NoError(t, err)
	assert.Equal(t, want.Mode(), got.Mode())
}

// TestStrangers: no file but the target changes, whatever names there are.
func TestStrangers(t *testing.T) {
	dir := t.TempDir()
	others := []string{"file.tmp", "file.new", ".file", ".file.tmp", "file~"}
	for _, name := range others {
		create(t, dir, name, "of a stranger", 0o666)
	}
	path := filepath.Join(dir, "file")
	for range 2 {
		require.NoError(t, atomicfile.Write(path, text("mine")))
		require.NoError(t, atomicfile.Replace(path, func(f *os.File) error { return text("mine")(f) }))
	}
	for _, name := range others {
		assert.Equal(t, "of a stranger", content(t, filepath.Join(dir, name)))
	}
	assert.Len(t, names(t, dir), len(others)+1)
}

// TestFailures: after an error or a panic, the file from before is there, and no other.
func TestFailures(t *testing.T) {
	dir := t.TempDir()
	path := create(t, dir, "file", "before", 0o666)
	broken := errors.New("broken")
	half := func(w io.Writer) error { return errors.Join(text("half")(w), broken) }
	require.ErrorIs(t, atomicfile.Write(path, half), broken)
	require.ErrorIs(t, atomicfile.Write(filepath.Join(dir, "none"), half), broken)
	require.PanicsWithValue(t, "broken", func() {
		_ = atomicfile.Write(path, func(w io.Writer) error {
			_ = text("half")(w)
			panic("broken")
		})
	})
	unreached := func(io.Writer) error { t.Error("written for nothing"); return nil }
	require.ErrorIs(t, atomicfile.Write(filepath.Join(dir, "folder", "file"), unreached), fs.ErrNotExist)
	for _, folder := range []string{dir, dir + "/", dir + "/.", "..", ".", "/"} {
		require.ErrorContains(t, atomicfile.Write(folder, unreached), "is a directory", folder)
	}
	require.ErrorContains(t, atomicfile.Write(filepath.Join(path, "file"), unreached), "not a directory")
	require.Error(t, atomicfile.Write(filepath.Join(dir, strings.Repeat("x", 300)), text("")))
	require.Error(t, atomicfile.Write("", unreached))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "full"), 0o777))
	// A folder takes the name while the file is written.
	taken := filepath.Join(dir, "taken")
	require.Error(t, atomicfile.Write(taken, func(io.Writer) error {
		return os.MkdirAll(filepath.Join(taken, "x"), 0o777)
	}))
	assert.Equal(t, []string{"file", "full", "taken"}, names(t, dir))
	assert.Equal(t, "before", content(t, path))
}

// TestNames: as long as the file system allows, and of bytes that are no text.
func TestNames(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{strings.Repeat("x", 255), strings.Repeat("ü", 127), " ", "-", "..."} {
		require.NoError(t, atomicfile.Write(filepath.Join(dir, name), text(name)))
		require.Equal(t, name, content(t, filepath.Join(dir, name)))
	}
	assert.Len(t, names(t, dir), 5)
}

// TestLinks: what a link leads to is written, whether it is there or not. ReplaceIn replaces the link itself.
func TestLinks(t *testing.T) {
	dir := t.TempDir()
	at := func(name ...string) string { return filepath.Join(append([]string{dir}, name...)...) }
	require.NoError(t, os.MkdirAll(at("real", "inner"), 0o777))
	create(t, dir, "real/target", "before", 0o600)
	link(t, "real/inner", at("folder"))
	link(t, "folder/../target", at("link")) // which is real/target
	link(t, "link", at("second"))
	link(t, at("real", "made"), at("dangling"))
	link(t, "loop", at("loop"))
	link(t, "none/x", at("lost"))
	for _, c := range []struct{ path, target string }{
		{at("link"), at("real", "target")},
		{at("second"), at("real", "target")},
		{at("dangling"), at("real", "made")},
		{at("folder", "inside"), at("real", "inner", "inside")},
		{at("folder") + "/../beside", at("real", "beside")},
	} {
		before, _ := os.Readlink(c.path)
		require.NoError(t, atomicfile.Write(c.path, text(c.path)), c.path)
		after, _ := os.Readlink(c.path)
		assert.Equal(t, before, after)
		assert.Equal(t, c.path, content(t, c.target))
		info, err := os.Lstat(c.target)
		require.NoError(t, err)
		assert.True(t, info.Mode().IsRegular())
	}
	require.Error(t, atomicfile.Write(at("loop"), text("")))
	require.ErrorIs(t, atomicfile.Write(at("lost"), text("")), fs.ErrNotExist)
	assert.ElementsMatch(t, []string{"beside", "inner", "made", "target"}, names(t, at("real")))

	root, err := os.OpenRoot(dir)
	require.NoError(t, err)
	defer root.Close()
	for _, name := range []string{"link", "dangling", "loop"} {
		require.NoError(t, atomicfile.ReplaceIn(root, name, func(f *os.File) error { return text("itself")(f) }))
		info, err := os.Lstat(at(name))
		require.NoError(t, err)
		assert.True(t, info.Mode().IsRegular())
		assert.Equal(t, "itself", content(t, at(name)))
	}
	assert.Equal(t, at("second"), content(t, at("real", "target")))
	for _, name := range []string{"real/x", "../x", "folder/x", "/x", "real", "."} {
		require.Error(t, atomicfile.ReplaceIn(root, name, func(f *os.File) error { return text("x")(f) }), name)
	}
}

// TestHardLinks: another name keeps the content.
func TestHardLinks(t *testing.T) {
	dir := t.TempDir()
	path := create(t, dir, "file", "before", 0o666)
	require.NoError(t, os.Link(path, filepath.Join(dir, "other")))
	require.NoError(t, atomicfile.Write(path, text("after")))
	assert.Equal(t, "after", content(t, path))
	assert.Equal(t, "before", content(t, filepath.Join(dir, "other")))
}

// TestWriters: of many at once, each succeeds, and one is the last, whole.
func TestWriters(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	const writers, pieces = 16, 50
	var turn sync.WaitGroup // which lets all write at once
	turn.Add(writers)
	var group sync.WaitGroup
	for i := range writers {
		group.Go(func() {
			piece := bytes.Repeat([]byte{byte('a' + i)}, 100+i)
			assert.NoError(t, atomicfile.Write(path, func(w io.Writer) error {
				turn.Done()
				turn.Wait()
				for range pieces {
					if _, err := w.Write(piece); err != nil {
						return err
					}
				}
				return nil
			}))
		})
	}
	group.Wait()
	got := content(t, path)
	i := int(got[0] - 'a')
	assert.Equal(t, strings.Repeat(string(got[0]), pieces*(100+i)), got)
	assert.Equal(t, []string{"file"}, names(t, dir))
}

// TestReplace: content in any order, which is read again; and again over itself while it is open.
func TestReplace(t *testing.T) {
	path := create(t, t.TempDir(), "file", "before", 0o666)
	old, err := os.Open(path)
	require.NoError(t, err)
	defer old.Close()
	require.NoError(t, atomicfile.Replace(path, func(f *os.File) error {
		_, err := f.WriteAt([]byte("end"), 3)
		require.NoError(t, err)
		_, err = f.WriteAt([]byte("the"), 0)
		require.NoError(t, err)
		got := make([]byte, 6)
		_, err = f.ReadAt(got, 0)
		require.Equal(t, "theend", string(got))
		return err
	}))
	assert.Equal(t, "theend", content(t, path))
	if runtime.GOOS != "windows" {
		got, err := io.ReadAll(old)
		require.NoError(t, err)
		assert.Equal(t, "before", string(got))
	}
}

func ExampleWrite() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "checkpoint")
	if err := atomicfile.Write(path, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, "epoch 3")
		return err
	}); err != nil {
		panic(err)
	}
	saved, err := os.ReadFile(path)
	fmt.Print(string(saved), err)
	// Output:
	// epoch 3
	// <nil>
}
