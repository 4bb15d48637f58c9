package diagnose

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestARankThatDoesNotCall runs three ranks, the last of which does not make the
// second allreduce, reads what they wrote, and reads it without that rank's.
func TestARankThatDoesNotCall(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(instrument.RecordVariable, "100")
	t.Setenv(instrument.RecordDirVariable, dir)
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
	const first, second = 7, 14 // the lines of the calls, after that one
	var called, gaveUp sync.WaitGroup
	called.Add(2)
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
		gaveUp.Wait()
		assert.Error(t, c.Barrier(ctx))
		return nil
	}
	require.NoError(t, local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		return instrument.Run(ctx, rt, c, body)
	}))
	at := func(line int) string { return fmt.Sprintf("%s:%d", filepath.Base(file), here+line) }

	records, err := ReadFiles([]string{dir})
	require.NoError(t, err)
	report := Diagnose(records)
	want := Finding{Kind: NotCalled, Communicator: "0", Number: 2, Ranks: []int{2}, Waiting: []int{0, 1},
		Text: "rank 2 has not called allreduce #2 (1 MiB f32 max, " + at(second) + "); its last was allreduce #1 (1 MiB f32 sum, " +
			at(first) + "), which is done; ranks 0, 1 wait"}
	assert.Equal(t, []Finding{want}, report.Findings)
	assert.Len(t, report.States, 3)

	require.NoError(t, os.Remove(filepath.Join(dir, "tutti-record-2.json")))
	records, err = ReadFiles([]string{dir})
	require.NoError(t, err)
	report = Diagnose(records)
	require.Len(t, report.Findings, 2)
	assert.Equal(t, NoDump, report.Findings[0].Kind)
	assert.Equal(t, []int{2}, report.Findings[0].Ranks)
	assert.Equal(t, Unfinished, report.Findings[1].Kind)
	assert.Equal(t, []int{0, 1}, report.Findings[1].Waiting)
}

// dump is that of a rank which made the calls.
func dump(rank, ranks int, calls []comm.Call) Record {
	d := &comm.Dump{Version: comm.RecordVersion, Tutti: &comm.DumpRank{Rank: rank, Size: ranks, Comms: map[string]comm.DumpMember{"0": {Rank: rank, Size: ranks}}}}
	var collective, message uint64
	for i, c := range calls {
		if c.Op.Message() {
			message++
		} else {
			collective++
		}
		d.Entries = append(d.Entries, comm.DumpEntry{RecordID: uint64(i), ProcessGroup: [2]string{"0", "tutti"}, CollectiveSeq: collective, P2PSeq: message, P2P: c.Op.Message(),
			Tutti: &comm.DumpCall{Call: c.String(), Op: c.Op.String(), DType: c.DType.String(), Count: c.Count, Peer: c.Peer, Tag: c.Tag}})
	}
	return Record{fmt.Sprint(rank), d}
}

// TestRandomJobs removes or changes one call of one rank, and has it found.
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
			records = append(records, dump(r, ranks, mine))
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
			for _, f := range Diagnose([]Record{dump(0, 2, test.zero), dump(1, 2, test.one)}).Findings {
				text += f.Text + "\n"
			}
			assert.Contains(t, text, test.want)
			assert.Equal(t, test.want == "", text == "", text)
		})
	}
}

func TestWrongFiles(t *testing.T) {
	var good bytes.Buffer
	rt := cpu.New()
	defer rt.Close()
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		r := comm.NewRecorder(c, 4, "")
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
	_, err = ReadFiles([]string{dir})
	assert.ErrorContains(t, err, "has no file")
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	require.NoError(t, os.WriteFile(a, good.Bytes(), 0o600))
	require.NoError(t, os.WriteFile(b, good.Bytes(), 0o600))
	_, err = ReadFiles([]string{a, b})
	assert.ErrorContains(t, err, "both are of rank 0")
	_, err = ReadFiles([]string{a, filepath.Join(dir, "none")})
	assert.ErrorIs(t, err, os.ErrNotExist)
}

func FuzzRead(f *testing.F) {
	d := dump(1, 3, []comm.Call{comm.AllReduceCall(0, 0, 4, dtype.F32, comm.Sum), comm.SendCall(0, 4, dtype.U8, 2, 7)})
	var text bytes.Buffer
	require.NoError(f, json.NewEncoder(&text).Encode(d.Dump))
	f.Add(text.Bytes())
	f.Add([]byte(`{"version":"2.10","tutti":{"rank":0,"world_size":1}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := Read("x", bytes.NewReader(data))
		if err != nil {
			assert.True(t, strings.HasPrefix(err.Error(), "x: "), err.Error())
			return
		}
		if r.Tutti.Size <= 100 { // which the report lists
			Diagnose([]Record{r})
		}
	})
}
