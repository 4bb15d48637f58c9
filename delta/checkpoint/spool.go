package checkpoint

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"io"
	"os"
	"path/filepath"
)

// spoolBytes is what a spool keeps in memory.
const spoolBytes = 64 << 10

// spool keeps what is written until it is read: some of it in memory, and more in a temporary file.
type spool struct {
	dir    *os.Root // of the file
	memory bytes.Buffer
	file   *os.File // nil: all is in memory
	length int64    // of all
}

// Write implements [io.Writer].
func (s *spool) Write(p []byte) (int, error) {
	if s.file == nil && s.memory.Len()+len(p) > spoolBytes {
		f, err := s.dir.OpenFile(rand.Text(), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return 0, err
		}
		s.file = f
	}
	var n int
	var err error
	if s.file == nil {
		n, err = s.memory.Write(p)
	} else {
		n, err = s.file.Write(p)
	}
	s.length += int64(n)
	return n, err
}

// WriteTo implements [io.WriterTo]. Nothing is written to s afterwards.
func (s *spool) WriteTo(w io.Writer) (int64, error) {
	written, err := s.memory.WriteTo(w)
	if err != nil || s.file == nil {
		return written, err
	}
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return written, err
	}
	n, err := io.Copy(w, s.file)
	return written + n, err
}

// Close removes the file.
func (s *spool) Close() error {
	if s.file == nil {
		return nil
	}
	err := s.file.Close()
	err = cmp.Or(err, s.dir.Remove(filepath.Base(s.file.Name())))
	s.file = nil
	return err
}
