// Package inquiry lets a process without a communicator report what it waits for, on the signal that makes others
// write their flight records.
package inquiry

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
)

// Wait is a wait for other processes.
type Wait struct {
	Rank, Size int           // -1 for a wait within a wait of any rank of this process
	Text       func() string // describes the awaited event; called on another goroutine
	began      time.Time     // when it was registered
}

// String describes the awaited event and the time waited.
func (w *Wait) String() string {
	return fmt.Sprintf("%s, for %v", w.Text(), time.Since(w.began).Round(time.Second/10))
}

// waits are the waits of this process.
var waits struct {
	writes sync.Mutex // one answer at a time; taken before mu

	mu      sync.Mutex
	list    []*Wait // the outermost first; guarded by mu
	listens bool    // a goroutine answers; guarded by mu

	reserved map[string]bool // files that must not be written any more, see Reserve; guarded by mu
}

// Reserve reserves a file for the flight record of a communicator. Later waits of the process are only logged, because
// the record has the communicator's calls, and perhaps the reason of its failure.
func Reserve(path string) {
	waits.mu.Lock()
	defer waits.mu.Unlock()
	if waits.reserved == nil {
		waits.reserved = map[string]bool{}
	}
	waits.reserved[path] = true
}

// isReserved reports whether another record owns a file.
func isReserved(path string) bool {
	waits.mu.Lock()
	defer waits.mu.Unlock()
	return waits.reserved[path]
}

// Begin begins a wait, which lasts until end is called. The first call makes the process answer inquiries from then
// on, if flight records are enabled (TUTTI_RECORD). end waits for an answer in progress, and thus for the Text
// functions of other waits.
func Begin(w Wait) (end func()) {
	w.began = time.Now()
	waits.mu.Lock()
	defer waits.mu.Unlock()
	waits.list = append(waits.list, &w)
	if text := os.Getenv(env.Record); !waits.listens && text != "" && text != "0" {
		waits.listens = true
		listen()
	}
	return func() {
		waits.writes.Lock() // a process that ends during an answer would leave half a file
		defer waits.writes.Unlock()
		waits.mu.Lock()
		defer waits.mu.Unlock()
		if i := slices.Index(waits.list, &w); i >= 0 {
			waits.list = slices.Delete(waits.list, i, i+1)
		}
	}
}

// answer writes the flight records of the ranks of this process that wait, and logs them.
func answer(reason string) {
	waits.writes.Lock()
	defer waits.writes.Unlock()
	waits.mu.Lock()
	list := slices.Clone(waits.list)
	waits.mu.Unlock()
	files := map[int]*dump.File{}
	for _, w := range list {
		if w.Rank >= 0 && files[w.Rank] == nil {
			files[w.Rank] = newFile(w)
		}
	}
	for rank, f := range files {
		for _, w := range list {
			if w.Rank == rank || w.Rank < 0 {
				f.Tutti.Waiting = append(f.Tutti.Waiting, w.String())
			}
		}
	}
	for rank, f := range files {
		path := dump.Path(cmp.Or(os.Getenv(env.RecordDir), "."), rank)
		waiting := strings.Join(f.Tutti.Waiting, "; ")
		if isReserved(path) {
			slog.Warn("record: this rank waits for a further communicator; its flight record is an earlier one's",
				"rank", rank, "waiting", waiting, "path", path, "why", reason)
			continue
		}
		if err := write(path, f); err != nil {
			slog.Error("record: the flight record cannot be written", "path", path, "error", err, "waiting", waiting)
			continue
		}
		slog.Warn("record: wrote where this rank waits, which has no communicator yet",
			"rank", rank, "waiting", waiting, "path", path, "why", reason)
	}
}

// newFile returns the record of a rank that has made no call.
func newFile(w *Wait) *dump.File {
	host, _ := os.Hostname() // "" where it is unknown
	return &dump.File{
		Version:  dump.Version,
		Groups:   map[string]dump.Group{},
		Statuses: map[string]dump.Status{},
		Entries:  []dump.Entry{},
		Tutti: &dump.Rank{
			Rank:  w.Rank,
			Size:  max(w.Size, w.Rank+1),
			Host:  host,
			Job:   dump.RunName(os.Getenv),
			Time:  time.Now().UnixNano(),
			Comms: map[string]dump.Member{},
		},
	}
}

// write atomically replaces a file.
func write(path string, f *dump.File) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	return atomicfile.Write(path, func(w io.Writer) error {
		return json.NewEncoder(w).Encode(f)
	})
}
