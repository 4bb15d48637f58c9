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

// writeTimeline writes the timeline of records. It prints the file's name and the accuracy of the clocks to out.
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

// timelineCalls is the number of last calls per rank in a training's timeline, some 13 MB of records.
const timelineCalls = 1 << 15

// withTimeline runs body with a flight recorder around the communicator. Rank 0 then writes the timeline of all
// ranks. After an error of body there is none, because ranks may be gone: with TUTTI_RECORD they write their records,
// from which tutti diagnose makes a timeline.
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
	if err := r.Comm.Barrier(ctx); err != nil { // a call that compares the clocks, and the latest one
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
