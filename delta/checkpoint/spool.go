package checkpoint

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"io"
	"os"
)

// spoolBytes is the amount of data that a spool keeps in memory.
const spoolBytes = 64 << 10

// spool stores written data until it is read: in memory, and beyond spoolBytes in a temporary file.
type spool struct {
	dir    *os.Root     // of the file
	memory bytes.Buffer // data that is not in the file
	name   string       // of the file; "" if all is in memory
	file   *os.File     // nil without a name, and after park
	length int64        // of all data
}

// Write implements [io.Writer].
func (s *spool) Write(p []byte) (int, error) {
	if s.name == "" && s.memory.Len()+len(p) > spoolBytes {
		name := rand.Text()
		f, err := s.dir.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return 0, err
		}
		s.name = name
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

// park closes the file until WriteTo, so that many spools may exist. s must not be written afterwards.
func (s *spool) park() error {
	if s.file == nil {
		return nil
	}
	err := s.file.Close()
	s.file = nil
	return err
}

// WriteTo implements [io.WriterTo]. s must not be written afterwards.
func (s *spool) WriteTo(w io.Writer) (int64, error) {
	written, err := s.memory.WriteTo(w)
	if err != nil || s.name == "" {
		return written, err
	}
	if s.file == nil {
		s.file, err = s.dir.Open(s.name)
		if err != nil {
			return written, err
		}
	}
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return written, err
	}
	n, err := io.Copy(w, s.file)
	return written + n, err
}

// Close removes the file.
func (s *spool) Close() error {
	if s.name == "" {
		return nil
	}
	err := s.park()
	err = cmp.Or(err, s.dir.Remove(s.name))
	s.name = ""
	return err
}
