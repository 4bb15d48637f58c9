// Package dump has the form of flight records: package record writes them, and `tutti diagnose` reads them.
package dump

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/env"
)

// Version is the version of PyTorch's flight recorder whose fields a [File] has.
const Version = "2.10"

// File is what a record.Recorder writes: the fields of PyTorch's flight recorder
// (torch/csrc/distributed/c10d/FlightRecorder.hpp), and further ones under "tutti". Process
// groups are communicators. The ranks of a sub-communicator are in as many dumps, so its
// "ranks" has this rank alone.
type File struct {
	Version  string            `json:"version"`
	Library  string            `json:"comm_lib_version"`
	Groups   map[string]Group  `json:"pg_config"` // by name
	Statuses map[string]Status `json:"pg_status"` // by pg_id
	Entries  []Entry           `json:"entries"`
	Tutti    *Rank             `json:"tutti"`
}

// Group describes a communicator.
type Group struct {
	Name  string `json:"name"`
	Desc  string `json:"desc"`
	Ranks string `json:"ranks"`
}

// Status has the numbers of a communicator's collectives, as text.
type Status struct {
	Enqueued  string `json:"last_enqueued_collective"`
	Started   string `json:"last_started_collective"`
	Completed string `json:"last_completed_collective"`
}

// Entry is a call. Times are in nanoseconds since 1970, 0 if unknown.
type Entry struct {
	RecordID      uint64    `json:"record_id"`
	PgID          int       `json:"pg_id"`
	ProcessGroup  [2]string `json:"process_group"` // name and description
	ThreadName    string    `json:"thread_name"`
	ThreadID      string    `json:"thread_id"`
	CollectiveSeq uint64    `json:"collective_seq_id"`
	P2PSeq        uint64    `json:"p2p_seq_id"`
	OpID          uint64    `json:"op_id"`
	ProfilingName string    `json:"profiling_name"`
	Created       int64     `json:"time_created_ns"`
	InputSizes    [][]int   `json:"input_sizes"`
	InputDTypes   []string  `json:"input_dtypes"`
	OutputSizes   [][]int   `json:"output_sizes"`
	OutputDTypes  []string  `json:"output_dtypes"`
	State         string    `json:"state"` // scheduled or completed
	Started       int64     `json:"time_discovered_started_ns"`
	Completed     int64     `json:"time_discovered_completed_ns"`
	Retired       bool      `json:"retired"`
	Timeout       int       `json:"timeout_ms"`
	P2P           bool      `json:"is_p2p"`
	Frames        []Frame   `json:"frames"` // innermost first, without those of comm and below
	Tutti         *Call     `json:"tutti"`
}

// Frame is a line of a call's stack.
type Frame struct {
	Name     string `json:"name"`
	Filename string `json:"filename"`
	Line     int    `json:"line"`
}

// Rank says which rank a dump is of, and what the rank is in each communicator.
type Rank struct {
	Rank  int               `json:"rank"`
	Size  int               `json:"world_size"`
	Name  string            `json:"name,omitempty"` // of an elastic member; "" for others
	Host  string            `json:"host,omitempty"` // its name, "" if it is unknown
	Job   string            `json:"job,omitempty"`  // the launcher's name for this run of the ranks, "" if it has none
	Time  int64             `json:"time_ns"`        // when the dump was made, in nanoseconds since 1970
	Comms map[string]Member `json:"communicators"`  // by name
	Spans []Span            `json:"spans,omitempty"`
	// Waiting is what a rank without a communicator waits for, the outermost wait first.
	Waiting []string `json:"waiting,omitempty"`
}

// Span is a part of a program's time that it has named (backend.Tracer), or a wait. Times are in nanoseconds
// since 1970.
type Span struct {
	Name    string `json:"name"`
	Wait    bool   `json:"wait,omitempty"` // for all calls of the rank
	Started int64  `json:"time_started_ns"`
	Ended   int64  `json:"time_ended_ns"`
}

// Member is a rank of a communicator.
type Member struct {
	Rank    int      `json:"rank"`
	Size    int      `json:"size"`
	Sync    *Sync    `json:"sync,omitempty"` // that failed, waits longest, or was the last
	Failure *Failure `json:"failure,omitempty"`
}

// Failure is the first failure of a rank in a communicator.
type Failure struct {
	Time  int64  `json:"time_ns"` // in nanoseconds since 1970
	Error string `json:"error"`
	Wait  bool   `json:"wait,omitempty"` // a wait returned it; otherwise the rank aborted because of it
	Peer  bool   `json:"peer,omitempty"` // it reports another rank's failure
}

// Sync is a wait for all calls of a rank. Times are in nanoseconds since 1970, 0 if unknown.
type Sync struct {
	Created   int64   `json:"time_created_ns"`
	Completed int64   `json:"time_discovered_completed_ns"`
	Pending   bool    `json:"pending"`
	Error     string  `json:"error,omitempty"`
	Frames    []Frame `json:"frames"`
}

// Call is a comm.Call in tutti's terms.
type Call struct {
	Call  string `json:"call"` // what comm.Call.String says
	Op    string `json:"op"`
	DType string `json:"dtype,omitempty"`
	Count int    `json:"count"` // elements; of a V-collective what is sent
	// Received is what a V-collective receives, in elements.
	Received int    `json:"received,omitempty"`
	Reduce   string `json:"reduce,omitempty"`
	Peer     int    `json:"peer"`
	Tag      uint32 `json:"tag"`
	Error    string `json:"error,omitempty"`
	// Left says that the call failed before the rank took part in it: it has no
	// number.
	Left bool `json:"left,omitempty"`
}

// EpochDir is how the directories begin that have the dumps of an epoch, within the directory of all dumps.
const EpochDir = "tutti-record-epoch-"

// runNames are variables of launchers that together name a run of a job's ranks, if the first is set.
var runNames = [][]string{
	{env.Run},
	{"PMIX_NAMESPACE"},
	{"SLURM_JOB_ID", "SLURM_STEP_ID"},
	{"FLUX_JOB_ID"},
	{"PMI_JOBID"},
}

// agreed is the name that the ranks of this process have agreed on with the others; nil before that.
var agreed atomic.Pointer[string]

// Agree names the run of this process's ranks, where the launcher does not. All ranks of the run agree on the name, and
// no other run has it.
func Agree(run string) { agreed.Store(&run) }

// RunName is what tells the records of this run from those of others, "" if nothing does, or nothing yet.
func RunName(getenv func(string) string) string {
	for _, variables := range runNames {
		if getenv(variables[0]) == "" {
			continue
		}
		var parts []string
		for _, variable := range variables {
			parts = append(parts, getenv(variable))
		}
		return strings.Join(parts, ".")
	}
	if run := agreed.Load(); run != nil {
		return *run
	}
	return ""
}

// Path is the file of a rank's dump.
func Path(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("tutti-record-%d.json", rank))
}

// libraries are the beginnings of the names of functions that are not the program's: those of this module, but for
// examples and commands.
var libraries = []string{"tutti.", "tutti/comm", "tutti/delta", "tutti/distributed", "tutti/internal", "tutti/runtime"}

// Caller returns the frame of the program: the innermost one outside of this module's libraries, or the innermost one
// of a call that a goroutine of theirs has made. There is at least one frame.
func Caller(frames []Frame) Frame {
	for _, f := range frames {
		name, ours := strings.CutPrefix(f.Name, "github.com/tutti-go/")
		isLibrary := func(library string) bool { return strings.HasPrefix(name, library) }
		if !ours || !slices.ContainsFunc(libraries, isLibrary) {
			return f
		}
	}
	return frames[0]
}
