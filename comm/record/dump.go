package record

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
)

// WriteJSON writes the calls of this communicator and of its sub-communicators that are
// remembered, oldest first. It can be called at any time. It has the fields of PyTorch's flight
// recorder (torch/csrc/distributed/c10d/FlightRecorder.hpp), and further ones under "tutti".
func (r *Recorder) WriteJSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(r.dump())
}

// dump is what WriteJSON writes.
func (r *Recorder) dump() *dump.File {
	open := r.open()
	top := r.top
	rank := &dump.Rank{
		Rank:  top.Rank(),
		Size:  top.WorldSize(),
		Name:  r.member,
		Host:  hostName(),
		Job:   cmp.Or(r.run, dump.RunName(os.Getenv)),
		Time:  time.Now().UnixNano(),
		Comms: map[string]dump.Member{},
		Spans: r.spans.dump(),
	}
	d := &dump.File{
		Version:  dump.Version,
		Groups:   map[string]dump.Group{},
		Statuses: map[string]dump.Status{},
		Entries:  []dump.Entry{},
		Tutti:    rank,
	}
	for id, one := range open {
		one.addTo(d, id)
	}
	slices.SortStableFunc(d.Entries, func(a, b dump.Entry) int {
		return int(min(max(a.Created-b.Created, -1), 1))
	})
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

func (r *Recorder) addTo(d *dump.File, id int) {
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
	d.Groups[r.name] = dump.Group{
		Name:  r.name,
		Desc:  groupDesc,
		Ranks: "[" + strings.Join(ranks, ", ") + "]",
	}
	enqueued := strconv.FormatUint(number.collective, 10)
	d.Statuses[strconv.Itoa(id)] = dump.Status{
		Enqueued:  enqueued,
		Started:   enqueued,
		Completed: strconv.FormatUint(last.collective, 10),
	}

	member := dump.Member{
		Rank:    r.Rank(),
		Size:    r.WorldSize(),
		Failure: failure,
	}
	if sync.number > 0 {
		member.Sync = &dump.Sync{Created: unix(sync.submitted), Completed: unix(sync.done), Pending: sync.pending,
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

func (r *Recorder) entry(e *record, group int, id uint64) dump.Entry {
	c := e.call()
	out := dump.Entry{
		RecordID: id, PgID: group, ProcessGroup: [2]string{r.name, groupDesc},
		CollectiveSeq: e.number.collective, P2PSeq: e.number.message, OpID: id,
		Created: unix(e.submitted), Completed: unix(e.done), State: "scheduled", Retired: !e.done.IsZero(),
		P2P: c.Op.Message(), Frames: framesOf(e),
		Tutti: &dump.Call{Call: c.String(), Op: c.Op.String(), Count: c.Count, Received: e.received, Peer: c.Peer, Tag: c.Tag,
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
func framesOf(e *record) []dump.Frame {
	out := []dump.Frame{}
	frames := runtime.CallersFrames(e.from[:e.depth])
	for {
		f, ok := frames.Next()
		if f.PC != 0 && !internalFrame(f) {
			out = append(out, dump.Frame{Name: f.Function, Filename: f.File, Line: f.Line})
		}
		if !ok {
			return out
		}
	}
}

// commFolder has the files of comm and the packages below it.
var commFolder = func() string {
	_, file, _, _ := runtime.Caller(0)
	return path.Dir(path.Dir(file)) + "/"
}()

// internalFrame reports whether a frame is of comm or a package below it, or of the runtime. Files say so: the compiler
// names functions that it has inlined after those that call them.
func internalFrame(f runtime.Frame) bool {
	if strings.HasPrefix(f.File, commFolder) {
		return !strings.HasSuffix(f.File, "_test.go")
	}
	return strings.HasPrefix(f.Function, "runtime.") || f.File == "<autogenerated>"
}
