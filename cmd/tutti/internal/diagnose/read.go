// Package diagnose combines the flight records of all ranks ([record.Recorder]) and says which rank has not made the
// call that the others wait for.
package diagnose

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/printable"
)

// maxRanks exceeds any world size; a file with more ranks is no record.
const maxRanks = 1 << 20

// Record is a dump with the name of its file.
type Record struct {
	Name string // of the file, in errors
	*dump.File
}

// files are the names of dumps.
const files = "tutti-record-*.json"

// IsFile reports whether name, a path with slashes, is a dump directly in a directory or in the directory of an
// epoch.
func IsFile(name string) bool {
	folder, file := path.Split(name)
	if folder != "" {
		number, ok := strings.CutPrefix(strings.TrimSuffix(folder, "/"), dump.EpochDir)
		if _, err := strconv.ParseUint(number, 10, 64); !ok || err != nil {
			return false
		}
	}
	if strings.ContainsAny(file, `\:`) || printable.Text(file) != file { // the first mean a folder or a stream on Windows
		return false
	}
	ok, _ := path.Match(files, file)
	return ok
}

// Files lists the dumps in a directory, including those of the epochs of elastic jobs. It skips entries that are not
// regular files, because a read of a pipe may never end.
func Files(dir string) []string {
	top, _ := filepath.Glob(filepath.Join(dir, files))
	epochs, _ := filepath.Glob(filepath.Join(dir, dump.EpochDir+"*", files))
	return slices.DeleteFunc(append(top, epochs...), func(path string) bool {
		info, err := os.Stat(path)
		return err == nil && !info.Mode().IsRegular()
	})
}

// newest lists the dumps of a directory that lie beside the newest dump.
func newest(dir string) (files []string) {
	var last time.Time
	all := Files(dir)
	for _, path := range all {
		if info, err := os.Stat(path); err == nil && info.ModTime().After(last) {
			last = info.ModTime()
			dir = filepath.Dir(path)
		}
	}
	return slices.DeleteFunc(all, func(path string) bool { return filepath.Dir(path) != dir })
}

// ReadFiles reads dumps, and the dumps in directories, where it takes the last epoch, and sorts them by rank. It
// leaves out dumps of runs before the newest, and returns their names.
func ReadFiles(paths []string) (records []Record, stale []string, err error) {
	var files []string
	for _, path := range paths {
		if info, err := os.Stat(path); err != nil || !info.IsDir() {
			files = append(files, path) // reading it reports the error
			continue
		}
		found := newest(path)
		if len(found) == 0 {
			return nil, nil, fmt.Errorf("%s: has no file tutti-record-*.json: "+
				"run the program under TUTTI_RECORD=1000 and send its launcher SIGUSR1", path)
		}
		files = append(files, found...)
	}
	var errs []error
	for _, path := range files {
		r, err := readFile(path)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		records = append(records, r)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, nil, err
	}
	records, stale = ofNewestRun(records)
	slices.SortStableFunc(records, func(a, b Record) int {
		return a.Tutti.Rank - b.Tutti.Rank
	})
	for i := 1; i < len(records); i++ {
		a := records[i-1]
		b := records[i]
		if a.Tutti.Rank == b.Tutti.Rank {
			return nil, nil, fmt.Errorf("%s and %s: both are of rank %d", a.Name, b.Name, a.Tutti.Rank)
		}
		if a.Tutti.Size != b.Tutti.Size {
			return nil, nil, fmt.Errorf("%s and %s: are of different jobs, of %d and %d ranks",
				a.Name, b.Name, a.Tutti.Size, b.Tutti.Size)
		}
	}
	return records, stale, nil
}

// ofNewestRun returns the records of the newest record's run, and the names of the others. A rank that has met no
// other may not know its run: it belongs to the newest run with as many ranks.
func ofNewestRun(records []Record) (kept []Record, stale []string) {
	newest := slices.MaxFunc(records, func(a, b Record) int {
		return cmp.Compare(a.Tutti.Time, b.Tutti.Time)
	})
	run := newest.Tutti.Job
	last := int64(math.MinInt64) // time of the newest record that names run
	for _, r := range records {
		named := newest.Tutti.Job == "" && r.Tutti.Job != "" && r.Tutti.Size == newest.Tutti.Size
		if named && r.Tutti.Time > last {
			run = r.Tutti.Job
			last = r.Tutti.Time
		}
	}
	for _, r := range records {
		if r.Tutti.Job == run || r.Tutti.Job == "" && r.Tutti.Size == newest.Tutti.Size {
			kept = append(kept, r)
		} else {
			stale = append(stale, r.Name)
		}
	}
	return kept, stale
}

func readFile(path string) (Record, error) {
	f, err := os.Open(path)
	if err != nil {
		return Record{}, err
	}
	defer f.Close()
	return Read(path, f)
}

// Read reads a dump. Errors begin with name.
func Read(name string, from io.Reader) (Record, error) {
	in := bufio.NewReader(from)
	if first, _ := in.Peek(1); len(first) == 1 && first[0] == 0x80 {
		return Record{}, fmt.Errorf("%s: is a pickle, want the JSON that record.Recorder writes", name)
	}
	d := new(dump.File)
	decoder := json.NewDecoder(in)
	switch err := decoder.Decode(d); {
	case errors.Is(err, io.EOF):
		return Record{}, fmt.Errorf("%s: is empty", name)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return Record{}, fmt.Errorf("%s: is truncated", name)
	case err != nil:
		return Record{}, fmt.Errorf("%s: is no flight record: %w", name, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return Record{}, fmt.Errorf("%s: is no flight record: something follows it", name)
	}
	shorten(d)
	if err := valid(d); err != nil {
		return Record{}, fmt.Errorf("%s: is no flight record of tutti: %w", name, err)
	}
	return Record{name, d}, nil
}

// longestText bounds the printed texts of a dump, in bytes.
const longestText = 2000

// longestList bounds the number of a rank's waits that are read.
const longestList = 10

// shorten cuts texts that are longer than any program writes.
func shorten(d *dump.File) {
	cut := func(texts ...*string) {
		for _, text := range texts {
			*text = (*text)[:min(len(*text), longestText)]
		}
	}
	frames := func(list []dump.Frame) {
		for i := range list {
			cut(&list[i].Name, &list[i].Filename)
		}
	}
	for i := range d.Entries {
		e := &d.Entries[i]
		cut(&e.ProfilingName, &e.State, &e.ThreadName, &e.ThreadID)
		frames(e.Frames)
		if e.Tutti != nil {
			cut(&e.Tutti.Call, &e.Tutti.Op, &e.Tutti.DType, &e.Tutti.Reduce, &e.Tutti.Error)
		}
	}
	if d.Tutti == nil {
		return
	}
	cut(&d.Tutti.Name, &d.Tutti.Host, &d.Tutti.Job)
	d.Tutti.Waiting = d.Tutti.Waiting[:min(len(d.Tutti.Waiting), longestList)]
	for i := range d.Tutti.Waiting {
		cut(&d.Tutti.Waiting[i])
	}
	for _, m := range d.Tutti.Comms {
		if m.Sync != nil {
			cut(&m.Sync.Error)
			frames(m.Sync.Frames)
		}
		if m.Failure != nil {
			cut(&m.Failure.Error)
		}
	}
}

// valid checks the properties that the diagnosis relies on.
func valid(d *dump.File) error {
	if major, _, _ := strings.Cut(d.Version, "."); major != "2" {
		return fmt.Errorf("version %q, want 2", d.Version)
	}
	t := d.Tutti
	switch {
	case t == nil:
		return errors.New(`it has no "tutti"`)
	case t.Size < 1 || t.Size > maxRanks || t.Rank < 0 || t.Rank >= t.Size:
		return fmt.Errorf("rank %d of %d", t.Rank, t.Size)
	}
	for name, m := range t.Comms {
		if len(name) > longestText {
			return fmt.Errorf("a communicator has a name of %d bytes", len(name))
		}
		if m.Size < 1 || m.Size > t.Size || m.Rank < 0 || m.Rank >= m.Size {
			return fmt.Errorf("rank %d of %d in communicator %q", m.Rank, m.Size, name)
		}
	}
	for i, e := range d.Entries {
		if e.Tutti == nil {
			return fmt.Errorf(`entry %d has no "tutti"`, i)
		}
		if _, ok := t.Comms[e.ProcessGroup[0]]; !ok {
			return fmt.Errorf("entry %d is of the unknown communicator %q", i, e.ProcessGroup[0])
		}
		if e.Tutti.Count < 0 || e.Tutti.Received < 0 {
			return fmt.Errorf("entry %d has the count %d", i, min(e.Tutti.Count, e.Tutti.Received))
		}
	}
	return nil
}
