package checkpoint

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/delta"
)

// countdown is a context that ends when it has been looked at so often.
type countdown struct {
	context.Context
	left *atomic.Int64
}

var errInterrupted = errors.New("interrupted")

func (c countdown) Err() error {
	if c.left.Add(-1) < 0 {
		return errInterrupted
	}
	return nil
}

// work writes out, which is a file or a folder.
type work struct {
	folder bool
	do     func(ctx context.Context, out string) error
}

// works are all that a checkpoint, or a delta, is written by.
func works(t *testing.T) map[string]work {
	r := rand.New(rand.NewPCG(61, 0))
	root := t.TempDir()
	path := func(name string) string { return filepath.Join(root, name) }
	old := layers(r, 3)
	old = append(old, entry{"bytes", "U8", []int{1 << 18}, make([]byte, 1<<18)}) // more than a spool keeps in memory
	now := step(old)
	for i := range now[3].data {
		now[3].data[i] = byte(r.Uint32())
	}
	put(t, root, "old", encoded("{}", old...))
	put(t, root, "new", encoded("{}", now...))
	parts := func(e []entry) map[string][]entry {
		return map[string][]entry{"a.safetensors": e[:2], "b.safetensors": e[2:]}
	}
	store(t, path("old shards"), parts(old))
	store(t, path("new shards"), parts(now))
	theirs := slime(encodingXor, checksumXXH3).publish(t, root, 2, old, now)
	server := httptest.NewServer(http.FileServer(http.Dir(root)))
	t.Cleanup(server.Close)
	ctx := t.Context()
	_, err := Diff(ctx, path("old"), path("new"), path("delta"), nil)
	require.NoError(t, err)
	_, err = Diff(ctx, path("old shards"), path("new shards"), path("delta of shards"), nil)
	require.NoError(t, err)
	type command func(ctx context.Context, from, second, out string, progress Progress) (delta.Stat, error)
	on := func(f command, from, second string) func(context.Context, string) error {
		return func(ctx context.Context, out string) error {
			share := 0.0
			_, err := f(ctx, path(from), second, out, func(done, total int) {
				next := float64(done) / float64(total)
				assert.Greater(t, next, share)
				share = next
			})
			if err == nil {
				assert.InDelta(t, 1, share, 0, "at the end all is done")
			}
			return err
		}
	}
	export := func(encoding string) command {
		return func(ctx context.Context, from, second, out string, progress Progress) (delta.Stat, error) {
			f := Format{
				Encoding: encoding,
				Version:  "2",
				Base:     "1",
			}
			return Export(ctx, from, second, out, f, progress)
		}
	}
	return map[string]work{
		"diff":                 {false, on(Diff, "old", path("new"))},
		"diff shards":          {false, on(Diff, "old shards", path("new shards"))},
		"apply":                {false, on(Apply, "old", path("delta"))},
		"apply shards":         {true, on(Apply, "old shards", path("delta of shards"))},
		"import":               {false, on(Import, "old", theirs)},
		"import from a server": {false, on(Import, "old", server.URL+"/"+filepath.Base(theirs))},
		"export":               {true, on(export(encodingXor), "old", path("delta"))},
		"export a checkpoint":  {true, on(export(encodingOverwrite), "old", path("new"))},
		"publish": {true, func(ctx context.Context, out string) error {
			return Publish(ctx, out, tensorsOf(old[:3]), tensorsOf(now[:3]), Format{Version: "2", Base: "1"})
		}},
	}
}

// untouched checks that a folder has what it had before work that failed, and no downloads are left.
func untouched(t *testing.T, dir string, before folder, where ...any) {
	require.Equal(t, before, load(t, dir), where...)
	left, err := filepath.Glob(filepath.Join(os.TempDir(), "tutti-delta-*"))
	require.NoError(t, err)
	require.Empty(t, left, where...)
}

// outputs prepares a folder for work: a file is there already, a folder is not.
func outputs(t *testing.T, w work) (dir string, before folder) {
	t.Setenv("TMPDIR", t.TempDir())
	dir = t.TempDir()
	before = folder{}
	if !w.folder {
		before["out"] = []byte("the file before")
		put(t, dir, "out", before["out"])
	}
	return dir, before
}

// TestInterrupted: wherever work ends, the file from before stays, and nothing else.
func TestInterrupted(t *testing.T) {
	for name, w := range works(t) {
		t.Run(name, func(t *testing.T) {
			dir, before := outputs(t, w)
			n := int64(0)
			for ; ; n++ {
				left := new(atomic.Int64)
				left.Store(n)
				err := w.do(countdown{t.Context(), left}, filepath.Join(dir, "out"))
				if err == nil {
					break
				}
				require.ErrorIs(t, err, errInterrupted)
				untouched(t, dir, before, n)
			}
			require.Greater(t, n, int64(3))
		})
	}
}

// TestPullInterrupted: a subscriber is at a version or at the next one, wherever it is interrupted, and goes on.
func TestPullInterrupted(t *testing.T) {
	r := rand.New(rand.NewPCG(62, 0))
	root := t.TempDir()
	versions := [][]entry{layers(r, 3)}
	for i := range 3 {
		versions = append(versions, step(versions[i]))
		slime(encodingXor, checksumXXH3).publish(t, root, i+1, versions[i], versions[i+1])
	}
	reached := map[uint64]bool{}
	for n := int64(0); ; n++ {
		s, err := delta.NewSubscriber(t.Context(), nil, nil, delta.Config{Tensors: tensorsOf(versions[0]), Version: 1})
		require.NoError(t, err)
		left := new(atomic.Int64)
		left.Store(n)
		version, err := Pull(countdown{t.Context(), left}, s, root)
		if err == nil {
			require.EqualValues(t, 4, version)
			break
		}
		require.ErrorIs(t, err, errInterrupted)
		require.NoError(t, s.View(func(v uint64, _ []delta.Tensor) error {
			version = v
			return nil
		}))
		reached[version] = true
		shows(t, s, version, versions[version-1])
		version, err = Pull(t.Context(), s, root)
		require.NoError(t, err)
		require.EqualValues(t, 4, version)
		shows(t, s, 4, versions[3])
	}
	require.Equal(t, map[uint64]bool{1: true, 2: true, 3: true}, reached)
}
