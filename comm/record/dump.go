package record

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// Version is the version of PyTorch's flight recorder whose fields a [Dump] has.
const Version = "2.10"

// Dump is what a [Recorder] writes: the fields of PyTorch's flight recorder
// (torch/csrc/distributed/c10d/FlightRecorder.hpp), and further ones under "tutti". Process
// groups are communicators. The ranks of a sub-communicator are in as many dumps, so its
// "ranks" has this rank alone.
type Dump struct {
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
	Host  string            `json:"host,omitempty"` // its name, "" if it is unknown
	Time  int64             `json:"time_ns"`        // when the dump was made, in nanoseconds since 1970
	Comms map[string]Member `json:"communicators"`  // by name
	Spans []Span            `json:"spans,omitempty"`
}

// Span is a part of a program's time that it has named ([backend.Tracer]), or a wait. Times are in nanoseconds
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

// Call is a [comm.Call] in tutti's terms.
type Call struct {
	Call  string `json:"call"` // what [comm.Call.String] says
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
	// number of its own.
	Left bool `json:"left,omitempty"`
}

// WriteJSON writes the calls of this communicator and of its sub-communicators that are
// remembered, oldest first. It can be called at any time.
func (r *Recorder) WriteJSON(w io.Writer) error { return json.NewEncoder(w).Encode(r.Dump()) }

// Dump is what WriteJSON writes.
func (r *Recorder) Dump() *Dump {
	r.flight.mu.Lock()
	open := slices.Clone(r.open)
	r.flight.mu.Unlock()

	top := open[0] // is never forgotten
	rank := &Rank{
		Rank:  top.Rank(),
		Size:  top.WorldSize(),
		Host:  hostName(),
		Time:  time.Now().UnixNano(),
		Comms: map[string]Member{},
		Spans: r.spans.dump(),
	}
	d := &Dump{
		Version:  Version,
		Groups:   map[string]Group{},
		Statuses: map[string]Status{},
		Entries:  []Entry{},
		Tutti:    rank,
	}
	for id, one := range open {
		one.addTo(d, id)
	}
	slices.SortStableFunc(d.Entries, func(a, b Entry) int { return int(min(max(a.Created-b.Created, -1), 1)) })
	return d
}

// hostName is the name of this machine, "" if it is unknown.
func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

// groupDesc is the description of all groups.
const groupDesc = "tutti"

func (r *Recorder) addTo(d *Dump, id int) {
	r.mu.Lock()
	r.markDone(r.progress.done(), time.Now())
	kept := min(r.calls, uint64(len(r.ring)))
	records := make([]record, 0, kept)
	for i := r.calls - kept; i < r.calls; i++ {
		records = append(records, *r.lookup(i))
	}
	first := r.calls - kept
	number := r.number
	last := r.last
	failure := r.failure
	var sync wait
	if w := r.waits.shown(); w != nil {
		sync = *w
	}
	r.mu.Unlock()

	ranks := []string{strconv.Itoa(d.Tutti.Rank)}
	if id == 0 {
		ranks = nil
		for rank := range r.WorldSize() {
			ranks = append(ranks, strconv.Itoa(rank))
		}
	}
	d.Groups[r.name] = Group{r.name, groupDesc, "[" + strings.Join(ranks, ", ") + "]"}
	enqueued := strconv.FormatUint(number.collective, 10)
	d.Statuses[strconv.Itoa(id)] = Status{enqueued, enqueued, strconv.FormatUint(last.collective, 10)}

	member := Member{Rank: r.Rank(), Size: r.WorldSize(), Failure: failure}
	if sync.number > 0 {
		member.Sync = &Sync{Created: unix(sync.submitted), Completed: unix(sync.done), Pending: sync.pending,
			Error: errorText(sync.err), Frames: framesOf(&sync.record)}
	}
	d.Tutti.Comms[r.name] = member
	for i := range records {
		d.Entries = append(d.Entries, r.entry(&records[i], id, first+uint64(i)))
	}
}

// unix is a time of a record in nanoseconds since 1970, 0 for none.
func unix(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func (r *Recorder) entry(e *record, group int, id uint64) Entry {
	c := e.call()
	out := Entry{
		RecordID: id, PgID: group, ProcessGroup: [2]string{r.name, groupDesc},
		CollectiveSeq: e.number.collective, P2PSeq: e.number.message, OpID: id,
		Created: unix(e.submitted), Completed: unix(e.done), State: "scheduled", Retired: !e.done.IsZero(),
		P2P: c.Op.Message(), Frames: framesOf(e),
		Tutti: &Call{Call: c.String(), Op: c.Op.String(), Count: c.Count, Received: e.received, Peer: c.Peer, Tag: c.Tag,
			Error: errorText(e.err), Left: e.left},
	}
	if !e.done.IsZero() {
		out.State = "completed"
	}
	if c.Op.Reduces() {
		out.Tutti.Reduce = c.Reduce.String()
	}
	sent, received := sizes(e, r.WorldSize())
	out.InputSizes = [][]int{sent}
	out.OutputSizes = [][]int{received}
	out.InputDTypes = []string{}
	out.OutputDTypes = []string{}
	if c.Op.MovesData() {
		out.Tutti.DType = c.DType.String()
		name := cmp.Or(torchTypes[c.DType], c.DType.String())
		out.InputDTypes = []string{name}
		out.OutputDTypes = []string{name}
	}
	// The analyser knows the names of NCCL's backend only.
	out.ProfilingName = "nccl:" + torchNames[c.Op]
	switch c.Op {
	case comm.OpSend:
		out.ProfilingName += fmt.Sprintf(" %d->%d", r.Rank(), c.Peer)
	case comm.OpRecv:
		out.ProfilingName += fmt.Sprintf(" %d<-%d", r.Rank(), c.Peer)
	}
	return out
}

// sizes returns how many elements a call reads and writes. Where only the root has a
// buffer, they are the root's on all ranks.
func sizes(e *record, ranks int) (sent, received []int) {
	n := e.count
	switch e.op {
	case comm.OpAllGather, comm.OpGather:
		return []int{n}, []int{n * ranks}
	case comm.OpReduceScatter, comm.OpScatter:
		return []int{n * ranks}, []int{n}
	case comm.OpAllToAll:
		return []int{n * ranks}, []int{n * ranks}
	case comm.OpAllGatherV: // ranks send different lengths, which the analyser compares
		return []int{e.received}, []int{e.received}
	case comm.OpAllToAllV:
		return []int{n}, []int{e.received}
	case comm.OpBarrier, comm.OpSplit:
		return []int{}, []int{}
	}
	return []int{n}, []int{n}
}

// torchNames are the names of operations in PyTorch's flight recorder, which its
// analyser knows in all versions (up to 2.11 it refuses "barrier", "split" and
// "all_gather_v"; PyTorch itself calls its barrier an allreduce).
var torchNames = map[comm.Op]string{
	comm.OpAllReduce: "all_reduce", comm.OpBroadcast: "broadcast", comm.OpReduce: "reduce",
	comm.OpAllGather: "_all_gather_base", comm.OpAllGatherV: "_all_gather_base",
	comm.OpReduceScatter: "_reduce_scatter_base",
	comm.OpAllToAll:      "all_to_all", comm.OpAllToAllV: "all_to_all", comm.OpGather: "gather", comm.OpScatter: "scatter",
	comm.OpSend: "send", comm.OpRecv: "recv", comm.OpBarrier: "all_reduce_barrier", comm.OpSplit: "all_reduce_barrier",
}

// torchTypes are the names of the types in PyTorch's flight recorder.
var torchTypes = map[dtype.DType]string{
	dtype.F64: "Double", dtype.F32: "Float", dtype.F16: "Half", dtype.BF16: "BFloat16",
	dtype.FP8E4M3: "Float8_e4m3fn", dtype.FP8E5M2: "Float8_e5m2",
	dtype.I64: "Long", dtype.I32: "Int", dtype.I16: "Short", dtype.I8: "Char",
	dtype.U64: "UInt64", dtype.U32: "UInt32", dtype.U16: "UInt16", dtype.U8: "Byte",
	dtype.Bool: "Bool",
}

// framesOf returns the stack of a call without the functions of comm and the packages below it.
func framesOf(e *record) []Frame {
	out := []Frame{}
	frames := runtime.CallersFrames(e.from[:e.depth])
	for {
		f, ok := frames.Next()
		if f.PC != 0 && !internalFrame(f) {
			out = append(out, Frame{f.Function, f.File, f.Line})
		}
		if !ok {
			return out
		}
	}
}

// internalFrame reports whether a frame is of comm or a package below it, or of the runtime.
func internalFrame(f runtime.Frame) bool {
	if strings.HasPrefix(f.Function, "github.com/tutti-go/tutti/comm") {
		return !strings.Contains(f.Function, "_test.")
	}
	return strings.HasPrefix(f.Function, "runtime.") || f.File == "<autogenerated>"
}
