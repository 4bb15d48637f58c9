// Package checkpoint makes deltas between files of weights in the safetensors format
// (https://github.com/huggingface/safetensors#format), and makes such files of deltas, as the command tutti delta does.
package checkpoint

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/dtype"
)

// maxHeader is the length of a header, at most, as that of the format's own reader.
const maxHeader = 100_000_000

// headerLength is the length of the number that says how long the header is.
const headerLength = 8

// types are the element types by their names in the format. Elements of others are bytes.
var types = map[string]dtype.DType{
	"F64":     dtype.F64,
	"F32":     dtype.F32,
	"F16":     dtype.F16,
	"BF16":    dtype.BF16,
	"F8_E4M3": dtype.FP8E4M3,
	"F8_E5M2": dtype.FP8E5M2,
	"I64":     dtype.I64,
	"I32":     dtype.I32,
	"I16":     dtype.I16,
	"I8":      dtype.I8,
	"U64":     dtype.U64,
	"U32":     dtype.U32,
	"U16":     dtype.U16,
	"U8":      dtype.U8,
	"BOOL":    dtype.Bool,
}

// section is a part of a file.
type section struct {
	*os.File
	offset, bytes int64
}

func (s section) ReadAt(p []byte, offset int64) (int, error) {
	return s.File.ReadAt(p, s.offset+offset)
}
func (s section) WriteAt(p []byte, offset int64) (int, error) {
	return s.File.WriteAt(p, s.offset+offset)
}

// tensors reads what a header says of the tensors in the file behind it, which is of that size.
func tensors(header []byte, f *os.File, size int64) ([]delta.Tensor, error) {
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(header[headerLength:], &entries); err != nil {
		return nil, fmt.Errorf("the header: %w", err)
	}
	var all []delta.Tensor
	for name, raw := range entries {
		if name == "__metadata__" {
			continue
		}
		var e struct {
			DType       string   `json:"dtype"`
			Shape       []int    `json:"shape"`
			DataOffsets [2]int64 `json:"data_offsets"`
		}
		if err := json.Unmarshal(raw, &e); err != nil {
			return nil, fmt.Errorf("the header, tensor %q: %w", name, err)
		}
		bytes := e.DataOffsets[1] - e.DataOffsets[0]
		t := delta.Tensor{
			Name:  name,
			DType: types[e.DType],
			Shape: e.Shape,
		}
		t.Memory = section{f, int64(len(header)) + e.DataOffsets[0], bytes}
		if t.DType == dtype.Invalid {
			t.DType = dtype.U8
			t.Shape = []int{int(bytes)}
		}
		if n, err := t.Elements(); err != nil || int64(n)*int64(t.DType.Size()) != bytes {
			return nil, fmt.Errorf("tensor %q of %q and shape %v has %d bytes", name, e.DType, e.Shape, bytes)
		}
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b delta.Tensor) int {
		x := a.Memory.(section)
		y := b.Memory.(section)
		return cmp.Or(
			cmp.Compare(x.offset, y.offset),
			cmp.Compare(x.bytes, y.bytes),
		)
	})
	end := int64(len(header))
	for _, t := range all {
		s := t.Memory.(section)
		if s.offset != end {
			return nil, fmt.Errorf("tensor %q begins at byte %d, the one before it ends at %d", t.Name, s.offset, end)
		}
		end += s.bytes
	}
	if size >= 0 && end != size {
		return nil, fmt.Errorf("the tensors end at byte %d, the file at %d", end, size)
	}
	return all, nil
}

// file is one of weights.
type file struct {
	*os.File
	header  []byte
	tensors []delta.Tensor
}

// open opens a file of weights, which is read more than once and in any order.
func open(path string) (*file, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() { // before opening it, as a pipe waits for a writer
		return nil, fmt.Errorf("%s is not a regular file, which a checkpoint has to be: it is read twice", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	header, all, err := read(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return &file{f, header, all}, nil
}

func read(f *os.File) (header []byte, all []delta.Tensor, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if info.Size() < headerLength {
		return nil, nil, fmt.Errorf("no header of safetensors: the file has %d bytes", info.Size())
	}
	header = make([]byte, headerLength)
	if _, err := f.ReadAt(header, 0); err != nil {
		return nil, nil, err
	}
	n := binary.LittleEndian.Uint64(header)
	if n > maxHeader || int64(n) > info.Size()-headerLength {
		if header[0] == '{' {
			return nil, nil, errors.New("not a safetensors file but JSON; of a checkpoint in shards, each shard is a file")
		}
		return nil, nil, fmt.Errorf("not a safetensors file: its first 8 bytes mean a header of %d bytes, the file has %d",
			n, info.Size())
	}
	header = make([]byte, headerLength+n)
	if _, err := f.ReadAt(header, 0); err != nil {
		return nil, nil, err
	}
	all, err = tensors(header, f, info.Size())
	return header, all, err
}

// checkOutput refuses an output that is one of the inputs.
func checkOutput(out string, inputs ...string) error {
	written, err := os.Stat(out)
	if out == Stdout {
		written, err = os.Stdout.Stat()
	}
	if err != nil {
		return nil // it is not there yet, or writing it says what is wrong
	}
	for _, input := range inputs {
		if info, err := os.Stat(input); err == nil && os.SameFile(info, written) {
			return fmt.Errorf("%s is both read and written: give the output another name", input)
		}
	}
	return nil
}

// Stdout is the path that means the standard output.
const Stdout = "-"

// write writes a file from its beginning to its end.
func write(path string, content func(w io.Writer) error) error {
	if path == Stdout {
		return content(os.Stdout)
	}
	return atomicfile.Write(path, content)
}

// Progress is told how far a long work is.
type Progress func(done, total int)

// Diff writes the delta from one file of weights to another.
func Diff(ctx context.Context, base, target, out string, progress Progress) (s delta.Stat, err error) {
	from, err := open(base)
	if err != nil {
		return s, err
	}
	defer from.Close()
	to, err := open(target)
	if err != nil {
		return s, err
	}
	defer to.Close()
	if err := checkOutput(out, base, target); err != nil {
		return s, err
	}
	err = write(out, func(w io.Writer) error {
		d, err := delta.Diff(ctx, from.tensors, to.tensors, progress)
		if err != nil {
			return err
		}
		d.SetText(from.header[headerLength:], to.header[headerLength:])
		s = d.Stat()
		_, err = d.WriteTo(w)
		return err
	})
	return s, err
}

// Read reads the delta in a file.
func Read(path string) (*delta.Delta, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d, err := delta.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return d, nil
}

// Apply writes the file of weights that a delta makes of another, byte for byte the one that it was made of.
func Apply(ctx context.Context, base, patch, out string, progress Progress) (s delta.Stat, err error) {
	from, err := open(base)
	if err != nil {
		return s, err
	}
	defer from.Close()
	d, err := Read(patch)
	if err != nil {
		return s, err
	}
	if err := checkOutput(out, patch); err != nil {
		return s, err
	}
	if out == Stdout {
		return s, errors.New("a checkpoint is written in any order: -o takes a file for it, not the standard output")
	}
	text, err := d.Text(from.header[headerLength:])
	if err == nil {
		header := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
		header = append(header, text...)
		err = atomicfile.Replace(out, func(f *os.File) error {
			return apply(ctx, d, from, header, f, progress)
		})
	}
	if mismatch := new(delta.VersionError); errors.As(err, &mismatch) {
		err = fmt.Errorf("%s is not the file that %s was made of", base, patch)
	}
	if errors.Is(err, delta.ErrDelta) {
		err = fmt.Errorf("%s: %w", patch, err)
	}
	return d.Stat(), err
}

// apply writes the file with a header whose tensors a delta makes of others.
func apply(ctx context.Context, d *delta.Delta, from *file, header []byte, f *os.File, progress Progress) error {
	all, err := tensors(header, f, -1)
	if err != nil {
		return fmt.Errorf("%w: %w", delta.ErrDelta, err)
	}
	places := map[string]delta.Tensor{}
	end := int64(len(header))
	for _, t := range all {
		places[t.Name] = t
		end += t.Memory.(section).bytes
	}
	if err := f.Truncate(end); err != nil {
		return err
	}
	if _, err := f.Write(header); err != nil {
		return err
	}
	if err := d.Apply(
		ctx,
		from.tensors,
		func(t delta.Tensor) (delta.Memory, error) {
			place, ok := places[t.Name]
			if !ok || place.DType != t.DType || !slices.Equal(place.Shape, t.Shape) {
				return nil, fmt.Errorf("%w: it has no place in the header", delta.ErrDelta)
			}
			delete(places, t.Name)
			return place.Memory, nil
		},
		progress,
	); err != nil {
		return err
	}
	for name := range places {
		return fmt.Errorf("%w: it has no tensor %q of the header", delta.ErrDelta, name)
	}
	return nil
}
