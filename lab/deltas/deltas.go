// Package deltas compares tutti's deltas of checkpoints with those of general-purpose programs.
package deltas

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Tools are the programs, in the order of Result.Bytes.
var Tools = []string{"tutti", "zstd", "xdelta3", "bsdiff"}

// Result holds the sizes of the deltas between two files.
type Result struct {
	Old     string `json:"old"`
	New     string `json:"new"`
	Weights uint64 `json:"weights"`
	Changed uint64 `json:"changed"`
	Bytes   []int  `json:"bytes"` // by tool
}

// Compare compares each safetensors file with the one before, and the last one with copies in another order and with
// other metadata.
func Compare(ctx context.Context, tutti string, files []string) (results []Result, err error) {
	dir, err := os.MkdirTemp("", "tutti-lab-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for i, old := range files {
		next := files[i+1:]
		if len(next) == 0 {
			next, err = variants(dir, old)
			if err != nil {
				return nil, err
			}
		} else {
			next = next[:1]
		}
		for _, file := range next {
			r, err := compare(ctx, tutti, dir, old, file)
			if err != nil {
				return nil, err
			}
			results = append(results, r)
		}
	}
	return results, nil
}

// variants writes a copy of a file in another order, and one with other metadata.
func variants(dir, path string) (paths []string, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	f, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, v := range []struct {
		name    string
		content func() ([]byte, error)
	}{{"other order", f.reversed}, {"other metadata", f.annotated}} {
		content, err := v.content()
		if err != nil {
			return nil, err
		}
		path := filepath.Join(dir, v.name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			return nil, err
		}
		paths = append(paths, path)
	}
	return paths, nil
}

// compare makes the deltas from one file to another.
func compare(ctx context.Context, tutti, dir, from, to string) (r Result, err error) {
	r = Result{
		Old: filepath.Base(from),
		New: filepath.Base(to),
	}
	out := filepath.Join(dir, "delta")
	for i, command := range [][]string{
		{tutti, "delta", "diff", from, to, "-o", out},
		{"zstd", "-q", "-f", "-19", "--long=31", "--patch-from=" + from, to, "-o", out},
		{"xdelta3", "-f", "-9", "-e", "-s", from, to, out},
		{"bsdiff", from, to, out},
	} {
		cmd := exec.CommandContext(ctx, command[0], command[1:]...)
		if text, err := cmd.CombinedOutput(); err != nil {
			return r, fmt.Errorf("%s: %w\n%s", Tools[i], err, text)
		}
		info, err := os.Stat(out)
		if err != nil {
			return r, err
		}
		r.Bytes = append(r.Bytes, int(info.Size()))
		if i > 0 {
			continue
		}
		if err := r.count(ctx, tutti, out); err != nil {
			return r, err
		}
	}
	return r, os.Remove(out)
}
