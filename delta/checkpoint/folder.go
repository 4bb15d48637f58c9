package checkpoint

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
)

// writeFolder makes the folder at path with the files that fill writes into it, all of them or none: until fill has
// returned, they are in a temporary folder next to it. path must not exist, or be an empty folder. fill must sync its
// files.
func writeFolder(path string, fill func(dir *os.Root) error) error {
	if err := checkEmpty(path); err != nil {
		return err
	}
	path = filepath.Clean(path)
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	parent := filepath.Dir(path)
	temporary := filepath.Join(parent, "."+filepath.Base(path)+"."+rand.Text()+".tmp")
	if err := os.Mkdir(temporary, 0o777); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.RemoveAll(temporary) // after the rename there is nothing to remove
	root, err := os.OpenRoot(temporary)
	if err != nil {
		return err
	}
	err = fill(root)
	if err := cmp.Or(err, root.Close()); err != nil {
		return err
	}
	if err := syncFolder(temporary); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // Windows does not rename over a folder
		return err
	}
	if err := os.Rename(temporary, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return syncFolder(parent)
}

// syncFolder makes writes and renames in a folder survive a crash of the host.
func syncFolder(path string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return cmp.Or(dir.Sync(), dir.Close())
}

// checkEmpty returns an error if path exists and is not an empty folder.
func checkEmpty(path string) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a folder, want an empty one or none", path)
	}
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	if _, err := dir.Readdirnames(1); !errors.Is(err, io.EOF) {
		return cmp.Or(err, fmt.Errorf("%s is not empty, want an empty folder or none: %w", path, fs.ErrExist))
	}
	return nil
}
