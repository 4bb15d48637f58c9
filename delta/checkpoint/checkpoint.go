// Package checkpoint makes deltas between checkpoints in the safetensors format
// (https://github.com/huggingface/safetensors#format), and applies them, as the command tutti delta does. A checkpoint
// is a file, or the shards in an index (model.safetensors.index.json). Its path names the file, the index, or
// of the folder with one of these.
package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/delta"
)

// Stdout is the path that means the standard output.
const Stdout = "-"

// write writes a file from its beginning to its end.
func write(path string, content func(w io.Writer) error) error {
	if path == Stdout {
		return content(os.Stdout)
	}
	return atomicfile.Write(path, content)
}

// Progress is called with the progress of a long operation.
type Progress func(done, total int)

// halves returns the callbacks for the first and the second half of an operation.
func (p Progress) halves() (first, second Progress) {
	if p == nil {
		return nil, nil
	}
	first = func(done, total int) { p(done, 2*total) }
	second = func(done, total int) { p(total+done, 2*total) }
	return first, second
}

// checkOutput returns an error if the output is one of the inputs.
func checkOutput(out string, inputs ...string) error {
	written, err := os.Stat(out)
	if out == Stdout {
		written, err = os.Stdout.Stat()
	}
	if err != nil {
		return nil // it does not exist yet, or writing it will report the problem
	}
	for _, input := range inputs {
		if info, err := os.Stat(input); err == nil && os.SameFile(info, written) {
			return fmt.Errorf("%s is both read and written: give the output another name", input)
		}
	}
	return nil
}

// checkFile returns an error if the output of one file is a folder, and suggests a file in it.
func checkFile(out, kind, name string) error {
	info, err := os.Stat(out)
	isFolder := err == nil && info.IsDir()
	if out == Stdout || !isFolder && (out == "" || !os.IsPathSeparator(out[len(out)-1])) {
		return nil
	}
	return fmt.Errorf("%s is a folder, and %s one file: name it, such as %s", out, kind, filepath.Join(out, name))
}

// checkDelta is checkFile for the delta to a checkpoint.
func checkDelta(out, target string) error {
	name := filepath.Base(target)
	stem := strings.TrimSuffix(name, filepath.Ext(name)) // "" for the folder "."
	return checkFile(out, "a delta is", cmp.Or(stem, "checkpoint")+".delta")
}

// Diff writes the delta from one checkpoint to another.
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
	if err := cmp.Or(checkOutput(out, slices.Concat(from.paths(), to.paths())...), checkDelta(out, target)); err != nil {
		return s, err
	}
	err = write(out, func(w io.Writer) error {
		d, err := delta.Diff(ctx, from.tensors, to.tensors, progress)
		if err != nil {
			return err
		}
		if err := d.SetText(from.text(), to.text()); err != nil {
			return err
		}
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

// Apply writes the checkpoint that results from applying a delta to another one, byte for byte equal to the delta's
// target. If the target has shards, out is a folder that is empty or does not exist.
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
	text, err := d.Text(from.text())
	if err == nil {
		err = apply(ctx, d, from, text, out, progress)
	}
	if mismatch := new(delta.VersionError); errors.As(err, &mismatch) {
		err = fmt.Errorf("%s is not the file that %s was made of", base, patch)
	}
	if errors.Is(err, delta.ErrDelta) {
		err = fmt.Errorf("%s: %w", patch, err)
	}
	return d.Stat(), err
}

// apply writes the checkpoint with this text, whose tensors result from applying a delta to others.
func apply(ctx context.Context, d *delta.Delta, from *checkpoint, text []byte, out string, progress Progress) error {
	to, err := parseText(text)
	if err != nil {
		return err
	}
	if to.index == nil {
		if err := checkFile(out, "the delta makes", "model.safetensors"); err != nil {
			return err
		}
		return atomicfile.Replace(out, func(f *os.File) error {
			to.files[0].File = f
			return to.fill(ctx, d, from, progress)
		})
	}
	return writeFolder(out, func(dir *os.Root) (err error) {
		defer func() {
			for _, f := range to.files {
				if f.File != nil {
					err = cmp.Or(err, f.Close())
				}
			}
		}()
		for _, f := range to.files {
			f.File, err = dir.OpenFile(f.name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
			if err != nil {
				return err
			}
		}
		if err := to.fill(ctx, d, from, progress); err != nil {
			return err
		}
		for _, f := range to.files {
			if err := f.Sync(); err != nil {
				return err
			}
		}
		return atomicfile.ReplaceIn(dir, to.indexName, func(f *os.File) error {
			_, err := f.Write(to.index)
			return err
		})
	})
}

// fill writes the files of a checkpoint, which are empty so far.
func (c *checkpoint) fill(ctx context.Context, d *delta.Delta, from *checkpoint, progress Progress) error {
	for _, f := range c.files {
		if err := f.begin(); err != nil {
			return err
		}
	}
	places := map[string]delta.Tensor{}
	for _, t := range merge(c.files) {
		places[t.Name] = t
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

// begin writes the header of an empty file, and computes the positions of its tensors.
func (f *file) begin() (err error) {
	if f.tensors, err = tensors(f.header, f.File, -1); err != nil {
		return fmt.Errorf("%w: %w", delta.ErrDelta, err)
	}
	end := int64(len(f.header))
	for _, t := range f.tensors {
		end += t.Memory.(section).bytes
	}
	if err := f.Truncate(end); err != nil {
		return err
	}
	_, err = f.Write(f.header)
	return err
}
