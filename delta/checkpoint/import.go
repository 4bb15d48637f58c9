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
	"io/fs"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/dtype"
)

// location is the source of the files of a delta in the shared format.
type location struct {
	folder string   // of the files
	url    *url.URL // nil: files are in folder; otherwise folder holds downloads
}

// locate returns the location of a path or a URL.
func locate(source string) (*location, error) {
	if !strings.HasPrefix(source, "http://") && !strings.HasPrefix(source, "https://") {
		return &location{folder: source}, nil
	}
	u, err := url.Parse(source)
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "tutti-delta-")
	return &location{folder: folder, url: u}, err
}

// child returns the location of a folder in l, with the same downloads.
func (l *location) child(name string) *location {
	if l.url == nil {
		return &location{folder: filepath.Join(l.folder, name)}
	}
	return &location{
		folder: l.folder,
		url:    l.url.JoinPath(name),
	}
}

// Close removes what was downloaded.
func (l *location) Close() error {
	if l.url == nil {
		return nil
	}
	return os.RemoveAll(l.folder)
}

// open opens a file, and downloads it first if necessary. A missing file is an [fs.ErrNotExist].
func (l *location) open(ctx context.Context, name string) (*os.File, error) {
	if l.url == nil {
		return openRegular(filepath.Join(l.folder, name))
	}
	address := l.url.JoinPath(name).String()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return nil, fmt.Errorf("%s: %w", address, fs.ErrNotExist)
	default:
		return nil, fmt.Errorf("%s: %s", address, response.Status)
	}
	f, err := os.CreateTemp(l.folder, "")
	if err != nil {
		return nil, err
	}
	if _, err := io.Copy(f, response.Body); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", address, err), f.Close())
	}
	return f, nil
}

// read reads a file of at most the length of an index.
func (l *location) read(ctx context.Context, name string) ([]byte, error) {
	f, err := l.open(ctx, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > maxHeader {
		return nil, fmt.Errorf("an index of %d bytes, at most %d are read", info.Size(), maxHeader)
	}
	data := make([]byte, info.Size())
	_, err = f.ReadAt(data, 0)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return data, err
}

// shared is a delta in the shared format.
type shared struct {
	format Format           // of the frames
	files  []*os.File       // of the shards
	frames map[string]frame // by tensor
}

// frame is the location of a tensor's frame.
type frame struct {
	section
	sum string // checksum of the resulting tensor
}

// openShared opens the delta at a location, and checks that it is complete.
func openShared(ctx context.Context, l *location) (*shared, error) {
	index, err := l.read(ctx, indexName)
	if err != nil {
		return nil, err
	}
	format, weights, err := parseFormat(index)
	if err != nil {
		return nil, err
	}
	s := &shared{format: format, frames: map[string]frame{}}
	shards := map[string][]string{}
	for tensor, shard := range weights {
		shards[shard] = append(shards[shard], tensor)
	}
	for _, name := range slices.Sorted(maps.Keys(shards)) {
		if err := s.openShard(ctx, l, name, shards[name]); err != nil {
			return nil, errors.Join(fmt.Errorf("shard %s: %w", name, err), s.Close())
		}
	}
	return s, nil
}

// openShard finds the frames of these tensors in a shard.
func (s *shared) openShard(ctx context.Context, l *location, name string, names []string) error {
	f, err := l.open(ctx, name)
	if err != nil {
		return err
	}
	s.files = append(s.files, f)
	header, all, err := readHeader(f)
	if err != nil {
		return fmt.Errorf("%w: %w", errFormat, err)
	}
	var content struct {
		Metadata map[string]string `json:"__metadata__"`
	}
	if err := json.Unmarshal(header[headerLength:], &content); err != nil {
		return fmt.Errorf("%w: the header: %w", errFormat, err)
	}
	found := map[string]delta.Tensor{}
	for _, t := range all {
		found[t.Name] = t
	}
	for _, tensor := range names {
		t, ok := found[tensor]
		sum := content.Metadata[tensor]
		if !ok || t.DType != dtype.U8 || sum == "" {
			return fmt.Errorf("%w: no bytes or no checksum of tensor %q", errFormat, tensor)
		}
		s.frames[tensor] = frame{t.Memory.(section), sum}
	}
	return nil
}

// Close closes the shards.
func (s *shared) Close() (err error) {
	for _, f := range s.files {
		err = cmp.Or(err, f.Close())
	}
	return err
}

// patch returns the tensors that result from applying the delta to its base. They are decoded as they are read.
func (s *shared) patch(base []delta.Tensor) ([]delta.Tensor, error) {
	target := slices.Clone(base)
	used := 0
	for i := range target {
		t := &target[i]
		frame, ok := s.frames[t.Name]
		if !ok {
			continue
		}
		used++
		bytes, err := size(*t)
		if err != nil {
			return nil, err
		}
		t.Memory = &patched{
			format: s.format,
			frame:  frame,
			base:   t.Memory,
			bytes:  bytes,
		}
	}
	if used == len(s.frames) {
		return target, nil
	}
	known := map[string]bool{}
	for _, t := range base {
		known[t.Name] = true
	}
	for name := range s.frames {
		if !known[name] {
			return nil, fmt.Errorf("%w: it changes tensor %q, which the base does not have", errFormat, name)
		}
	}
	return target, nil
}

// patched is a tensor that results from applying a delta in the shared format. It is read from beginning to end.
type patched struct {
	format Format       // of the frame
	frame  frame        // of the tensor
	base   delta.Memory // the tensor before the change
	bytes  int64        // of the tensor

	changes decoder   // nil: before the first read, or after the last
	read    int64     // bytes
	sum     hash.Hash // of all bytes
}

// Sequential makes readers read the tensor in order.
func (p *patched) Sequential() {}

// ReadAt implements [io.ReaderAt].
func (p *patched) ReadAt(b []byte, offset int64) (int, error) {
	if offset != p.read || int64(len(b)) > p.bytes-p.read {
		return 0, fmt.Errorf("byte %d is read after byte %d: %w", offset, p.read, errors.ErrUnsupported)
	}
	if err := p.next(b); err != nil {
		return 0, err
	}
	p.read += int64(len(b))
	if p.read < p.bytes {
		return len(b), nil
	}
	if err := p.finish(); err != nil {
		return 0, err
	}
	return len(b), nil
}

// next produces the next bytes.
func (p *patched) next(b []byte) (err error) {
	if p.changes == nil {
		p.changes, err = p.format.decoder(p.frame, p.frame.bytes, p.bytes)
		if err != nil {
			return err
		}
		if p.sum, err = p.format.hash(); err != nil {
			return err
		}
	}
	if n, err := p.base.ReadAt(b, p.read); n < len(b) {
		return cmp.Or(err, io.ErrUnexpectedEOF)
	}
	if err := p.changes.Decode(b); err != nil {
		return err
	}
	_, _ = p.sum.Write(b) // never fails
	return nil
}

// finish checks that all bytes were produced, and their checksum.
func (p *patched) finish() error {
	if err := p.changes.Finish(); err != nil {
		return err
	}
	p.Close()
	if sum := hex.EncodeToString(p.sum.Sum(nil)); !strings.EqualFold(sum, p.frame.sum) {
		return fmt.Errorf("%w: its %s is %s, want %s: the delta is damaged, or for another base",
			errFormat, p.format.Checksum, sum, p.frame.sum)
	}
	return nil
}

// Close frees the decoder.
func (p *patched) Close() {
	if p.changes != nil {
		p.changes.Close()
		p.changes = nil
	}
}

// WriteAt returns an error: the tensor cannot be written.
func (p *patched) WriteAt([]byte, int64) (int, error) {
	return 0, errors.ErrUnsupported
}

// Import reads a delta in the format that slime, miles, SGLang and modelexpress share, and writes the same change of
// the checkpoint as a delta of this module. The source is the folder, or the HTTP URL, of its index. Import refuses a
// delta for another base, with missing shards, or with a wrong checksum.
func Import(ctx context.Context, base, source, out string, progress Progress) (s delta.Stat, err error) {
	from, err := open(base)
	if err != nil {
		return s, err
	}
	defer from.Close()
	l, err := locate(source)
	if err != nil {
		return s, err
	}
	defer l.Close()
	changes, err := openShared(ctx, l)
	if err != nil {
		return s, fmt.Errorf("%s: %w", source, err)
	}
	defer changes.Close()
	if err := cmp.Or(checkOutput(out, from.paths()...), checkDelta(out, source)); err != nil {
		return s, err
	}
	err = write(out, func(w io.Writer) error {
		d, err := changes.diff(ctx, from.tensors, progress)
		if err != nil {
			return fmt.Errorf("%s: %w", source, err)
		}
		if err := d.SetText(from.text(), from.text()); err != nil {
			return err
		}
		s = d.Stat()
		_, err = d.WriteTo(w)
		return err
	})
	return s, err
}

// diff returns the delta from tensors to the result of applying the delta in the shared format.
func (s *shared) diff(ctx context.Context, base []delta.Tensor, progress Progress) (*delta.Delta, error) {
	target, err := s.patch(base)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, t := range target {
			if p, ok := t.Memory.(*patched); ok {
				p.Close()
			}
		}
	}()
	return delta.Diff(ctx, base, target, progress)
}

// Pull updates a subscriber to the latest version in a folder, or at an HTTP URL, of deltas in the format that slime,
// miles and SGLang share. It returns the version. The deltas are in folders weight_v000001, weight_v000002 and so on.
// Versions of subscribers begin at 1, so their version 0, the checkpoint with which training began, is version 1 here.
// After an error the subscriber is at the last version that it has reached. A folder for another base is a
// [delta.VersionError].
func Pull(ctx context.Context, s *delta.Subscriber, source string) (version uint64, err error) {
	l, err := locate(source)
	if err != nil {
		return 0, err
	}
	defer l.Close()
	for {
		var base []delta.Tensor
		if err := s.View(func(v uint64, tensors []delta.Tensor) error {
			version = v
			base = tensors
			return nil
		}); err != nil {
			return 0, err
		}
		name := folderName(version)
		err := pullNext(ctx, s, l.child(name), version, base)
		if errors.Is(err, fs.ErrNotExist) {
			return version, nil
		}
		if err != nil {
			return version, fmt.Errorf("%s: %w", name, err)
		}
	}
}

// folderName returns the name of the folder with a version.
func folderName(version uint64) string {
	return fmt.Sprintf("weight_v%06d", version)
}

// pullNext updates a subscriber from a version to the next one, at the given location. If that is not published, the
// error is an [fs.ErrNotExist].
func pullNext(ctx context.Context, s *delta.Subscriber, l *location, version uint64, base []delta.Tensor) error {
	index, err := l.open(ctx, indexName)
	if err != nil {
		return err
	}
	if err := index.Close(); err != nil {
		return err
	}
	err = func() error {
		changes, err := openShared(ctx, l)
		if err != nil {
			return err
		}
		defer changes.Close()
		before, err := strconv.ParseUint(changes.format.Base, 10, 64)
		if err != nil || before != version-1 {
			return errors.Join(err, &delta.VersionError{Have: version, Need: before + 1})
		}
		d, err := changes.diff(ctx, base, nil)
		if err != nil {
			return err
		}
		d.Base = version
		d.Target = version + 1
		var message bytes.Buffer
		if _, err := d.WriteTo(&message); err != nil {
			return err
		}
		_, err = s.Read(ctx, &message)
		return err
	}()
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: its index is there, and %v", errFormat, err) // the index exists: no fs.ErrNotExist
	}
	return err
}
