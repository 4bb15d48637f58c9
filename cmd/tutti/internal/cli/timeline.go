package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/diagnose"
	"github.com/tutti-go/tutti/cmd/tutti/internal/trace"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/distributed"
)

// timelineFlag adds --trace.
func timelineFlag(flags *pflag.FlagSet, path *string) {
	flags.StringVar(path, "trace", "", "write a timeline of all ranks to this `file`, which ui.perfetto.dev opens")
}

// writeTimeline writes the timeline of records, and says to out where it is and how far the clocks agree.
func writeTimeline(out io.Writer, path string, records []diagnose.Record) error {
	timeline := trace.New(records)
	if err := atomicfile.Write(path, timeline.Write); err != nil {
		return err
	}
	fmt.Fprintf(out, "\ntimeline: %s (open it in https://ui.perfetto.dev)\n", path)
	for _, c := range timeline.Other.Clocks[1:] {
		if c.Offset != 0 || c.Within < 0 {
			fmt.Fprintf(out, "  clock of %s\n", c)
		}
	}
	return nil
}

// timelineCalls is how many calls of a rank a timeline of a training has, some 13 MB of records: the last ones.
const timelineCalls = 1 << 15

// withTimeline runs body with a flight recorder around the communicator, and on rank 0 writes the timeline of all
// ranks. After an error of body there is none, as ranks may be gone: TUTTI_RECORD has them write their records,
// of which tutti diagnose makes one.
func withTimeline(ctx context.Context, r backend.Rank, out io.Writer, path string,
	body func(context.Context, backend.Rank) error) error {
	recorder, ok := comm.As[*record.Recorder](r.Comm)
	if !ok {
		recorder = record.New(r.Comm, timelineCalls, "")
		r.Comm = recorder
	}
	if err := body(ctx, r); err != nil {
		return err
	}
	if err := r.Comm.Barrier(ctx); err != nil { // one call at least that compares the clocks, and the latest
		return err
	}
	var text bytes.Buffer
	if err := recorder.WriteJSON(&text); err != nil {
		return err
	}
	parts, err := distributed.GatherBytes(ctx, r.Runtime, r.Comm, text.Bytes(), 0)
	if err != nil || r.Comm.Rank() != 0 {
		return err
	}
	var records []diagnose.Record
	for rank, part := range parts {
		one, err := diagnose.Read(fmt.Sprintf("record of rank %d", rank), bytes.NewReader(part))
		if err != nil {
			return err
		}
		records = append(records, one)
	}
	return writeTimeline(out, path, records)
}
