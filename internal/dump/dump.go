// Package dump has the format of flight records: package record writes them, and `tutti diagnose` reads them.
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

// File is the output of a record.Recorder: the fields of PyTorch's flight recorder
// (torch/csrc/distributed/c10d/FlightRecorder.hpp), and further ones under "tutti". Process groups are communicators.
// The ranks of a sub-communicator are in separate dumps, so its "ranks" has this rank alone.
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
	Frames        []Frame   `json:"frames"` // innermost first, without frames of comm and below
	Tutti         *Call     `json:"tutti"`
}

// Frame is a line of a call's stack.
type Frame struct {
	Name     string `json:"name"`
	Filename string `json:"filename"`
	Line     int    `json:"line"`
}

// Rank identifies the rank of a dump, and its place in each communicator.
type Rank struct {
	Rank  int               `json:"rank"`
	Size  int               `json:"world_size"`
	Name  string            `json:"name,omitempty"` // of an elastic member; "" for others
	Host  string            `json:"host,omitempty"` // name of the host, "" if unknown
	Job   string            `json:"job,omitempty"`  // the launcher's name of this run, "" if it has none
	Time  int64             `json:"time_ns"`        // time of the dump, in nanoseconds since 1970
	Comms map[string]Member `json:"communicators"`  // by name
	Spans []Span            `json:"spans,omitempty"`
	// Waiting describes the waits of a rank without a communicator, the outermost first.
	Waiting []string `json:"waiting,omitempty"`
}

// Span is a named part of a program's time (backend.Tracer), or a wait. Times are in nanoseconds since 1970.
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
	Sync    *Sync    `json:"sync,omitempty"` // the one that failed, waits longest, or was the last
	Failure *Failure `json:"failure,omitempty"`
}

// Failure is the first failure of a rank in a communicator.
type Failure struct {
	Time  int64  `json:"time_ns"` // in nanoseconds since 1970
	Error string `json:"error"`
	Wait  bool   `json:"wait,omitempty"` // a wait returned it; otherwise it made the rank abort
	Peer  bool   `json:"peer,omitempty"` // it is another rank's failure
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
	Call  string `json:"call"` // comm.Call.String
	Op    string `json:"op"`
	DType string `json:"dtype,omitempty"`
	Count int    `json:"count"` // elements; for a V-collective, elements sent
	// Received is the number of elements that a V-collective receives.
	Received int    `json:"received,omitempty"`
	Reduce   string `json:"reduce,omitempty"`
	Peer     int    `json:"peer"`
	Tag      uint32 `json:"tag"`
	Error    string `json:"error,omitempty"`
	// Left means that the call failed before the rank took part in it: it has no number.
	Left bool `json:"left,omitempty"`
}

// EpochDir is the prefix of the directories with the dumps of an epoch, within the directory of all dumps.
const EpochDir = "tutti-record-epoch-"

// runNames are variables of launchers that together name a run, if the first is set.
var runNames = [][]string{
	{env.Run},
	{"PMIX_NAMESPACE"},
	{"SLURM_JOB_ID", "SLURM_STEP_ID"},
	{"FLUX_JOB_ID"},
	{"PMI_JOBID"},
}

// agreed is the name on which the ranks of this process and the others have agreed; nil before.
var agreed atomic.Pointer[string]

// Agree names the run of this process's ranks, if the launcher does not. All ranks of the run agree on the name, and
// no other run has it.
func Agree(run string) { agreed.Store(&run) }

// RunName returns the name that distinguishes the records of this run from others, "" if there is none yet.
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

// Path returns the path of a rank's dump.
func Path(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("tutti-record-%d.json", rank))
}

// libraries are the prefixes of functions that do not belong to the program: those of this module, except examples and
// commands.
var libraries = []string{"tutti.", "tutti/comm", "tutti/delta", "tutti/distributed", "tutti/internal", "tutti/runtime"}

// Caller returns the program's frame: the innermost one outside this module's libraries. If a goroutine of the
// libraries made the call, it is the innermost frame. There must be at least one.
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
