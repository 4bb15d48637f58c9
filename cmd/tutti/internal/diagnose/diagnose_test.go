package diagnose

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestNewest checks that the last epoch of an elastic job with a dump counts, or an earlier one on request.
func TestNewest(t *testing.T) {
	dir := t.TempDir()
	for number, age := range map[string]time.Duration{"": 4 * time.Hour, "9": 3 * time.Hour, "10": time.Hour, "11": 2 * time.Hour} {
		at := dir
		if number != "" {
			at = filepath.Join(dir, dump.EpochDir+number)
			require.NoError(t, os.Mkdir(at, 0o777))
		}
		path := filepath.Join(at, "tutti-record-0.json")
		require.NoError(t, os.WriteFile(path, []byte(`{"version":"2.10","tutti":{"rank":0,"world_size":1}}`), 0o600))
		require.NoError(t, os.Chtimes(path, time.Time{}, time.Now().Add(-age)))
	}
	for of, want := range map[string]string{dir: "10", filepath.Join(dir, dump.EpochDir+"9"): "9"} {
		records, _, err := ReadFiles([]string{of})
		require.NoError(t, err)
		require.Len(t, records, 1)
		assert.Equal(t, filepath.Join(dir, dump.EpochDir+want, "tutti-record-0.json"), records[0].Name)
	}
}

// TestARankThatDoesNotCall runs three ranks, the last of which does not make the second allreduce. It reads their
// records with and without that rank's.
func TestARankThatDoesNotCall(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(env.Record, "100")
	t.Setenv(env.RecordDir, dir)
	rt := cpu.New()
	defer rt.Close()
	buf := make([]uintptr, 3)
	for i := range buf {
		var err error
		buf[i], err = rt.Allocate(1 << 20)
		require.NoError(t, err)
		defer rt.Deallocate(buf[i])
	}
	_, file, here, _ := runtime.Caller(0)
	const first, second = 7, 14 // lines of the calls, relative to that line
	var called, gaveUp sync.WaitGroup
	called.Add(3)
	gaveUp.Add(2)
	body := func(ctx context.Context, c comm.Communicator) error {
		b := buf[c.Rank()]
		if err := c.AllReduce(b, b, 1<<18, dtype.F32, comm.Sum); err != nil {
			return err
		}
		if err := c.Sync(ctx); err != nil {
			return err
		}
		if c.Rank() < 2 {
			err := c.AllReduce(b, b, 1<<18, dtype.F32, comm.Max)
			called.Done()
			called.Wait()
			ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			assert.Error(t, c.Sync(ctx))
			gaveUp.Done()
			return err
		}
		called.Done() // returned from the first call, which ends with an error once another rank has aborted
		gaveUp.Wait()
		assert.Error(t, c.Barrier(ctx))
		return nil
	}
	require.NoError(t, local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		return instrument.Run(ctx, rt, c, body)
	}))
	place := func(line int) string { return fmt.Sprintf("%s:%d", filepath.Base(file), here+line) }

	records, _, err := ReadFiles([]string{dir})
	require.NoError(t, err)
	report := Diagnose(records)
	want := Finding{Kind: NotCalled, Communicator: "0", Number: 2, Ranks: []int{2}, Waiting: []int{0, 1},
		Text: "rank 2 has not called allreduce #2 (1 MiB f32 max, " + place(second) + "); its last was allreduce #1 (1 MiB f32 sum, " +
			place(first) + "), which is done; ranks 0, 1 wait"}
	assert.Equal(t, []Finding{want}, report.Findings)
	assert.Len(t, report.States, 3)

	require.NoError(t, os.Remove(filepath.Join(dir, "tutti-record-2.json")))
	records, _, err = ReadFiles([]string{dir})
	require.NoError(t, err)
	report = Diagnose(records)
	require.Len(t, report.Findings, 2)
	assert.Equal(t, NoDump, report.Findings[0].Kind)
	assert.Equal(t, []int{2}, report.Findings[0].Ranks)
	assert.Equal(t, Unfinished, report.Findings[1].Kind)
	assert.Equal(t, []int{0, 1}, report.Findings[1].Waiting)
}

// TestAStoppedRankGoesOn checks that a stopped rank that makes its next call after the others have aborted does not
// blame them. A rank that was stopped before a call that the others made is blamed.
func TestAStoppedRankGoesOn(t *testing.T) {
	sum := comm.AllReduceCall(0, 0, 1024, dtype.F32, comm.Sum)
	lost := func(d Record, at int64) Record {
		m := d.Tutti.Comms["0"]
		m.Failure = &dump.Failure{Time: at, Error: "peer failed: nothing has come from rank 0 for 10s", Wait: true, Peer: true}
		d.Tutti.Comms["0"] = m
		return d
	}
	left := func(d Record, at int64) Record {
		d = lost(d, at)
		d.Tutti.Comms["0"].Failure.Error = "peer failed: rank 1 has left"
		return d
	}
	one, two := []comm.Call{sum}, []comm.Call{sum, sum}
	for _, test := range []struct {
		records []Record
		kind    string
		ranks   []int
		text    string
	}{
		{[]Record{recorded(0, 3, two), lost(recorded(1, 3, one), 10), lost(recorded(2, 3, one), 11)}, Late, []int{0},
			"ranks 1, 2 aborted before allreduce #2 (4 KiB f32, unknown line), which rank 0 has called: peer failed: nothing has come from rank 0 for 10s"},
		{[]Record{left(recorded(0, 3, two), 20), lost(recorded(1, 3, one), 11), lost(recorded(2, 3, one), 10)}, Late, []int{0},
			"ranks 1, 2 aborted before allreduce #2 (4 KiB f32, unknown line), which rank 0 has called: peer failed: nothing has come from rank 0 for 10s"},
		{[]Record{left(recorded(0, 3, one), 20), lost(recorded(1, 3, two), 11), lost(recorded(2, 3, two), 10)}, NotCalled, []int{0},
			"rank 0 has not called allreduce #2 (4 KiB f32, unknown line)"},
		{[]Record{recorded(0, 3, two), lost(recorded(1, 3, one), 10), recorded(2, 3, one)}, NotCalled, []int{1, 2},
			"ranks 1, 2 have not called allreduce #2"},
	} {
		findings := Diagnose(test.records).Findings
		require.Len(t, findings, 1)
		assert.Equal(t, test.kind, findings[0].Kind)
		assert.Equal(t, test.ranks, findings[0].Ranks)
		assert.Contains(t, findings[0].Text, test.text)
	}
}

// recorded returns the record of a rank that made the calls.
func recorded(rank, ranks int, calls []comm.Call) Record {
	d := &dump.File{Version: dump.Version, Tutti: &dump.Rank{Rank: rank, Size: ranks, Comms: map[string]dump.Member{"0": {Rank: rank, Size: ranks}}}}
	var collective, message uint64
	for i, c := range calls {
		if c.Op.Message() {
			message++
		} else {
			collective++
		}
		d.Entries = append(d.Entries, dump.Entry{RecordID: uint64(i), ProcessGroup: [2]string{"0", "tutti"}, CollectiveSeq: collective, P2PSeq: message, P2P: c.Op.Message(),
			Tutti: &dump.Call{Call: c.String(), Op: c.Op.String(), DType: c.DType.String(), Count: c.Count, Peer: c.Peer, Tag: c.Tag}})
	}
	return Record{fmt.Sprint(rank), d}
}

// TestRandomJobs removes or changes one call of one rank and expects a finding about it.
func TestRandomJobs(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		ranks, n := 2+random.IntN(5), 1+random.IntN(20)
		calls := make([]comm.Call, n)
		for i := range calls {
			calls[i] = comm.BroadcastCall(0, 1+i, dtype.F32, random.IntN(ranks)) // all different
		}
		culprit, at := random.IntN(ranks), random.IntN(n)
		kind := []string{"", NotCalled, Mismatch}[random.IntN(3)]
		var records []Record
		for r := range ranks {
			mine := append([]comm.Call(nil), calls...)
			if r == culprit && kind == NotCalled {
				mine = mine[:at]
			} else if r == culprit && kind == Mismatch {
				mine[at].Count += 1000
			}
			records = append(records, recorded(r, ranks, mine))
		}
		findings := Diagnose(records).Findings
		if kind == "" {
			require.Empty(t, findings)
			continue
		}
		require.Len(t, findings, 1)
		f := findings[0]
		require.Equal(t, kind, f.Kind)
		require.Equal(t, uint64(at+1), f.Number)
		if kind == NotCalled {
			require.Equal(t, []int{culprit}, f.Ranks)
			require.Len(t, f.Waiting, ranks-1)
		} else {
			require.Contains(t, f.Text, fmt.Sprintf("rank %d called broadcast (%s f32, root", culprit, bytesText(at+1001, 4)))
		}
	}
}

func TestMessagesWithoutPartner(t *testing.T) {
	send := func(to int, tag uint32, n int) comm.Call { return comm.SendCall(0, n, dtype.F32, to, tag) }
	recv := func(from int, tag uint32, n int) comm.Call { return comm.RecvCall(0, n, dtype.F32, from, tag) }
	for name, test := range map[string]struct {
		zero, one []comm.Call
		want      string // "" for no finding
	}{
		"paired":     {[]comm.Call{send(1, 3, 8)}, []comm.Call{recv(0, 3, 8)}, ""},
		"not sent":   {nil, []comm.Call{recv(0, 3, 8)}, "rank 1 waits in recv (32 B f32, from rank 0, tag 3, unknown line), and rank 0 has not sent it"},
		"other tag":  {[]comm.Call{send(1, 4, 8)}, []comm.Call{recv(0, 3, 8)}, "and rank 0 has not sent it"},
		"not taken":  {[]comm.Call{send(1, 3, 8)}, nil, "rank 0 waits in send (32 B f32, to rank 1, tag 3, unknown line), and rank 1 has not received it"},
		"other size": {[]comm.Call{send(1, 3, 8)}, []comm.Call{recv(0, 3, 9)}, "ranks disagree about message 1"},
	} {
		t.Run(name, func(t *testing.T) {
			var text string
			for _, f := range Diagnose([]Record{recorded(0, 2, test.zero), recorded(1, 2, test.one)}).Findings {
				text += f.Text + "\n"
			}
			assert.Contains(t, text, test.want)
			assert.Equal(t, test.want == "", text == "", text)
		})
	}
}

// at converts seconds to a time.
func at(seconds float64) int64 { return int64(1e18 + seconds*1e9) }

// allReduces returns the records of ranks that each made some allreduces, one per second. All but the last have
// ended.
func allReduces(made ...int) []Record {
	records := make([]Record, len(made))
	for rank, n := range made {
		calls := make([]comm.Call, n)
		for i := range calls {
			calls[i] = comm.AllReduceCall(0, 0, 4, dtype.F32, comm.Sum)
		}
		records[rank] = recorded(rank, len(made), calls)
		for i := range n {
			records[rank].Entries[i].Created = at(float64(i))
			if i < n-1 {
				records[rank].Entries[i].Completed = at(float64(i) + 0.5)
			}
		}
	}
	return records
}

// TestMembers checks that the names of elastic members accompany the ranks of the epoch.
func TestMembers(t *testing.T) {
	records := allReduces(3, 2, 3)
	for i, name := range []string{"rank 0", "rank 2", "rank 1"} {
		records[i].Tutti.Name = name
	}
	report := Diagnose(records)
	require.Len(t, report.Findings, 1)
	assert.Regexp(t, `^rank 1 has not called .* \(rank 1 is member "rank 2"\)$`, report.Findings[0].Text)
	assert.Equal(t, "rank 2", report.States[1].Name)
}

// fail adds a failure to a rank's record.
func fail(r Record, f dump.Failure) {
	m := r.Tutti.Comms["0"]
	m.Failure = &f
	if f.Wait {
		m.Sync = &dump.Sync{Created: f.Time - 1, Error: f.Error}
	}
	r.Tutti.Comms["0"] = m
}

// A rank that aborted for a reason other than a peer is named, the earliest first, even if no rank waits.
func TestARankThatFailsFirst(t *testing.T) {
	records := allReduces(1, 1, 1, 1)
	fail(records[3], dump.Failure{Time: at(4), Error: "no memory"})
	fail(records[1], dump.Failure{Time: at(3), Error: "no disk space"})
	fail(records[0], dump.Failure{Time: at(2), Error: "rank 1: no disk space", Peer: true}) // by its clock
	report := Diagnose(records)
	require.NotEmpty(t, report.Findings)
	assert.Equal(t, Finding{Kind: Failed, Ranks: []int{1, 3},
		Text: "rank 1 aborted because of an error of its own: no disk space; later rank 3 did as well"}, report.Findings[0])
	assert.Equal(t, "no disk space", report.States[1].Error)

	// A body that returns a wait's error has no other error.
	records = allReduces(1, 1)
	records[0].Tutti.Comms["0/1.0"] = dump.Member{Size: 1, Failure: &dump.Failure{Time: at(2), Error: "timeout", Wait: true}}
	fail(records[0], dump.Failure{Time: at(3), Error: "step 7: timeout"})
	for _, f := range Diagnose(records).Findings {
		assert.NotEqual(t, Failed, f.Kind, f.Text)
	}
}

// A stopped rank that went on after the others had aborted is named.
func TestAStoppedRankThatGoesOn(t *testing.T) {
	timeout := dump.Failure{Time: at(12), Error: "timeout", Wait: true}
	peer := dump.Failure{Time: at(12.01), Error: "rank 0 aborted", Wait: true, Peer: true}
	for name, test := range map[string]struct {
		change func(stopped Record)
		want   string
	}{
		"before its call": {func(r Record) {
			r.Entries[2].Created = at(20)
			fail(r, dump.Failure{Time: at(20.1), Error: "rank 0 aborted", Wait: true, Peer: true})
		}, "rank 2 had not called allreduce #3 (16 B f32, unknown line) when rank 0 aborted; rank 2 called it 8s after that; " +
			"its last was allreduce #2 (16 B f32, unknown line), which is done; ranks 0, 1 wait"},
		"in its wait": {func(r Record) {
			fail(r, dump.Failure{Time: at(20), Error: "timeout", Wait: true})
		}, "all ranks have called allreduce #3 (16 B f32, unknown line); ranks 0, 1 wait; " +
			"rank 2 went on only 8s after rank 0 had aborted: stopped, or busy with something else"},
		"in its wait, which succeeds": {func(r Record) {
			r.Entries[2].Completed = at(20)
			later := r.Entries[2]
			later.CollectiveSeq, later.Created, later.Completed = 4, at(20.1), 0
			r.Entries = append(r.Entries, later)
		}, "all ranks have called allreduce #3 (16 B f32, unknown line); ranks 0, 1 wait; " +
			"rank 2 went on only 8s after rank 0 had aborted: stopped, or busy with something else"},
	} {
		t.Run(name, func(t *testing.T) {
			records := allReduces(3, 3, 3)
			fail(records[0], timeout)
			fail(records[1], peer)
			test.change(records[2])
			findings := Diagnose(records).Findings
			require.Len(t, findings, 1)
			assert.Equal(t, Late, findings[0].Kind)
			assert.Equal(t, []int{2}, findings[0].Ranks)
			assert.Equal(t, test.want, findings[0].Text)
		})
	}
}

// Records of a job that is still running are written one after the other. They say so and accuse nobody.
func TestRecordsOfDifferentTimes(t *testing.T) {
	records := allReduces(5, 3, 5, 2)
	for rank, milliseconds := range []float64{10, 8, 10, 2} {
		records[rank].Tutti.Time = at(milliseconds / 1000)
	}
	findings := Diagnose(records).Findings
	require.Len(t, findings, 1)
	assert.Equal(t, Contradiction, findings[0].Kind)
	assert.Equal(t, []int{1, 3}, findings[0].Ranks)
	assert.Equal(t, "the records were taken at different times, up to 8ms apart: allreduce #4 (16 B f32, unknown line) is done on rank 0, "+
		"and ranks 1, 3 had not called it before", findings[0].Text)
}

// Records that cannot be true together accuse nobody.
func TestContradictions(t *testing.T) {
	recv := comm.RecvCall(0, 4, dtype.F32, 0, 3)
	for name, test := range map[string]struct {
		records func() []Record
		want    string
	}{
		"done without a rank": {func() []Record {
			records := allReduces(5, 3)
			records[0].Tutti.Time, records[1].Tutti.Time = at(3.5), at(10)
			return records
		}, "allreduce #4 (16 B f32, unknown line) is done on rank 0, and rank 1 has not called it"},
		"one of two earlier": {func() []Record {
			records := allReduces(5, 3, 3)
			for rank, seconds := range []float64{10, 3.5, 10} {
				records[rank].Tutti.Time = at(seconds)
			}
			return records
		}, "allreduce #4 (16 B f32, unknown line) is done on rank 0, and ranks 1, 2 have not called it"},
		"of several sizes": {func() []Record {
			records := allReduces(1, 1, 1)
			for rank, size := range []int{2, 2, 3} {
				records[rank].Tutti.Comms["0/1.0"] = dump.Member{Rank: rank, Size: size}
			}
			return records
		}, "rank 0 is one of 2 ranks, and rank 2 of 3 of communicator 0/1.0"},
		"with one number": {func() []Record {
			records := allReduces(1, 1)
			for rank := range 2 {
				records[rank].Tutti.Comms["0/1.0"] = dump.Member{Rank: 1, Size: 2}
			}
			return records
		}, "both rank 0 and rank 1 are number 1 of communicator 0/1.0"},
		"two calls in one": {func() []Record {
			records := allReduces(3, 3)
			records[1].Entries[2].CollectiveSeq = 2
			return records
		}, "rank 1 made two calls as collective #2"},
		"received without a send": {func() []Record {
			records := []Record{recorded(0, 2, nil), recorded(1, 2, []comm.Call{recv})}
			records[1].Entries[0].Completed = at(1)
			return records
		}, "recv (16 B f32, from rank 0, tag 3, unknown line) is done on rank 1, and rank 0 has not sent it"},
	} {
		t.Run(name, func(t *testing.T) {
			findings := Diagnose(test.records()).Findings
			require.Len(t, findings, 1)
			assert.Equal(t, Contradiction, findings[0].Kind)
			assert.Equal(t, "the records contradict each other: "+test.want, findings[0].Text)
		})
	}
	// A rank whose record is full of messages has called the earlier collectives.
	records := allReduces(2, 2)
	records[0].Entries[1].Completed = at(3)
	delete(records[1].Tutti.Comms, "")
	message := recorded(1, 2, []comm.Call{comm.SendCall(0, 4, dtype.F32, 0, 3)}).Entries[0]
	message.CollectiveSeq, message.RecordID, message.Completed = 2, 7, at(4)
	records[1].Entries = []dump.Entry{message}
	assert.Empty(t, Diagnose(records).Findings)
}

// Lines are for people: they contain no control characters of a record and no list of a million ranks.
func TestLinesAreForPeople(t *testing.T) {
	records := allReduces(1, 2)
	records[1].Entries[1].Tutti.Call, records[1].Entries[1].Frames = "x", []dump.Frame{{Name: "f", Filename: "\x1b]0;owned\a.go", Line: 7}}
	fail(records[0], dump.Failure{Time: at(3), Error: "\x1b[2Jall is well\r\u202e\nreally\u00ad é"})
	report := Diagnose(records)
	all := report.Findings[0].Text + report.Findings[1].Text + report.States[0].Error + report.States[1].Last
	assert.Equal(t, -1, strings.IndexFunc(all, func(c rune) bool { return !strconv.IsPrint(c) }), "%q", all)
	assert.Contains(t, report.States[0].Error, `\x1b[2Jall is well\r\u202e\nreally\u00ad é`)
	assert.Contains(t, report.States[1].Last, `\x1b]0;owned\a.go:7`)

	one := recorded(1<<19, 1<<20, []comm.Call{comm.AllReduceCall(0, 0, 4, dtype.F32, comm.Sum)})
	findings := Diagnose([]Record{one}).Findings
	assert.Equal(t, "there is no dump of ranks 0-524287, 524289-1048575, which may be what the others wait for", findings[0].Text)
}

// A call that the library makes is named by the program's line, whichever package made it.
func TestLineOfTheProgram(t *testing.T) {
	frames := []dump.Frame{{Filename: "library.go", Line: 1}, {Name: "main.main", Filename: "main.go", Line: 88}}
	for _, f := range []any{(*ddp.Gradients).Wait, (*sparse.Reducer).AllReduce, distributed.AllReduceAll, comm.CloseAll} {
		frames[0].Name = runtime.FuncForPC(reflect.ValueOf(f).Pointer()).Name()
		assert.Equal(t, "main.go:88", line(frames), frames[0].Name)
	}
}

func TestWrongFiles(t *testing.T) {
	var good bytes.Buffer
	rt := cpu.New()
	defer rt.Close()
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		r := record.New(c, 4, "")
		if err := r.Barrier(ctx); err != nil {
			return err
		}
		return r.WriteJSON(&good)
	}))
	_, err := Read("x", bytes.NewReader(good.Bytes()))
	require.NoError(t, err)
	for text, want := range map[string]string{
		"":                              "x: is empty",
		good.String()[:good.Len()/2]:    "x: is truncated",
		"\x80\x02}":                     "x: is a pickle",
		"hello":                         "x: is no flight record",
		good.String() + "{}":            "something follows it",
		"{}":                            `version "", want 2`,
		`{"version":"2.10"}`:            `it has no "tutti"`,
		`{"version":"2.10","tutti":{}}`: "rank 0 of 0",
		strings.Replace(good.String(), `"process_group":["0"`, `"process_group":["7"`, 1): "unknown communicator",
	} {
		_, err := Read("x", strings.NewReader(text))
		assert.ErrorContains(t, err, want, text)
	}
	dir := t.TempDir()
	_, _, err = ReadFiles([]string{dir})
	assert.ErrorContains(t, err, "has no file")
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	require.NoError(t, os.WriteFile(a, good.Bytes(), 0o600))
	require.NoError(t, os.WriteFile(b, good.Bytes(), 0o600))
	_, _, err = ReadFiles([]string{a, b})
	assert.ErrorContains(t, err, "both are of rank 0")
	_, _, err = ReadFiles([]string{a, filepath.Join(dir, "none")})
	assert.ErrorIs(t, err, os.ErrNotExist)
}

func FuzzRead(f *testing.F) {
	d := recorded(1, 3, []comm.Call{comm.AllReduceCall(0, 0, 4, dtype.F32, comm.Sum), comm.SendCall(0, 4, dtype.U8, 2, 7)})
	var text bytes.Buffer
	require.NoError(f, json.NewEncoder(&text).Encode(d.File))
	f.Add(text.Bytes())
	f.Add([]byte(`{"version":"2.10","tutti":{"rank":0,"world_size":1}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := Read("x", bytes.NewReader(data))
		if err != nil {
			assert.True(t, strings.HasPrefix(err.Error(), "x: "), err.Error())
			return
		}
		if r.Tutti.Size <= 100 { // the report lists them
			Diagnose([]Record{r})
		}
	})
}

// TestRuns checks that records of an earlier run with more ranks are left out.
func TestRuns(t *testing.T) {
	dir := t.TempDir()
	write := func(rank, size int, run string, made int64) string {
		path := filepath.Join(dir, fmt.Sprintf("tutti-record-%d.json", rank))
		text := fmt.Sprintf(`{"version":"2.10","tutti":{"rank":%d,"world_size":%d,"job":%q,"time_ns":%d}}`, rank, size, run, made)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	write(0, 3, "new", 20)
	write(1, 3, "new", 10)
	old := []string{write(2, 4, "old", 2), write(3, 4, "", 1)}
	records, stale, err := ReadFiles([]string{dir})
	require.NoError(t, err)
	assert.Len(t, records, 2)
	assert.Equal(t, old, stale)
	report := Diagnose(records)
	require.NotEmpty(t, report.Findings)
	assert.Equal(t, NoDump, report.Findings[0].Kind)
	assert.Equal(t, []int{2}, report.Findings[0].Ranks)
}

// TestUnnamedRuns checks that a record without a run, whose rank has met no other rank, belongs to the newest run
// with as many ranks. If no record names its run, all belong to one.
func TestUnnamedRuns(t *testing.T) {
	type written struct {
		rank, size int
		run        string
		made       int64
		stale      bool
	}
	for name, list := range map[string][]written{
		"the last one waits":   {{0, 3, "new", 20, false}, {1, 3, "new", 10, false}, {2, 3, "", 30, false}, {3, 4, "old", 1, true}},
		"the first one waits":  {{0, 3, "new", 20, false}, {1, 3, "new", 10, false}, {2, 3, "", 5, false}, {3, 4, "", 1, true}},
		"two runs of one size": {{0, 3, "", 30, false}, {1, 3, "new", 20, false}, {2, 3, "old", 2, true}},
		"a run without a name": {{0, 2, "", 30, false}, {1, 2, "", 20, false}, {2, 3, "old", 2, true}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			var stale []string
			for _, w := range list {
				path := filepath.Join(dir, fmt.Sprintf("tutti-record-%d.json", w.rank))
				const format = `{"version":"2.10","tutti":{"rank":%d,"world_size":%d,"job":%q,"time_ns":%d}}`
				require.NoError(t, os.WriteFile(path, fmt.Appendf(nil, format, w.rank, w.size, w.run, w.made), 0o600))
				if w.stale {
					stale = append(stale, path)
				}
			}
			records, others, err := ReadFiles([]string{dir})
			require.NoError(t, err)
			assert.Equal(t, stale, others)
			assert.Len(t, records, len(list)-len(stale))
		})
	}
}

// TestLongTexts checks that texts longer than any program writes are cut before they are printed.
func TestLongTexts(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	text := fmt.Sprintf(`{"version":"2.10","tutti":{"rank":0,"world_size":1,"host":%q,"communicators":{"0":{"rank":0,"size":1,`+
		`"failure":{"error":%q},"sync":{"error":%q,"frames":[{"filename":%q}]}}}},"entries":[{"process_group":["0",""],"state":"scheduled","collective_seq_id":1,`+
		`"frames":[{"name":%q,"filename":%q}],"tutti":{"call":%q,"op":%q,"error":%q}}]}`, long, long, long, long, long, long, long, long, long)
	r, err := Read("x", strings.NewReader(text))
	require.NoError(t, err)
	report, err := json.Marshal(Diagnose([]Record{r}))
	require.NoError(t, err)
	assert.Less(t, len(report), 100_000)
	_, err = Read("x", strings.NewReader(strings.ReplaceAll(text, `{"0":{`, fmt.Sprintf(`{%q:{`, long))))
	assert.ErrorContains(t, err, "a name of 1048576 bytes")
}
