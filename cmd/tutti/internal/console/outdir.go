package console

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
)

// OutDir is a directory for a command's pictures.
type OutDir struct {
	// Path is the directory.
	Path string

	made []string // directories that Prepare made, outermost first
}

// Register adds the flag for the directory.
func (d *OutDir) Register(flags *pflag.FlagSet) {
	flags.StringVar(&d.Path, "out", "tutti-out", "`directory` for the pictures")
}

// Prepare makes the directory and checks that it is writable, so that a long run does not end with a picture that
// cannot be saved.
func (d *OutDir) Prepare() error {
	if d.Path == "" {
		return Usagef("--out is empty, want a directory")
	}
	for dir := filepath.Clean(d.Path); ; dir = filepath.Dir(dir) {
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			break // or dir is the root
		}
		d.made = append([]string{dir}, d.made...)
	}
	if err := os.MkdirAll(d.Path, 0o777); err != nil {
		return fmt.Errorf("cannot use --out %s: %w", d.Path, err)
	}
	probe, err := os.CreateTemp(d.Path, ".tutti-*")
	if err != nil {
		return fmt.Errorf("cannot write to --out %s: %w", d.Path, err)
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

// Draw draws a picture in each format, if there is something to draw, and prints the files' names.
func (d *OutDir) Draw(text io.Writer, name string, draw func(path string) error) error {
	for _, ext := range picture.Formats() {
		path := filepath.Join(d.Path, name+ext)
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

// Tidy removes the directories that Prepare made if they are still empty, after an error or if there was nothing to
// draw.
func (d *OutDir) Tidy() {
	for len(d.made) > 0 {
		last := len(d.made) - 1
		if os.Remove(d.made[last]) != nil {
			return // it has files now
		}
		d.made = d.made[:last]
	}
}
