// Package atomicfile writes files whole or not at all: checkpoints, records and pictures. If writing fails, or several
// writers write one file, its path leads to the content from before or to one writer's, complete and synced to the
// disk.
//
// The content goes to a temporary file beside the target, whose name no other file has, and which is renamed when it
// is complete. It is removed after an error or a panic; only a process that is killed leaves it.
package atomicfile

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
	"strings"
	"syscall"
)

// Write writes the content that write passes to w to the file at path, which it replaces if there is one.
//
// The new file has the permissions of the one that it replaces, or those that the umask leaves of 0666. A symbolic
// link stays, and what it leads to is replaced or made. Other hard links to a replaced file keep the content from
// before. A path to something else than a file, such as a pipe or a device, is written as it is, and so is one that
// means a descriptor of this process, such as /dev/stdout: there, what has been written before an error stays.
func Write(path string, write func(w io.Writer) error) error {
	dir, name, err := resolve(path)
	if err != nil {
		return err
	}
	f, err := stream(path, dir, name)
	if err != nil {
		return err
	}
	if f == nil {
		return replace(dir, name, func(f *os.File) error { return write(f) })
	}
	err = write(f)
	return cmp.Or(err, f.Close())
}

// Replace is [Write] for content that is not written from its beginning to its end: f is an empty file, open for
// reading as well. A path to anything but a file is an error.
func Replace(path string, write func(f *os.File) error) error {
	dir, name, err := resolve(path)
	if err != nil {
		return err
	}
	if _, ok := descriptor(dir, name); ok {
		return irregular(path)
	}
	return replace(dir, name, write)
}

func replace(dir, name string, write func(f *os.File) error) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	err = ReplaceIn(root, name, write)
	return cmp.Or(err, root.Close())
}

// ReplaceIn is [Replace] for a file directly in root, and follows no links: one that has the name is replaced itself.
func ReplaceIn(root *os.Root, name string, write func(f *os.File) error) error {
	path := filepath.Join(root.Name(), name)
	if name != filepath.Base(name) {
		return &fs.PathError{
			Op:   "write",
			Path: path,
			Err:  fs.ErrInvalid,
		}
	}
	mode := fs.FileMode(0o666)
	info, err := root.Lstat(name)
	replaces := err == nil && info.Mode().IsRegular()
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	case replaces:
		mode = info.Mode().Perm()
	case info.Mode().Type() != fs.ModeSymlink:
		return irregular(path)
	}
	temporary := temporaryName(name)
	f, err := root.OpenFile(temporary, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	renamed := false
	defer func() { // also if write panics
		if !renamed {
			_ = f.Close()
			_ = root.Remove(temporary)
		}
	}()
	if replaces { // the umask may have taken some
		if err := f.Chmod(mode); err != nil {
			return err
		}
	}
	if err := write(f); err != nil {
		return err
	}
	if err := cmp.Or(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := root.Rename(temporary, name); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	renamed = true
	return syncDir(root)
}

// temporaryName returns a name that no file has, by which people find what a killed process was writing.
func temporaryName(name string) string {
	const longest = 200 // of the 255 bytes that file systems allow
	name = strings.ToValidUTF8(name[:min(len(name), longest)], "")
	return "." + name + "." + rand.Text() + ".tmp"
}

// syncDir makes a renaming outlast a crash of the host, on systems and file systems that know this.
func syncDir(root *os.Root) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	err = dir.Sync()
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, errors.ErrUnsupported) {
		err = nil
	}
	return cmp.Or(err, dir.Close())
}

// resolve follows the links of a path, of which the last may lead to a file that does not exist, and returns the
// folder and the name in it. It does not follow what the system presents as links for a process's descriptors.
func resolve(path string) (dir, name string, err error) {
	const maxLinks = 40 // as Linux
	next := path
	for range maxLinks {
		dir, name = filepath.Split(next)
		if dir, err = filepath.EvalSymlinks(cmp.Or(dir, ".")); err != nil {
			return "", "", err
		}
		if name == "" || name == "." || name == ".." {
			return "", "", irregular(path)
		}
		if _, ok := descriptor(dir, name); ok {
			return dir, name, nil
		}
		link, err := os.Readlink(filepath.Join(dir, name))
		if err != nil { // no link, or nothing
			return dir, name, nil
		}
		next = link
		if !filepath.IsAbs(link) {
			// Not joined, which would take "folder/.." away where folder may be a link.
			next = dir + string(filepath.Separator) + link
		}
	}
	return "", "", &fs.PathError{
		Op:   "write",
		Path: path,
		Err:  errors.New("too many links"),
	}
}

// stream opens what a path leads to if that is written in place. f is nil if it is a file, or nothing.
func stream(path, dir, name string) (f *os.File, err error) {
	if fd, ok := descriptor(dir, name); ok {
		return duplicate(fd, path)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().IsRegular() || info.IsDir() {
		return nil, nil // where replacing it says what is wrong
	}
	return os.OpenFile(path, os.O_WRONLY, 0)
}

// irregular is the error for a path to something that cannot be replaced.
func irregular(path string) error {
	err := errors.New("not a regular file")
	if info, statErr := os.Stat(path); statErr == nil && info.IsDir() {
		err = syscall.EISDIR
	}
	return &fs.PathError{
		Op:   "write",
		Path: path,
		Err:  err,
	}
}
