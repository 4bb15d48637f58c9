package checkpoint

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/delta"
)

// shardBytes is the approximate length of a delta's shards.
const shardBytes = 256 << 20

// Export writes the change of a checkpoint in the format that slime, miles, SGLang and modelexpress share, to a folder
// that is empty or does not exist. change is a delta of this module, or the target checkpoint with the same tensors.
// Without versions in f, the name of the folder, such as weight_v000012, gives them.
func Export(ctx context.Context, base, change, out string, f Format, progress Progress) (s delta.Stat, err error) {
	from, err := open(base)
	if err != nil {
		return s, err
	}
	defer from.Close()
	if f, err = f.named(out); err != nil {
		return s, err
	}
	d, progress, err := readChange(ctx, from, change, progress)
	if err != nil {
		return s, err
	}
	err = f.write(ctx, out, from.tensors, d, progress)
	if mismatch := new(delta.VersionError); errors.As(err, &mismatch) {
		err = fmt.Errorf("%s is not the file that %s was made of", base, change)
	}
	return d.Stat(), err
}

// named returns f with the versions from the folder's name, unless it has some.
func (f Format) named(out string) (Format, error) {
	if f.Version != "" && f.Base != "" {
		return f, nil
	}
	var version uint64
	name := filepath.Base(out)
	if _, err := fmt.Sscanf(name, "weight_v%d", &version); err != nil || folderName(version) != name || version == 0 {
		return f, fmt.Errorf("%s does not name a version: "+
			"give a version and a base (--version and --base), or name the folder like weight_v000012", out)
	}
	if f.Version == "" {
		f.Version = fmt.Sprintf("%06d", version)
	}
	if f.Base == "" {
		f.Base = fmt.Sprintf("%06d", version-1)
	}
	return f, nil
}

// readChange returns the delta in a file, or the delta from a checkpoint to the one in it. It also returns the
// progress callback for the remaining work.
func readChange(
	ctx context.Context, from *checkpoint, path string, progress Progress,
) (*delta.Delta, Progress, error) {
	to, err := open(path)
	if err != nil {
		d, readErr := Read(path)
		if readErr != nil && errors.Is(readErr, delta.ErrDelta) && beginsAsDelta(path) {
			return nil, nil, readErr
		}
		if readErr != nil {
			return nil, nil, err
		}
		return d, progress, nil
	}
	defer to.Close()
	first, second := progress.halves()
	d, err := delta.Diff(ctx, from.tensors, to.tensors, first)
	return d, second, err
}

// beginsAsDelta reports whether a file begins like a delta of this module, in any version.
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

// Publish writes the change of tensors in the format that slime, miles, SGLang and modelexpress share, to a folder
// that is empty or does not exist. The target must have the tensors of the base, with other content.
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
			frames:  map[int]*sink{},
			weights: map[string]int{},
		}
		var sinks []*sink
		err := d.Apply(ctx, base, func(t delta.Tensor) (delta.Memory, error) {
			before, ok := known[t.Name]
			if !ok || before.DType != t.DType || !slices.Equal(before.Shape, t.Shape) {
				return nil, fmt.Errorf("the base has no such tensor, and the format has no new ones")
			}
			delete(known, t.Name)
			length, err := size(t)
			s := &sink{
				writer: w,
				number: len(sinks),
				base:   before,
				bytes:  length,
			}
			if length > 0 {
				sinks = append(sinks, s)
			}
			return s, err
		}, progress)
		for _, s := range sinks {
			err = cmp.Or(err, s.Close())
		}
		if err != nil {
			return cmp.Or(err, w.close())
		}
		for name := range known {
			return fmt.Errorf("tensor %q is gone, which the format cannot say", name)
		}
		return w.finish()
	})
}

// sink receives a new tensor, from its beginning to its end, and writes its changes.
type sink struct {
	writer  *shardWriter // of its shard
	number  int          // among the tensors that are not empty
	base    delta.Tensor // the tensor before the change
	bytes   int64        // of the tensor
	changes encoder      // nil: before the first write, or after the last
	frame   *spool       // nil: there is none yet, or nothing has changed
	written int64        // bytes
	old     []byte       // bytes of the base
	sum     hash.Hash    // of all bytes
}

// Sequential makes writers write the tensor in order.
func (s *sink) Sequential() {}

// ReadAt returns an error: the tensor cannot be read.
func (s *sink) ReadAt([]byte, int64) (int, error) { return 0, errors.ErrUnsupported }

// WriteAt implements [io.WriterAt].
func (s *sink) WriteAt(p []byte, offset int64) (int, error) {
	if offset != s.written {
		return 0, fmt.Errorf("byte %d is written after byte %d: %w", offset, s.written, errors.ErrUnsupported)
	}
	if err := s.encode(p); err != nil {
		return 0, err
	}
	s.written += int64(len(p))
	if s.written == s.bytes {
		return len(p), s.finish()
	}
	return len(p), nil
}

// encode encodes the next bytes.
func (s *sink) encode(p []byte) (err error) {
	if s.changes == nil {
		s.changes = s.writer.format.encoder(s.writer.dir, s.bytes)
		if s.sum, err = s.writer.format.hash(); err != nil {
			return err
		}
	}
	_, _ = s.sum.Write(p) // never fails
	s.old = slices.Grow(s.old[:0], len(p))[:len(p)]
	if n, err := s.base.Memory.ReadAt(s.old, s.written); n < len(p) {
		return cmp.Or(err, io.ErrUnexpectedEOF)
	}
	return s.changes.Encode(s.old, p)
}

// finish passes the changes of the tensor to the writer.
func (s *sink) finish() (err error) {
	s.old = nil
	if s.frame, err = s.changes.Finish(); err != nil {
		return err
	}
	err = s.changes.Close()
	s.changes = nil
	return cmp.Or(err, s.writer.add(s))
}

// Close removes temporary files.
func (s *sink) Close() (err error) {
	if s.changes != nil {
		err = s.changes.Close()
		s.changes = nil
	}
	if s.frame != nil {
		err = cmp.Or(err, s.frame.Close())
		s.frame = nil
	}
	return err
}

// shardWriter writes the shards of a delta, with provisional names until their number is known.
type shardWriter struct {
	dir    *os.Root // of the shards
	format Format   // of the frames

	mu      sync.Mutex     // guards the fields below
	next    int            // number of the tensor whose frame is next; guarded by mu
	frames  map[int]*sink  // of later tensors, by number; guarded by mu
	entries []sharedEntry  // of the current shard, in the order of data; guarded by mu
	data    *spool         // their frames; guarded by mu
	shards  int            // shards written so far; guarded by mu
	weights map[string]int // shard of each tensor; guarded by mu
}

// sharedEntry is a tensor of a shard.
type sharedEntry struct {
	name   string // of the tensor
	sum    string // checksum of its bytes
	length int64  // of its frame
}

// add adds the frame of a tensor, in the order of tensors, and then the frames that have waited for it.
func (w *shardWriter) add(s *sink) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frames[s.number] = s
	if s.number != w.next && s.frame != nil {
		if err := s.frame.park(); err != nil {
			return err
		}
	}
	for {
		s, ok := w.frames[w.next]
		if !ok {
			return nil
		}
		delete(w.frames, w.next)
		w.next++
		if s.frame == nil {
			continue
		}
		err := w.append(s)
		if err := cmp.Or(err, s.Close()); err != nil {
			return err
		}
	}
}

// append adds a frame to the current shard. The caller holds mu.
func (w *shardWriter) append(s *sink) error {
	if w.data == nil {
		w.data = &spool{dir: w.dir}
	}
	if _, err := s.frame.WriteTo(w.data); err != nil {
		return err
	}
	w.entries = append(w.entries, sharedEntry{
		name:   s.base.Name,
		sum:    hex.EncodeToString(s.sum.Sum(nil)),
		length: s.frame.length,
	})
	w.weights[s.base.Name] = w.shards
	if w.data.length < shardBytes {
		return nil
	}
	return w.flush()
}

// flush writes a shard. The caller holds mu.
func (w *shardWriter) flush() error {
	metadata := map[string]string{}
	header := map[string]any{"__metadata__": metadata}
	end := int64(0)
	for _, e := range w.entries {
		metadata[e.name] = e.sum
		header[e.name] = map[string]any{
			"dtype":        "U8",
			"shape":        []int64{e.length},
			"data_offsets": []int64{end, end + e.length},
		}
		end += e.length
	}
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	err = atomicfile.ReplaceIn(w.dir, fmt.Sprint(w.shards), func(f *os.File) error {
		if _, err := f.Write(withLength(text)); err != nil {
			return err
		}
		_, err := w.data.WriteTo(f)
		return err
	})
	err = cmp.Or(err, w.data.Close())
	w.entries = nil
	w.data = nil
	w.shards++
	return err
}

// close removes unwritten data.
func (w *shardWriter) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.data == nil {
		return nil
	}
	return w.data.Close()
}

// finish writes the last shard and the index.
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
