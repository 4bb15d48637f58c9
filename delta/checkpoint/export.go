package checkpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/delta"
)

// shardBytes is how long the shards of a delta are, about.
const shardBytes = 256 << 20

// Export writes how a checkpoint changes in the format that slime, miles, SGLang and modelexpress share, into a folder
// that is empty or not there yet. change is a delta of this module, or the target checkpoint with the same tensors.
// Without versions in f, they are those that the name of the folder, such as weight_v000012, means.
func Export(ctx context.Context, base, change, out string, f Format, progress Progress) (s delta.Stat, err error) {
	from, err := open(base)
	if err != nil {
		return s, err
	}
	defer from.Close()
	if f, err = f.named(out); err != nil {
		return s, err
	}
	d, err := readChange(ctx, from, change)
	if err != nil {
		return s, err
	}
	err = f.write(ctx, out, from.tensors, d, progress)
	if mismatch := new(delta.VersionError); errors.As(err, &mismatch) {
		err = fmt.Errorf("%s is not the file that %s was made of", base, change)
	}
	return d.Stat(), err
}

// named returns f with the versions that the name of a folder means, where it has none.
func (f Format) named(out string) (Format, error) {
	if f.Version != "" && f.Base != "" {
		return f, nil
	}
	var version uint64
	name := filepath.Base(out)
	if _, err := fmt.Sscanf(name, "weight_v%d", &version); err != nil || folderName(version) != name || version == 0 {
		return f, fmt.Errorf("no version: neither is one given, nor is %s named as weight_v000001 is", out)
	}
	if f.Version == "" {
		f.Version = fmt.Sprintf("%06d", version)
	}
	if f.Base == "" {
		f.Base = fmt.Sprintf("%06d", version-1)
	}
	return f, nil
}

// readChange returns the delta in a file, or from a checkpoint to the one in it.
func readChange(ctx context.Context, from *checkpoint, path string) (*delta.Delta, error) {
	to, err := open(path)
	if err != nil {
		d, readErr := Read(path)
		if readErr != nil && errors.Is(readErr, delta.ErrDelta) && beginsAsDelta(path) {
			return nil, readErr
		}
		if readErr != nil {
			return nil, err
		}
		return d, nil
	}
	defer to.Close()
	return delta.Diff(ctx, from.tensors, to.tensors, nil)
}

// beginsAsDelta reports whether a file begins as deltas of this module do, in any version.
func beginsAsDelta(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	head := make([]byte, 3)
	_, err = io.ReadFull(f, head)
	return err == nil && string(head) == "tdl"
}

// Publish writes how tensors change in the format that slime, miles, SGLang and modelexpress share, into a folder that
// is empty or not there yet. The target has the tensors of the base, with other content.
func Publish(ctx context.Context, dir string, base, target []delta.Tensor, f Format) error {
	f, err := f.named(dir)
	if err != nil {
		return err
	}
	d, err := delta.Diff(ctx, base, target, nil)
	if err != nil {
		return err
	}
	return f.write(ctx, dir, base, d, nil)
}

// write writes a delta into a folder.
func (f Format) write(ctx context.Context, out string, base []delta.Tensor, d *delta.Delta, progress Progress) error {
	f = f.withDefaults()
	if err := f.check(); err != nil {
		return err
	}
	known := map[string]delta.Tensor{}
	for _, t := range base {
		if bytes.IndexByte([]byte(t.Name), 0) >= 0 {
			return fmt.Errorf("tensor %q is in more than one shard, which the format cannot say", t.Name)
		}
		known[t.Name] = t
	}
	return writeFolder(out, func(dir *os.Root) error {
		w := &shardWriter{
			dir:     dir,
			format:  f,
			weights: map[string]int{},
		}
		err := d.Apply(ctx, base, func(t delta.Tensor) (delta.Memory, error) {
			before, ok := known[t.Name]
			if !ok || before.DType != t.DType || !slices.Equal(before.Shape, t.Shape) {
				return nil, fmt.Errorf("the base has no such tensor, and the format has no new ones")
			}
			delete(known, t.Name)
			length, err := size(t)
			return &sink{
				writer: w,
				base:   before,
				bytes:  length,
			}, err
		}, progress)
		if err != nil {
			return err
		}
		for name := range known {
			return fmt.Errorf("tensor %q is gone, which the format cannot say", name)
		}
		return w.finish()
	})
}

// sink takes a tensor that is made, and writes how it has changed.
type sink struct {
	writer *shardWriter
	base   delta.Tensor
	bytes  int64

	mu      sync.Mutex
	data    []byte // guarded by mu
	written int64  // of bytes; guarded by mu
}

// ReadAt refuses to read.
func (s *sink) ReadAt([]byte, int64) (int, error) { return 0, errors.ErrUnsupported }

// WriteAt implements [io.WriterAt].
func (s *sink) WriteAt(p []byte, offset int64) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.data == nil {
		s.data = make([]byte, s.bytes)
	}
	copy(s.data[offset:], p)
	s.written += int64(len(p))
	if s.written < s.bytes {
		return len(p), nil
	}
	data := s.data
	s.data = nil
	return len(p), s.encode(data)
}

// encode hands how the tensor has changed to the writer.
func (s *sink) encode(data []byte) error {
	old := make([]byte, s.bytes)
	if _, err := s.base.Memory.ReadAt(old, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	diff, err := s.writer.format.encode(old, data)
	if err != nil || diff == nil {
		return err
	}
	compressed, err := compress(diff)
	if err != nil {
		return err
	}
	sum, err := s.writer.format.sum(data)
	if err != nil {
		return err
	}
	return s.writer.add(s.base.Name, sum, compressed)
}

// shardWriter writes the shards of a delta, under numbers until it is known how many there are.
type shardWriter struct {
	dir    *os.Root
	format Format

	mu      sync.Mutex
	entries map[string]*sharedEntry // of the shard that is next; guarded by mu
	pending int                     // bytes of it; guarded by mu
	shards  int                     // that were written; guarded by mu
	weights map[string]int          // by tensor, its shard; guarded by mu
}

// sharedEntry is a tensor of a shard.
type sharedEntry struct {
	sum   string
	frame []byte
}

// add adds a tensor to the shard that is next.
func (w *shardWriter) add(name, sum string, frame []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.entries == nil {
		w.entries = map[string]*sharedEntry{}
	}
	w.entries[name] = &sharedEntry{sum, frame}
	w.weights[name] = w.shards
	w.pending += len(frame)
	if w.pending < shardBytes {
		return nil
	}
	return w.flush()
}

// flush writes a shard. It is called with mu held.
func (w *shardWriter) flush() error {
	names := slices.Sorted(maps.Keys(w.entries))
	metadata := map[string]string{}
	header := map[string]any{"__metadata__": metadata}
	end := 0
	for _, name := range names {
		e := w.entries[name]
		metadata[name] = e.sum
		header[name] = map[string]any{
			"dtype":        "U8",
			"shape":        []int{len(e.frame)},
			"data_offsets": []int{end, end + len(e.frame)},
		}
		end += len(e.frame)
	}
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	err = atomicfile.ReplaceIn(w.dir, fmt.Sprint(w.shards), func(f *os.File) error {
		if _, err := f.Write(withLength(text)); err != nil {
			return err
		}
		for _, name := range names {
			if _, err := f.Write(w.entries[name].frame); err != nil {
				return err
			}
		}
		return nil
	})
	w.entries = nil
	w.pending = 0
	w.shards++
	return err
}

// finish writes what is left, and the index.
func (w *shardWriter) finish() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.entries) > 0 {
		if err := w.flush(); err != nil {
			return err
		}
	}
	name := func(shard int) string {
		return fmt.Sprintf("model-%05d-of-%05d.safetensors", shard, w.shards)
	}
	for shard := range w.shards {
		if err := w.dir.Rename(fmt.Sprint(shard), name(shard)); err != nil {
			return err
		}
	}
	weights := map[string]string{}
	for tensor, shard := range w.weights {
		weights[tensor] = name(shard)
	}
	index, err := w.format.index(weights)
	if err != nil {
		return err
	}
	return atomicfile.ReplaceIn(w.dir, indexName, func(f *os.File) error {
		_, err := f.Write(index)
		return err
	})
}
