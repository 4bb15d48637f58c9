package cli

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
)

// The tables of `tutti bench` are printed line by line as results arrive. A line fits 80 columns, including the rank
// that `tutti launch` writes before it. A wide line has the columns of nccl-tests, which everybody in the field
// reads.

// timeColumns are the columns of every measured form.
const timeColumns = " %10s %7s %7s %7s"

// callColumns are the columns of a call.
func callColumns(wide bool, size, count, dtype, op, root any) string {
	if !wide {
		return fmt.Sprintf("%11v", size)
	}
	return fmt.Sprintf("%12v %12v %8v %8v %8v    ", size, count, dtype, op, root)
}

// placeColumns are the columns of a measured form.
func placeColumns(wide bool, time, algBW, busBW, wrong string) string {
	if !wide {
		return fmt.Sprintf(" %10s %10s %8s", time, busBW, wrong)
	}
	return fmt.Sprintf(timeColumns, time, algBW, busBW, wrong)
}

func printHeader(out io.Writer, results []bench.Result, wide bool) {
	first := results[0]
	numbers := ""
	if !wide {
		numbers = ", " + first.DType
		if first.Op != "none" {
			numbers += " " + first.Op
		}
	}
	fmt.Fprintf(out, "# %s over %s, backend %s%s\n",
		first.Collective, backend.Counted(first.Ranks, "rank"), first.Backend, numbers)
	if printLocations(out, first) {
		writeComment(out, "time: "+timeMeaning(first))
		writeComment(out, "buffers: "+bufferMeaning(first))
	}
	if first.HandOver != nil {
		writeComment(out, "peer memory: "+console.HandOver(first))
	}
	writeComment(out, "")
	places := callColumns(wide, "", "", "", "", "")
	names := callColumns(wide, "size", "count", "type", "redop", "root")
	units := callColumns(wide, "(B)", "(elements)", "", "", "")
	for _, r := range results {
		columns := placeColumns(wide, "time", "algbw", "busbw", "#wrong")
		places += fmt.Sprintf("%*s", len(columns), r.Place)
		names += columns
		units += placeColumns(wide, "(us)", "(GB/s)", "(GB/s)", "")
	}
	for _, line := range []string{places, names, units} {
		writeComment(out, line)
	}
}

// printLocations prints where each rank runs, if the backend knows, and reports whether it printed anything.
func printLocations(out io.Writer, r bench.Result) bool {
	for rank, location := range r.Locations {
		writeComment(out, fmt.Sprintf("rank %d: %s", rank, location))
	}
	return len(r.Locations) > 0
}

func timeMeaning(r bench.Result) string {
	if r.Graph {
		return fmt.Sprintf("of the device, calls captured in graphs of %d", bench.GraphCalls)
	}
	return "of the device, calls queued one after the other"
}

func bufferMeaning(r bench.Result) string {
	if r.Symmetric {
		return "symmetric, of the communicator"
	}
	return "plain, of the runtime"
}

func printLine(out io.Writer, results []bench.Result, wide bool) {
	first := results[0]
	line := callColumns(wide, first.Bytes, first.Count, first.DType, first.Op, first.Root)
	for _, r := range results {
		line += placeColumns(
			wide,
			console.FormatTime(r.Time),
			fmt.Sprintf("%.2f", r.AlgBW),
			busText(r),
			wrongText(r),
		)
	}
	fmt.Fprintln(out, "  "+line)
}

func printSparseHeader(out io.Writer, first bench.SparseResult, wide bool) {
	fmt.Fprintf(out, "# sparse allreduce over %s, backend %s, average of %s\n",
		ranksOn(first.Ranks, first.Hosts), first.Backend, first.DType)
	printLocations(out, first.Result)
	writeComment(out, "")
	writeComment(
		out,
		sparseColumns(
			wide, "size", "count", "pattern", "density", "sent", "dense", "select", "exchange", "time",
			"algbw", "busbw", "#wrong",
		),
	)
	writeComment(
		out,
		sparseColumns(wide, "(B)", "(elements)", "", "", "(B)", "(%)", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", ""),
	)
}

// sparseColumns are the columns of a line. A narrow line omits columns that follow from others.
func sparseColumns(wide bool, size, count, pattern, density, sent, ofDense, choose, exchange any, times ...any) string {
	if !wide {
		return fmt.Sprintf("%8v %-15v %7v %9v %6v %7v %8v %6v",
			size, pattern, density, sent, ofDense, choose, times[0], times[3])
	}
	columns := []any{size, count, pattern, density, sent, ofDense, choose, exchange}
	columns = append(columns, times...)
	return fmt.Sprintf("%12v %12v  %-15v %8v %12v %9v %10v %10v"+timeColumns, columns...)
}

// ranksOn counts ranks, such as "4 ranks on 2 hosts"; hosts may be 0.
func ranksOn(ranks, hosts int) string {
	text := backend.Counted(ranks, "rank")
	if hosts > 0 {
		text += " on " + backend.Counted(hosts, "host") + ", dense within them"
	}
	return text
}

func printSparseLine(out io.Writer, r bench.SparseResult, wide bool) {
	ofDense := "-"
	if r.Ranks > 1 {
		dense := 2 * float64(r.Bytes) * float64(r.Ranks-1) / float64(r.Ranks)
		ofDense = fmt.Sprintf("%.2f", 100*r.SentBytes/dense)
	}
	fmt.Fprintln(out, "  "+sparseColumns(
		wide,
		r.Bytes,
		r.Count,
		backend.PatternName(r.Pattern, r.Chosen, r.Values),
		r.Density,
		fmt.Sprintf("%.0f", r.SentBytes),
		ofDense,
		console.FormatTime(r.SelectTime),
		console.FormatTime(r.ExchangeTime),
		console.FormatTime(r.Time),
		fmt.Sprintf("%.2f", r.AlgBW),
		busText(r.Result),
		wrongText(r.Result),
	))
}

// busText is the bandwidth of a link. One rank has no link.
func busText(r bench.Result) string {
	if r.BusBW == nil {
		return "N/A"
	}
	return fmt.Sprintf("%.2f", *r.BusBW)
}

// wrongText is the number of wrong elements.
func wrongText(r bench.Result) string {
	if r.Wrong == nil {
		return "N/A"
	}
	return strconv.FormatInt(*r.Wrong, 10)
}

// writeComment writes a line that readers of the table skip.
func writeComment(out io.Writer, line string) {
	fmt.Fprintln(out, strings.TrimRight("# "+line, " "))
}
