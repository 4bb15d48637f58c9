// Package checkpoint makes deltas of files of weights in the safetensors format
// (https://github.com/huggingface/safetensors#format), and files of deltas.
package checkpoint

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/tutti-go/tutti/distributed/delta"
	"github.com/tutti-go/tutti/dtype"
)

// maxHeader is the length of a header, at most, as that of the format's own reader.
const maxHeader = 100 << 20

// types are the element types by their names in the format. Elements of others are bytes.
var types = map[string]dtype.DType{
	"F64": dtype.F64, "F32": dtype.F32, "F16": dtype.F16, "BF16": dtype.BF16, "F8_E4M3": dtype.FP8E4M3, "F8_E5M2": dtype.FP8E5M2,
	"I64": dtype.I64, "I32": dtype.I32, "I16": dtype.I16, "I8": dtype.I8,
	"U64": dtype.U64, "U32": dtype.U32, "U16": dtype.U16, "U8": dtype.U8, "BOOL": dtype.Bool,
}

// section is a part of a file.
type section struct {
	*os.File
	at, bytes int64
}

func (s section) ReadAt(p []byte, at int64) (int, error)  { return s.File.ReadAt(p, s.at+at) }
func (s section) WriteAt(p []byte, at int64) (int, error) { return s.File.WriteAt(p, s.at+at) }

// tensors reads what a header says of the tensors in the file behind it, which is of that size.
func tensors(header []byte, f *os.File, size int64) ([]delta.Tensor, error) {
	if len(header) < 8 || binary.LittleEndian.Uint64(header) != uint64(len(header)-8) {
		return nil, errors.New("no header of safetensors")
	}
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(header[8:], &entries); err != nil {
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
		t := delta.Tensor{Name: name, DType: types[e.DType], Shape: e.Shape, Memory: section{f, int64(len(header)) + e.DataOffsets[0], bytes}}
		if t.DType == dtype.Invalid {
			t.DType, t.Shape = dtype.U8, []int{int(bytes)}
		}
		if n, err := t.Elements(); err != nil || int64(n)*int64(t.DType.Size()) != bytes {
			return nil, fmt.Errorf("tensor %q of %s and shape %v has %d bytes", name, e.DType, e.Shape, bytes)
		}
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b delta.Tensor) int {
		x, y := a.Memory.(section), b.Memory.(section)
		return cmp.Or(cmp.Compare(x.at, y.at), cmp.Compare(x.bytes, y.bytes))
	})
	at := int64(len(header))
	for _, t := range all {
		s := t.Memory.(section)
		if s.at != at {
			return nil, fmt.Errorf("tensor %q begins at byte %d, the one before it ends at %d", t.Name, s.at, at)
		}
		at += s.bytes
	}
	if size >= 0 && at != size {
		return nil, fmt.Errorf("the tensors end at byte %d, the file at %d", at, size)
	}
	return all, nil
}

// file is one of weights.
type file struct {
	*os.File
	header  []byte
	tensors []delta.Tensor
}

func open(path string) (*file, error) {
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
	var length [8]byte
	if _, err := f.ReadAt(length[:], 0); err != nil {
		return nil, nil, fmt.Errorf("no header of safetensors: %w", err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > maxHeader || int64(n) > info.Size()-8 {
		return nil, nil, fmt.Errorf("not a safetensors file: its first 8 bytes mean a header of %d bytes, the file has %d", n, info.Size())
	}
	header = make([]byte, 8+n)
	if _, err := f.ReadAt(header, 0); err != nil {
		return nil, nil, err
	}
	all, err = tensors(header, f, info.Size())
	return header, all, err
}

// write has a file written beside path, and then given that name. If that fails, the file at path is as before. What is there and no
// file, such as a pipe, is written as it is. A path that is one of inputs is refused.
func write(path string, content func(f *os.File) error, inputs ...string) (err error) {
	if out, err := os.Stat(path); err == nil {
		for _, input := range inputs {
			if in, err := os.Stat(input); err == nil && os.SameFile(in, out) {
				return fmt.Errorf("%s is both read and written: give the output another name", path)
			}
		}
		if !out.Mode().IsRegular() {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			return cmp.Or(content(f), f.Close())
		}
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	f, err := os.OpenFile(path+".tmp", os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o666)
	if err != nil {
		return err
	}
	err = content(f)
	if err == nil {
		err = f.Sync()
	}
	err = cmp.Or(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// Progress is told how far a long work is.
type Progress func(done, of int)

// Diff writes the delta from one file of weights to another.
func Diff(ctx context.Context, old, new, out string, progress Progress) (s delta.Stat, err error) {
	from, err := open(old)
	if err != nil {
		return s, err
	}
	defer from.Close()
	to, err := open(new)
	if err != nil {
		return s, err
	}
	defer to.Close()
	err = write(out, func(f *os.File) error {
		d, err := delta.Diff(ctx, from.tensors, to.tensors, progress)
		if err != nil {
			return err
		}
		if !bytes.Equal(from.header, to.header) {
			d.Extra = to.header
		}
		s = d.Stat()
		_, err = d.WriteTo(f)
		return err
	}, old, new)
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
func Apply(ctx context.Context, old, patch, out string, progress Progress) (s delta.Stat, err error) {
	from, err := open(old)
	if err != nil {
		return s, err
	}
	defer from.Close()
	d, err := Read(patch)
	if err != nil {
		return s, err
	}
	header := from.header
	if len(d.Extra) > 0 {
		header = d.Extra
	}
	return d.Stat(), write(out, func(f *os.File) error {
		to, err := tensors(header, f, -1)
		if err != nil {
			return fmt.Errorf("%s: %w", patch, err)
		}
		made := map[string]delta.Tensor{}
		end := int64(len(header))
		for _, t := range to {
			made[t.Name] = t
			end += t.Memory.(section).bytes
		}
		if err := f.Truncate(end); err != nil {
			return fmt.Errorf("%s is not a regular file: %w", out, err)
		}
		if _, err := f.Write(header); err != nil {
			return err
		}
		base := slices.Clone(from.tensors)
		for i, t := range base {
			if next, ok := made[t.Name]; ok && next.DType == t.DType && slices.Equal(next.Shape, t.Shape) {
				// It stays, and is changed where it has been copied to.
				from, to := t.Memory.(section), next.Memory.(section)
				_, fromErr := from.Seek(from.at, io.SeekStart)
				_, toErr := f.Seek(to.at, io.SeekStart)
				_, err := io.CopyN(f, from.File, from.bytes)
				if err = cmp.Or(ctx.Err(), fromErr, toErr, err); err != nil {
					return err
				}
				base[i].Memory = to
			}
		}
		err = d.Apply(ctx, base, func(t delta.Tensor) (delta.Memory, error) {
			if next := made[t.Name]; next.DType == t.DType && slices.Equal(next.Shape, t.Shape) {
				return next.Memory, nil
			}
			return nil, fmt.Errorf("%w: it has no place in the header", delta.ErrDelta)
		}, progress)
		if version := new(delta.VersionError); errors.As(err, &version) {
			return fmt.Errorf("%s is not the file that %s was made of", old, patch)
		}
		return err
	}, patch)
}
