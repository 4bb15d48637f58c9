package trace

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/diagnose"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestTimeline makes the timeline of three ranks that use all kinds of calls, and checks it against the rules of the
// format.
func TestTimeline(t *testing.T) {
	const ranks = 3
	const rounds = 4
	records := make([]diagnose.Record, ranks)
	err := local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
		r := record.New(c, 1000, "")
		err := exercise(ctx, r, rounds)
		var text bytes.Buffer
		if err == nil {
			err = r.WriteJSON(&text)
		}
		if err == nil {
			records[c.Rank()], err = diagnose.Read(fmt.Sprint(c.Rank()), &text)
		}
		return errors.Join(err, c.Barrier(ctx)) // no rank leaves before all have their records
	})
	require.NoError(t, err)
	var text bytes.Buffer
	require.NoError(t, New(records).Write(&text))
	events := parse(t, text.Bytes())

	kinds := map[string]int{}
	for _, e := range events {
		if e.Phase != metadata {
			kinds[fmt.Sprintf("%s %s %s", e.Phase, e.Category, e.Name)]++
		}
	}
	assert.Equal(t, map[string]int{
		"X program round":        ranks * rounds,
		"X wait sync":            ranks * rounds,
		"X collective allreduce": ranks * rounds,
		"X send send":            ranks * rounds,
		"X receive recv":         ranks * rounds,
		"s message message":      ranks * rounds,
		"f message message":      ranks * rounds,
		"X collective split":     ranks,
		"X collective barrier":   ranks,
	}, kinds)
	assert.Contains(t, text.String(), `"name":"rank 2 on `)
	assert.Contains(t, text.String(), `{"name":"world"}`)
	assert.Contains(t, text.String(), `{"name":"communicator 0/1.0"}`)
	assert.Contains(t, text.String(), `trace_test.go:`)
}

// exercise makes calls of each kind.
func exercise(ctx context.Context, r *record.Recorder, rounds int) error {
	rt := cpu.New()
	defer rt.Close()
	p, err := rt.Allocate(64)
	if err != nil {
		return err
	}
	n := r.WorldSize()
	child, err := r.Split(ctx, 0, 0)
	if err != nil {
		return err
	}
	for range rounds {
		started := time.Now()
		err := errors.Join(
			r.AllReduce(p, p, 2, dtype.F32, comm.Sum),
			r.Group(
				comm.SendCall(p, 3, dtype.U8, (r.Rank()+1)%n, 7),
				comm.RecvCall(p+32, 3, dtype.U8, (r.Rank()+n-1)%n, 7),
			),
			r.Sync(ctx),
		)
		if err != nil {
			return err
		}
		r.Span("round", started)
	}
	return child.Barrier(ctx)
}

// parse reads a timeline and checks that it conforms to the format.
func parse(t *testing.T, text []byte) []Event {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	f := new(File)
	require.NoError(t, decoder.Decode(f))
	assert.Contains(t, []string{"ms", "ns"}, f.Unit)
	ends := map[[2]int]float64{}   // by process and thread
	open := map[string]Event{}     // arrows by name, category and id
	known := map[[2]int]bool{}     // threads with a name
	slices := map[[2]int][]Event{} // by process and thread
	for _, e := range f.Events {
		place := [2]int{e.Process, e.Thread}
		assert.NotEmpty(t, e.Name)
		assert.False(t, math.IsNaN(e.Time) || e.Time < 0, "%+v", e)
		switch e.Phase {
		case "M":
			assert.Contains(t, []string{"process_name", "process_sort_index", "thread_name", "thread_sort_index"}, e.Name)
			require.Len(t, e.Args, 1)
			known[place] = known[place] || e.Name == "thread_name"
		case "X":
			require.NotNil(t, e.Duration)
			assert.True(t, known[place], "an event of a thread without a name")
			assert.GreaterOrEqual(t, *e.Duration, 0.0)
			assert.GreaterOrEqual(t, e.Time+1e-6, ends[place], "%+v overlaps the one before it", e)
			ends[place] = e.Time + *e.Duration
			slices[place] = append(slices[place], e)
		case "i":
			assert.Contains(t, []string{"g", "p", "t"}, e.Scope)
		case "s", "f":
			require.NotEmpty(t, e.ID)
			id := strings.Join([]string{e.Name, e.Category, e.ID}, "|")
			if e.Phase == "s" {
				assert.NotContains(t, open, id)
				open[id] = e
				continue
			}
			require.Contains(t, open, id)
			assert.GreaterOrEqual(t, e.Time, open[id].Time, "an arrow goes back in time")
			delete(open, id)
		default:
			t.Errorf("unknown phase %q", e.Phase)
		}
	}
	assert.Empty(t, open, "arrows without an end")
	return f.Events
}

// TestFailure marks the reason of a rank's failure, and shows the call that the rank waits for up to the end of its
// record.
func TestFailure(t *testing.T) {
	const text = `{"version":"2.10","tutti":{"rank":0,"world_size":2,"time_ns":9000,"communicators":{"0":{"rank":0,"size":2,
		"failure":{"time_ns":8000,"error":"lost\u001b[31m"}}}},"entries":[{"process_group":["0",""],"time_created_ns":4000,
		"collective_seq_id":1,"tutti":{"call":"barrier","op":"barrier"}}]}`
	r, err := diagnose.Read("one", strings.NewReader(text))
	require.NoError(t, err)
	f := New([]diagnose.Record{r})
	var out bytes.Buffer
	require.NoError(t, f.Write(&out))
	events := parse(t, out.Bytes())
	require.Len(t, events, 6)
	call, failure := events[4], events[5]
	assert.InDelta(t, 0, call.Time, 0)
	assert.InDelta(t, 5, *call.Duration, 0, "µs, from its beginning to the end of the record")
	assert.Equal(t, "not known to be done", call.Args["state"])
	assert.InDelta(t, 4, failure.Time, 0)
	assert.NotContains(t, failure.Args["error"], "\x1b")
}

// TestClocks has ranks with wrong clocks meet in barriers and exchange messages that take random times. It compares
// the offsets found in their records with the true offsets.
func TestClocks(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for range 50 {
		ranks := 2 + rng.IntN(5)
		records, truth := wrongClocks(rng, ranks, 20, 0.5)
		found := clocks(records)
		for i, c := range found {
			require.GreaterOrEqual(t, c.Within, 0.0)
			assert.LessOrEqual(t, c.Within, 1000.0, "µs, what a barrier takes")
			wrong := math.Abs(c.Offset - truth[i])
			if c.Offset == 0 { // within the bounds already
				assert.LessOrEqual(t, wrong, 2*c.Within+1e-3, "rank %d", i)
				continue
			}
			assert.LessOrEqual(t, wrong, c.Within+1e-3, "rank %d", i)
		}
	}
}

// TestClocksOfMessages compares the clocks of ranks in a chain by messages alone.
func TestClocksOfMessages(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 2))
	for range 50 {
		records, truth := wrongClocks(rng, 4, 20, 0)
		for i, c := range clocks(records) {
			require.GreaterOrEqual(t, c.Within, 0.0)
			assert.LessOrEqual(t, math.Abs(c.Offset-truth[i]), 2*c.Within+1e-3, "rank %d", i)
		}
	}
}

// TestClocksUnknown leaves a clock unchanged if no event compares it with the others.
func TestClocksUnknown(t *testing.T) {
	records, _ := wrongClocks(rand.New(rand.NewPCG(1, 1)), 2, 0, 1)
	assert.Equal(t, []Clock{{Rank: 0}, {Rank: 1, Within: -1}}, clocks(records))
	assert.Contains(t, clocks(records)[1].String(), "nothing compares")
}

// wrongClocks makes records of events: the fraction barriers are barriers, the others messages between neighbors. It
// returns them with the offsets, in µs, that correct their times.
func wrongClocks(rng *rand.Rand, ranks, events int, barriers float64) ([]diagnose.Record, []float64) {
	records := make([]diagnose.Record, ranks)
	wrong := make([]int64, ranks)
	truth := make([]float64, ranks)
	for i := range records {
		if i > 0 {
			wrong[i] = rng.Int64N(20e6) - 10e6
		}
		truth[i] = -micros(wrong[i])
		member := map[string]dump.Member{worldName: {Rank: i, Size: ranks}}
		records[i].File = &dump.File{Tutti: &dump.Rank{Rank: i, Size: ranks, Comms: member}}
	}
	add := func(rank int, begin, end int64, e dump.Entry) {
		d := records[rank].File
		e.RecordID = uint64(len(d.Entries))
		e.ProcessGroup[0] = worldName
		e.Created = begin + wrong[rank]
		e.Completed = end + wrong[rank]
		d.Entries = append(d.Entries, e)
	}
	now := int64(1e12)
	for n := range events {
		if rng.Float64() < barriers {
			var begun []int64
			var last int64
			for range ranks {
				begun = append(begun, now+rng.Int64N(300e3))
				last = max(last, begun[len(begun)-1])
			}
			for rank, begin := range begun {
				call := &dump.Call{Op: comm.OpBarrier.String()}
				add(rank, begin, last+rng.Int64N(200e3), dump.Entry{CollectiveSeq: uint64(n + 1), Tutti: call})
			}
		} else {
			from := n % (ranks - 1)
			to := from + 1
			if n/(ranks-1)%2 == 1 {
				from, to = to, from
			}
			sent := now + rng.Int64N(1e6)
			send := &dump.Call{Op: comm.OpSend.String(), Peer: to, Count: 1}
			receive := &dump.Call{Op: comm.OpRecv.String(), Peer: from, Count: 1}
			add(from, sent, sent+rng.Int64N(1e6), dump.Entry{P2P: true, Tutti: send})
			add(to, now, sent+rng.Int64N(400e3), dump.Entry{P2P: true, Tutti: receive})
		}
		now += 3e6
	}
	return records, truth
}
