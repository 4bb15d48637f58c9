package record_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
)

func TestConformance(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	commtest.Run(t, commtest.Backend{
		Name:  "local",
		Sizes: []int{2},
		Run: hosttest.Decorated(local.Run, rt, func(ctx context.Context, c comm.Communicator) (comm.Communicator, error) {
			return record.New(c, 100, ""), nil
		}),
	})
}

// untold is a communicator that does not tell what is done.
type untold struct{ comm.Communicator }

func TestRemembersTheLastCalls(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 4096)
	for range 20 {
		n := 1 + random.IntN(30)
		r := record.New(untold{noop.New(rt)}, n, "")
		// The reference: everything that was called, in plain lists.
		type called struct {
			text, err       string
			collective, p2p int
			done            bool
		}
		var want []called
		collective, p2p := 0, 0
		add := func(text string, message bool, err error) {
			number := &collective
			if message {
				number = &p2p
			}
			*number++
			one := called{text: text, collective: collective, p2p: p2p}
			if err != nil {
				*number--
				one.err = err.Error()
			}
			want = append(want, one)
		}
		for range random.IntN(80) {
			switch k := random.IntN(30); random.IntN(7) {
			case 0:
				c := comm.AllReduceCall(buf, buf, k, dtype.F32, comm.Sum)
				add(c.String(), false, c.Make(r))
			case 1:
				c := comm.BroadcastCall(buf, k, dtype.U8, random.IntN(2)) // root 1 is none
				add(c.String(), false, c.Make(r))
			case 2:
				c := comm.AllGatherVCall(buf, buf, []int{k}, []int{0}, dtype.I16)
				add(c.String(), false, c.Make(r))
			case 3:
				calls := []comm.Call{comm.SendCall(buf, k, dtype.F64, 0, 1), comm.RecvCall(buf+2048, k, dtype.F64, 0, 1)}
				err := r.Group(calls...)
				add(calls[0].String(), true, err)
				add(calls[1].String(), true, err)
			case 4, 5:
				require.NoError(t, r.Sync(t.Context()))
				for i := range want {
					want[i].done = want[i].err == ""
				}
			case 6:
				require.NoError(t, r.Barrier(t.Context()))
				add("barrier", false, nil)
				for i := range want {
					want[i].done = want[i].err == ""
				}
			}
		}
		d := r.Dump()
		want = want[max(0, len(want)-n):]
		require.Len(t, d.Entries, len(want))
		for i, e := range d.Entries {
			got := called{e.Tutti.Call, e.Tutti.Error, int(e.CollectiveSeq), int(e.P2PSeq), e.Completed > 0}
			if e.Tutti.Error != "" { // its number is the next one's
				assert.True(t, e.Tutti.Left)
			}
			assert.Equal(t, want[i], got, "call %d", i)
			assert.Equal(t, got.done, e.State == "completed")
			if got.done {
				assert.GreaterOrEqual(t, e.Completed, e.Created)
			}
		}
	}
}

// A decorator whose functions the compiler has put into the program's is not the program.
func TestCallersOfInlinedDecorators(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	r := record.New(noop.New(rt), 10, "")
	c := comm.Limit(r, time.Minute, nil)
	_, _, line, _ := runtime.Caller(0)
	require.NoError(t, c.AllReduce(buf, buf, 4, dtype.F32, comm.Sum)) // line + 1
	var text bytes.Buffer
	require.NoError(t, r.WriteJSON(&text))
	var d struct {
		Entries []struct {
			Frames []struct {
				Filename string `json:"filename"`
				Line     int    `json:"line"`
			} `json:"frames"`
		} `json:"entries"`
	}
	require.NoError(t, json.Unmarshal(text.Bytes(), &d))
	require.Len(t, d.Entries, 1)
	frame := d.Entries[0].Frames[0]
	assert.Equal(t, "record_test.go", filepath.Base(frame.Filename))
	assert.Equal(t, line+1, frame.Line)
}

// TestDumpHasThePyTorchFields compares with the names that the analyser of
// PyTorch 2.10's format reads.
func TestDumpHasThePyTorchFields(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	r := record.New(untold{noop.New(rt)}, 10, "")
	_, _, line, _ := runtime.Caller(0)
	require.NoError(t, r.AllReduce(buf, buf, 4, dtype.BF16, comm.Sum)) // line + 1
	var c comm.Communicator = metered.New(r)
	require.NoError(t, c.Group(comm.SendCall(buf, 2, dtype.F32, 0, 9), comm.RecvCall(buf+32, 2, dtype.F32, 0, 9))) // line + 3
	var text bytes.Buffer
	require.NoError(t, r.WriteJSON(&text))
	var d map[string]any
	require.NoError(t, json.Unmarshal(text.Bytes(), &d))
	assert.Equal(t, "2.10", d["version"])
	assert.Equal(t, map[string]any{"0": map[string]any{"name": "0", "desc": "tutti", "ranks": "[0]"}}, d["pg_config"])
	assert.Equal(t, map[string]any{"0": map[string]any{"last_enqueued_collective": "1", "last_started_collective": "1", "last_completed_collective": "0"}}, d["pg_status"])
	entries := d["entries"].([]any)
	require.Len(t, entries, 3)
	e := entries[0].(map[string]any)
	for name, want := range map[string]any{
		"record_id": 0.0, "pg_id": 0.0, "process_group": []any{"0", "tutti"}, "collective_seq_id": 1.0, "p2p_seq_id": 0.0, "op_id": 0.0,
		"profiling_name": "nccl:all_reduce", "input_sizes": []any{[]any{4.0}}, "output_sizes": []any{[]any{4.0}},
		"input_dtypes": []any{"BFloat16"}, "output_dtypes": []any{"BFloat16"}, "state": "scheduled",
		"time_discovered_started_ns": 0.0, "time_discovered_completed_ns": 0.0, "retired": false, "timeout_ms": 0.0, "is_p2p": false,
		"thread_name": "", "thread_id": "",
	} {
		assert.Equal(t, want, e[name], name)
	}
	assert.InDelta(t, time.Now().UnixNano(), e["time_created_ns"], float64(time.Hour))
	for i, want := range []int{line + 1, line + 3, line + 3} {
		frame := entries[i].(map[string]any)["frames"].([]any)[0].(map[string]any)
		assert.Equal(t, float64(want), frame["line"], "call %d", i)
		assert.Equal(t, "record_test.go", filepath.Base(frame["filename"].(string)))
		assert.Contains(t, frame["name"], "record_test.TestDumpHasThePyTorchFields")
	}
	assert.Equal(t, "nccl:send 0->0", entries[1].(map[string]any)["profiling_name"])
	assert.Equal(t, "nccl:recv 0<-0", entries[2].(map[string]any)["profiling_name"])
	assert.Equal(t, true, entries[2].(map[string]any)["is_p2p"])
}

func TestACallThatIsNone(t *testing.T) {
	r := record.New(noop.New(hosttest.NewRuntime(t)), 10, "")
	for _, op := range []comm.Op{comm.OpSync, 200} {
		require.ErrorIs(t, r.Group(comm.Call{Op: op}), comm.ErrArgument)
	}
	require.NoError(t, r.Barrier(t.Context()))
	entries := r.Dump().Entries
	require.Len(t, entries, 3)
	assert.True(t, entries[0].Tutti.Left)
	assert.True(t, entries[1].Tutti.Left)
	assert.Equal(t, "unknown operation", entries[1].Tutti.Op)
	assert.Equal(t, uint64(1), entries[2].CollectiveSeq)
}

func TestRecordsSplitsUnderTheirName(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	require.NoError(t, local.Run(t.Context(), 4, func(ctx context.Context, c comm.Communicator) error {
		r := record.New(c, 10, "")
		half, err := r.Split(ctx, r.Rank()%2, 0)
		if err != nil {
			return err
		}
		buf, err := rt.Allocate(64)
		if err != nil {
			return err
		}
		if err := half.Broadcast(buf, 3, dtype.I16, 0); err != nil {
			return err
		}
		if err := half.Sync(ctx); err != nil {
			return err
		}
		name := fmt.Sprintf("0/1.%d", c.Rank()%2)
		d := r.Dump()
		assert.Equal(t, "split", d.Entries[0].Tutti.Op)
		assert.Equal(t, [2]string{name, "tutti"}, d.Entries[1].ProcessGroup)
		assert.Equal(t, dump.Member{Rank: c.Rank() / 2, Size: 2, Sync: d.Tutti.Comms[name].Sync}, d.Tutti.Comms[name])
		assert.NotNil(t, d.Tutti.Comms[name].Sync)
		if err := half.Close(); err != nil {
			return err
		}
		assert.Len(t, r.Dump().Entries, 1, "closed")
		return rt.Deallocate(buf)
	}))
}

// interrupted is a communicator whose Split does something before it returns, as another goroutine may.
type interrupted struct {
	comm.Communicator
	hook func() error
}

func (c *interrupted) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	child, err := c.Communicator.Split(ctx, color, key)
	return child, errors.Join(err, c.hook())
}

// Sub-communicators have one name on all ranks, and no other has it, also where a rank has recorded more calls
// meanwhile than it remembers.
func TestNamesOfSplits(t *testing.T) {
	const splits = 4
	names := make([][]string, 2)
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		var r *record.Recorder
		r = record.New(&interrupted{c, func() error {
			if c.Rank() == 0 {
				return r.Barrier(ctx)
			}
			return nil
		}}, 1, "")
		for range splits {
			child, err := r.Split(ctx, 0, 0)
			if err != nil {
				return err
			}
			if c.Rank() == 1 {
				if err := r.Barrier(ctx); err != nil {
					return err
				}
			}
			for name := range r.Dump().Tutti.Comms {
				if name != "0" {
					names[c.Rank()] = append(names[c.Rank()], name)
				}
			}
			if err := child.Close(); err != nil {
				return err
			}
		}
		return nil
	}))
	assert.Equal(t, names[0], names[1])
	slices.Sort(names[0])
	assert.Len(t, slices.Compact(names[0]), splits)
}

func TestWritesWhenAWaitFails(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	rt := hosttest.NewRuntime(t)
	c := record.New(noop.New(rt), 5, dir)
	buf := hosttest.Allocate(t, rt, 64)
	require.NoError(t, c.AllReduce(buf, buf, 2, dtype.F32, comm.Sum))
	require.NoError(t, c.Sync(t.Context()))
	path := filepath.Join(dir, "tutti-record-0.json")
	require.NoFileExists(t, path)
	require.NoError(t, c.Recv(buf, 2, dtype.F32, 0, 3)) // nobody sends
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	cause := c.Sync(ctx)
	require.Error(t, cause)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var d dump.File
	require.NoError(t, json.Unmarshal(text, &d))
	require.Len(t, d.Entries, 2)
	assert.Equal(t, "completed", d.Entries[0].State)
	assert.Equal(t, "scheduled", d.Entries[1].State)
	assert.Contains(t, d.Tutti.Comms["0"].Sync.Error, "canceled")
	failure := d.Tutti.Comms["0"].Failure
	require.NotNil(t, failure)
	assert.Equal(t, dump.Failure{Time: failure.Time, Error: cause.Error(), Wait: true}, *failure)
	assert.GreaterOrEqual(t, d.Tutti.Time, failure.Time)

	require.NoError(t, os.Remove(path))
	require.ErrorIs(t, c.Sync(t.Context()), comm.ErrBroken)
	c.Abort(fmt.Errorf("step 7: %w", cause))
	assert.NoFileExists(t, path, "once for a failure and what follows from it")
}

// The dump of a rank that aborts says why, and whether another rank is the cause.
func TestWritesWhyTheRankAborted(t *testing.T) {
	for cause, peer := range map[error]bool{
		errors.New("no disk space"):                  false,
		fmt.Errorf("step 7: %w", comm.ErrPeerFailed): true,
		fmt.Errorf("step 7: %w", comm.ErrBroken):     true,
	} {
		dir := t.TempDir()
		r := record.New(noop.New(hosttest.NewRuntime(t)), 5, dir)
		r.Abort(cause)
		text, err := os.ReadFile(filepath.Join(dir, "tutti-record-0.json"))
		require.NoError(t, err)
		var d dump.File
		require.NoError(t, json.Unmarshal(text, &d))
		failure := d.Tutti.Comms["0"].Failure
		require.NotNil(t, failure)
		assert.Equal(t, dump.Failure{Time: failure.Time, Error: cause.Error(), Peer: peer}, *failure)
	}
}

// ofWorld is a communicator of a rank whose peers are in other processes.
type ofWorld struct {
	comm.Communicator
	size int
}

func (w ofWorld) WorldSize() int { return w.size }

// A rank that aborts waits for the dumps of other processes, but not without end, and not
// for those of this process or of an earlier job.
func TestWaitsForDumpsOfPeers(t *testing.T) {
	for _, test := range []struct {
		name  string
		peers []string // tutti-record-1.json and on: written before, old, here or written after a second
		wait  time.Duration
	}{
		{"alone", nil, 0},
		{"written", []string{"written"}, 0},
		{"of this process", []string{"here"}, 0},
		{"late", []string{"written", "late", "here"}, time.Second},
		{"missing", []string{"written", "missing"}, 2 * time.Second},
		{"of an earlier job", []string{"old"}, 2 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			rt := hosttest.NewRuntime(t)
			synctest.Test(t, func(t *testing.T) {
				size := 1 + len(test.peers)
				r := record.New(ofWorld{noop.New(rt), size}, 5, dir)
				for i, peer := range test.peers {
					path := filepath.Join(dir, fmt.Sprintf("tutti-record-%d.json", i+1))
					write := func() { assert.NoError(t, os.WriteFile(path, nil, 0o600)) }
					switch peer {
					case "written":
						write()
					case "here":
						record.New(ofRank{noop.New(rt), i + 1}, 5, dir)
					case "late":
						time.AfterFunc(time.Second, write)
					case "old":
						write()
						require.NoError(t, os.Chtimes(path, time.Time{}, time.Unix(1, 0)))
					}
				}
				begin := time.Now() // of a clock that stands while anything runs
				r.Abort(errors.New("no disk space"))
				assert.InDelta(t, test.wait, time.Since(begin), float64(20*time.Millisecond))
			})
		})
	}
}

// ofRank is a communicator of a rank of this process.
type ofRank struct {
	comm.Communicator
	rank int
}

func (r ofRank) Rank() int { return r.rank }

func TestDoesNotAllocate(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	r := record.New(noop.New(rt), 16, "")
	counts, displs := []int{4}, []int{0}
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		_ = r.AllReduce(buf, buf, 4, dtype.F32, comm.Sum)
		_ = r.AllGatherV(buf, buf, counts, displs, dtype.F32)
		_ = r.Sync(context.Background())
		_ = r.Barrier(context.Background())
	}))
}

// nothing is a communicator whose AllReduce is free.
type nothing struct{ comm.Communicator }

func (nothing) AllReduce(_, _ uintptr, _ int, _ dtype.DType, _ comm.ReduceOp) error { return nil }

func BenchmarkRecorder(b *testing.B) {
	rt := hosttest.NewRuntime(b)
	bare := nothing{noop.New(rt)}
	var sink time.Duration
	start := time.Now()
	b.Run("clock", func(b *testing.B) {
		for b.Loop() {
			sink += time.Since(start)
		}
	})
	buf := hosttest.Allocate(b, rt, 64)
	for _, of := range []struct {
		name string
		comm.Communicator
	}{{"nothing", bare}, {"noop", noop.New(rt)}} {
		for name, c := range map[string]comm.Communicator{"bare": of.Communicator, "recorded": record.New(of.Communicator, 1000, "")} {
			b.Run(of.name+"/"+name, func(b *testing.B) {
				for b.Loop() {
					_ = c.AllReduce(buf, buf, 4, dtype.F32, comm.Sum)
				}
			})
		}
	}
}

// A rank that waited in a Barrier when another one aborted has called it.
func TestBarrierThatBroke(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // no rank spins by a clock that stands
	synctest.Test(t, func(t *testing.T) {
		worlds, err := local.New(3)
		require.NoError(t, err)
		var recorders []*record.Recorder
		for _, c := range worlds {
			recorders = append(recorders, record.New(c, 4, ""))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		failed := make(chan error, 2)
		go func() { failed <- recorders[0].Barrier(ctx) }()
		go func() { failed <- recorders[1].Barrier(t.Context()) }()
		assert.Error(t, <-failed)
		assert.Error(t, <-failed)
		for _, r := range recorders[:2] {
			e := r.Dump().Entries[0]
			assert.False(t, e.Tutti.Left, e.Tutti.Error)
			assert.ErrorIs(t, r.Barrier(t.Context()), comm.ErrBroken)
			assert.True(t, r.Dump().Entries[1].Tutti.Left, "it was broken before")
		}
		for _, c := range worlds {
			_ = c.Close()
		}
	})
}

// The same when what another rank failed with says that an argument was wrong.
func TestBarrierOfFailedPeer(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // no rank spins by a clock that stands
	synctest.Test(t, func(t *testing.T) {
		worlds, err := local.New(2)
		require.NoError(t, err)
		r := record.New(worlds[0], 4, "")
		failed := make(chan error)
		go func() { failed <- r.Barrier(t.Context()) }()
		synctest.Wait()
		worlds[1].Abort(comm.ErrArgument)
		assert.ErrorIs(t, <-failed, comm.ErrPeerFailed)
		assert.False(t, r.Dump().Entries[0].Tutti.Left)
		require.NoError(t, r.Close())
	})
}

// A call of one goroutine that is not made leaves no gap in the numbers of calls
// that other goroutines have made meanwhile.
func TestNumbersOfSeveralGoroutines(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	entered, leave := make(chan struct{}), make(chan struct{})
	r := record.New(held{noop.New(rt), entered, leave}, 8, "")
	refused := make(chan error)
	go func() { refused <- r.Broadcast(buf, 1, dtype.F32, 5) }() // there is no root 5
	<-entered
	require.NoError(t, r.AllReduce(buf, buf, 4, dtype.F32, comm.Sum))
	require.NoError(t, r.AllReduce(buf, buf, 4, dtype.F32, comm.Sum))
	close(leave)
	require.ErrorIs(t, <-refused, comm.ErrArgument)
	require.NoError(t, r.AllReduce(buf, buf, 4, dtype.F32, comm.Sum))
	var numbers []uint64
	for _, e := range r.Dump().Entries[1:] {
		numbers = append(numbers, e.CollectiveSeq)
	}
	assert.Equal(t, []uint64{1, 2, 3}, numbers)
	assert.True(t, r.Dump().Entries[0].Tutti.Left)
}

// held is a communicator whose broadcasts wait.
type held struct {
	comm.Communicator
	entered, leave chan struct{}
}

func (h held) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	close(h.entered)
	<-h.leave
	return h.Communicator.Broadcast(buf, count, dt, root)
}

// waiting is a communicator whose Syncs end with what they are told.
type waiting struct {
	comm.Communicator
	entered chan chan error
}

func (w waiting) Sync(context.Context) error {
	end := make(chan error)
	w.entered <- end
	return <-end
}

// Completed calls are known before anybody waits for them, if the communicator tells.
func TestLearnsOfWhatIsDone(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := [2]uintptr{hosttest.Allocate(t, rt, 4096), hosttest.Allocate(t, rt, 4096)}
	worlds, err := local.New(2)
	require.NoError(t, err)
	r := record.New(metered.New(worlds[0]), 8, "")
	done := func() (done []bool) {
		for _, e := range r.Dump().Entries {
			done = append(done, e.Completed >= e.Created && e.State == "completed")
		}
		return done
	}
	reduce := func(rank int, c comm.Communicator) {
		require.NoError(t, c.AllReduce(buf[rank], buf[rank], 1000, dtype.F32, comm.Sum))
	}
	reduce(0, r)
	reduce(0, r)
	reduce(1, worlds[1])
	require.NoError(t, worlds[1].Sync(t.Context()))
	assert.Equal(t, []bool{true, false}, done())
	require.NoError(t, r.Recv(buf[0], 1, dtype.F32, 1, 1))
	require.NoError(t, r.Recv(buf[0]+8, 1, dtype.F32, 1, 2))
	reduce(1, worlds[1])
	require.NoError(t, worlds[1].Send(buf[1], 1, dtype.F32, 0, 2))
	assert.Equal(t, []bool{true, true, false, false}, done(), "messages are told in order")
	require.NoError(t, worlds[1].Send(buf[1], 1, dtype.F32, 0, 1))
	assert.Equal(t, []bool{true, true, true, true}, done())
	assert.Equal(t, "2", r.Dump().Statuses["0"].Completed)

	// A call looks now and then, so that there is a time without a dump.
	first := r.Dump().Entries[0].Completed
	pass(time.Millisecond) // two dumps may differ by less
	for range 4 {
		reduce(0, r)
		reduce(1, worlds[1])
	}
	require.NoError(t, worlds[1].Sync(t.Context()))
	reduce(0, r) // the ninth
	last := r.Dump().Entries
	require.Len(t, last, 8)
	for i, e := range last[3:7] {
		assert.Equal(t, last[7].Created, e.Completed, "call %d", i)
	}
	assert.Less(t, first, last[3].Completed)
	assert.Equal(t, []bool{true, true, true, true, true, true, true, false}, done())
	reduce(1, worlds[1])
	require.NoError(t, r.Sync(t.Context()))
	assert.NotContains(t, done(), false)
	for _, c := range []comm.Communicator{r, worlds[1]} {
		require.NoError(t, c.Close())
	}
}

// Which of two messages of two goroutines is submitted first is not known: only a wait
// tells that they are done.
func TestOfGoroutinesAtTheSameTime(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	entered, leave := make(chan struct{}), make(chan struct{})
	r := record.New(late{comm.Wrap(metered.New(noop.New(rt))), entered, leave}, 8, "")
	done := make(chan error)
	go func() { done <- r.Recv(buf, 1, dtype.F32, 0, 1) }()
	<-entered
	require.NoError(t, r.Send(buf+8, 1, dtype.F32, 0, 2)) // overtakes it
	require.NoError(t, r.AllReduce(buf+16, buf+16, 1, dtype.F32, comm.Sum))
	close(leave)
	require.NoError(t, <-done)
	require.NoError(t, r.Send(buf+24, 1, dtype.F32, 0, 1))
	states := func() (states []string) {
		for _, e := range r.Dump().Entries {
			states = append(states, e.State)
		}
		return states
	}
	const no, yes = "scheduled", "completed"
	assert.Equal(t, []string{no, no, no, no}, states(), "of the first two it is not known, the others wait")
	go func() { done <- r.Recv(buf+32, 1, dtype.F32, 0, 2) }()
	<-entered
	require.NoError(t, <-done)
	assert.Equal(t, []string{no, no, yes, yes, yes}, states())
	require.NoError(t, r.Sync(t.Context()))
	assert.Equal(t, []string{yes, yes, yes, yes, yes}, states())
}

// pass lets a duration pass.
func pass(d time.Duration) {
	for start := time.Now(); time.Since(start) < d; {
	}
}

// late is a communicator whose receives wait before they are submitted.
type late struct {
	comm.Wrapped
	entered, leave chan struct{}
}

func (l late) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	l.entered <- struct{}{}
	<-l.leave
	return l.Communicator.Recv(buf, count, dt, src, tag)
}

// Of several goroutines that wait, the record shows the one that waits longest, and
// when one has failed that one, whose failure ends the others.
func TestShowsTheRightOneOfSeveralWaits(t *testing.T) {
	r := record.New(waiting{noop.New(hosttest.NewRuntime(t)), make(chan chan error)}, 8, "")
	inner := r.Communicator.(waiting)
	shown := func() dump.Sync { return *r.Dump().Tutti.Comms["0"].Sync }
	begin := func() (end, ended chan error) {
		ended = make(chan error)
		go func() { ended <- r.Sync(t.Context()) }()
		return <-inner.entered, ended
	}
	var ends, ended [3]chan error
	for i := range ends {
		ends[i], ended[i] = begin()
		pass(time.Millisecond)
	}
	first := shown()
	assert.True(t, first.Pending)
	ends[1] <- nil
	require.NoError(t, <-ended[1])
	assert.InDelta(t, first.Created, shown().Created, float64(time.Millisecond/2), "the first one still waits")
	ends[0] <- nil
	require.NoError(t, <-ended[0])
	third := shown()
	assert.True(t, third.Pending)
	assert.Greater(t, third.Created, first.Created+int64(time.Millisecond/2))

	ends[0], ended[0] = begin()
	ends[0] <- comm.ErrTimeout
	require.ErrorIs(t, <-ended[0], comm.ErrTimeout)
	ends[2] <- fmt.Errorf("%w: %w", comm.ErrBroken, comm.ErrTimeout)
	require.ErrorIs(t, <-ended[2], comm.ErrBroken)
	assert.Equal(t, "timed out", shown().Error)
	assert.False(t, shown().Pending)
}

// The record of a rank names the run of its world, below other decorators and for sub-communicators, too, so that the
// ranks of two worlds of one process are told apart.
func TestNamesRunOfWorld(t *testing.T) {
	seen := map[string]bool{}
	for range 2 {
		worlds, err := local.New(2)
		require.NoError(t, err)
		first := record.New(metered.New(worlds[0]), 1, "").Dump().Tutti.Job
		assert.NotEmpty(t, first)
		assert.Equal(t, first, record.New(worlds[1], 1, "").Dump().Tutti.Job)
		assert.False(t, seen[first], first)
		seen[first] = true
		for _, c := range worlds {
			require.NoError(t, c.Close())
		}
	}
}
