package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
)

// outDir is a directory that a command makes for its pictures.
type outDir struct {
	path string
	made []string // the directories that were not there, outermost first
}

// register adds the flag that names it.
func (d *outDir) register(flags *pflag.FlagSet) {
	flags.StringVar(&d.path, "out", "tutti-out", "`directory` for the pictures")
}

// prepare makes the directory and tries to write to it, so that a long run does
// not end in a picture that cannot be kept.
func (d *outDir) prepare() error {
	if d.path == "" {
		return usagef("--out is empty, want a directory")
	}
	for dir := filepath.Clean(d.path); ; dir = filepath.Dir(dir) {
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			break // or dir is the root
		}
		d.made = append([]string{dir}, d.made...)
	}
	if err := os.MkdirAll(d.path, 0o777); err != nil {
		return fmt.Errorf("cannot use --out %s: %w", d.path, err)
	}
	probe, err := os.CreateTemp(d.path, ".tutti-*")
	if err != nil {
		return fmt.Errorf("cannot write to --out %s: %w", d.path, err)
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

// draw has a picture drawn in each format, if there is something to draw, and tells
// the files.
func (d *outDir) draw(text io.Writer, name string, draw func(path string) error) error {
	for _, ext := range picture.Formats() {
		path := filepath.Join(d.path, name+ext)
		switch err := draw(path); {
		case errors.Is(err, picture.ErrNothingToDraw):
			return nil
		case err != nil:
			return err
		}
		fmt.Fprintf(text, "wrote %s\n", path)
	}
	return nil
}

// tidy removes what prepare made if it is still empty: after an error, or where
// there was nothing to draw.
func (d *outDir) tidy() {
	for len(d.made) > 0 {
		last := len(d.made) - 1
		if os.Remove(d.made[last]) != nil {
			return // it has files now
		}
		d.made = d.made[:last]
	}
}
