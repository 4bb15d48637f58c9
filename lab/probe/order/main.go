// Command order compares sums of processes that share a GPU with sums in the order of the ranks, over NCCL's sockets
// and over peer memory, and prints what they take. NCCL refuses two ranks on a GPU, unless each is as if alone on its
// host:
//
//	go build -C lab -o ../order ./probe/order
//	GPUS=1 TUTTI_BACKEND=nccl tutti launch -n 4 lab/as-a-host.sh ./order -ops sum
//
// The program sums 64 elements of each rank in messages of many lengths, at several places, for each element type and
// operation. All sums must have the same result.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("order: ")
	ops := flag.String("ops", "sum prod min max avg", "`operations` to compare")
	times := flag.Bool("times", true, "print times, too")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	err := tutti.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		p := probe{ops: strings.Fields(*ops), timed: *times, out: io.Discard}
		return p.run(ctx, r)
	})
	if err != nil {
		log.Fatal(err)
	}
}

// longest is the number of elements in the longest message.
const longest = 4 << 20

// probe is a rank's part of the program.
type probe struct {
	ops   []string          // to compare
	timed bool              // print times as well
	base  comm.Communicator // NCCL's communicator, below the others
	rt    *cuda.Runtime     // of the rank's GPU
	buf   uintptr           // memory for the longest message, and for the longest timed message
	out   io.Writer         // rank 0's is standard output
}

// run measures NCCL, then peer memory.
func (p *probe) run(ctx context.Context, r tutti.Rank) error {
	rt, ok := r.Runtime.(*cuda.Runtime)
	if !ok {
		return fmt.Errorf("%T is no runtime of a GPU: set TUTTI_BACKEND=nccl", r.Runtime)
	}
	p.base = r.Comm
	p.rt = rt
	if r.Comm.Rank() == 0 {
		p.out = os.Stdout
	}
	var err error
	p.buf, err = rt.Allocate(max(longest*dtype.F64.Size(), slices.Max(timedBytes)))
	if err != nil {
		return err
	}
	return errors.Join(p.measure(ctx, "NCCL", r.Comm), p.overPeerMemory(ctx), rt.Deallocate(p.buf))
}

// overPeerMemory measures the communicators of package p2p: one in fixed order, and the times of the other.
func (p *probe) overPeerMemory(ctx context.Context) error {
	fixed, err := p2p.NewFixedOrder(ctx, kept{p.base}, p.rt)
	if err != nil {
		return err
	}
	if err := errors.Join(p.measure(ctx, "fixed order", fixed), fixed.Close()); err != nil {
		return err
	}
	tabled, err := p2p.New(ctx, kept{p.base}, p.rt)
	if err != nil {
		return err
	}
	return errors.Join(p.time(ctx, "peer memory", tabled), tabled.Close())
}

// kept is a communicator that its users cannot close.
type kept struct{ comm.Communicator }

func (k kept) Close() error              { return nil }
func (k kept) Unwrap() comm.Communicator { return k.Communicator }

// measure prints a communicator's results and times.
func (p *probe) measure(ctx context.Context, name string, c comm.Communicator) error {
	if err := p.compare(ctx, name, c); err != nil {
		return err
	}
	return p.time(ctx, name, c)
}

// tally counts messages of one type and operation.
type tally struct {
	messages int      // compared
	wrong    int      // messages that differ from the reference
	results  [][]byte // different results: one if all messages have the same
}

// compare compares messages with sums in the order of the ranks.
func (p *probe) compare(ctx context.Context, name string, c comm.Communicator) error {
	var all tally
	kinds := 0
	var differing, lacking []string
	for _, dt := range dtype.All() {
		for _, op := range reductions.All() {
			if !op.Defined(dt) || !slices.Contains(p.ops, op.String()) {
				continue
			}
			kind := fmt.Sprintf("%v %v", dt, op)
			one, err := p.messages(ctx, c, dt, op)
			if errors.Is(err, comm.ErrUnsupported) {
				lacking = append(lacking, kind)
				continue
			}
			if err != nil {
				return fmt.Errorf("%s: %w", kind, err)
			}
			kinds++
			all.messages += one.messages
			all.wrong += one.wrong
			if one.wrong > 0 || len(one.results) > 1 {
				differing = append(differing, fmt.Sprintf("%s: %d wrong, %d results", kind, one.wrong, len(one.results)))
			}
		}
	}
	fmt.Fprintf(p.out, "%s, %d ranks: %d types and operations, %d messages, %d not in rank order; fixed order: %v\n",
		name, c.WorldSize(), kinds, all.messages, all.wrong, comm.FixedOrder(c))
	for _, line := range differing {
		fmt.Fprintf(p.out, "  %s\n", line)
	}
	if len(lacking) > 0 {
		fmt.Fprintf(p.out, "  unsupported: %s\n", strings.Join(lacking, ", "))
	}
	if err := c.Barrier(ctx); err != nil { // rank 0 has printed its lines
		return err
	}
	if all.wrong > 0 && comm.FixedOrder(c) {
		return fmt.Errorf("rank %d: %d sums are not in rank order", c.Rank(), all.wrong)
	}
	return nil
}

// messages sums the same elements in messages of many lengths, at up to four places in each.
func (p *probe) messages(ctx context.Context, c comm.Communicator, dt dtype.DType, op comm.ReduceOp) (tally, error) {
	const width = 64
	var one tally
	inputs := make([][]byte, c.WorldSize())
	for rank := range inputs {
		inputs[rank] = reference.Rough(dt, op, rank, c.WorldSize())
	}
	want := reference.NewOrdered(dt, op, inputs...)
	size := dt.Size()
	for _, n := range []int{width, 65, 1000, 4096, 16384, 65536, 262144, 1 << 20, longest} {
		for _, place := range []int{0, n/3 - 20, n / 2, n - width} {
			if place < 0 || place+width > n {
				continue
			}
			address := p.buf + uintptr(place*size)
			err := errors.Join(
				p.rt.Fill(p.buf, n*size, dtype.U8, 0),
				p.rt.CopyIn(address, inputs[c.Rank()][:width*size]),
				p.rt.Synchronize(ctx),
			)
			if err != nil {
				return one, err
			}
			if err := c.AllReduce(p.buf, p.buf, n, dt, op); err != nil {
				return one, err
			}
			if err := c.Sync(ctx); err != nil {
				return one, err
			}
			got := make([]byte, width*size)
			if err := p.rt.CopyOut(got, address); err != nil {
				return one, err
			}
			one.messages++
			if want.Check(got, 0) != nil {
				one.wrong++
			}
			if !slices.ContainsFunc(one.results, func(r []byte) bool { return bytes.Equal(r, got) }) {
				one.results = append(one.results, got)
			}
		}
	}
	return one, nil
}

// timedBytes are the sizes of timed messages.
var timedBytes = []int{1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 104_800_000}

// time prints the median time of f32 allreduces by size, in µs, with up to ten calls in a row.
func (p *probe) time(ctx context.Context, name string, c comm.Communicator) error {
	if !p.timed {
		return nil
	}
	fmt.Fprintf(p.out, "%s, %d ranks, µs:", name, c.WorldSize())
	for _, bytes := range timedBytes {
		if err := p.rt.Fill(p.buf, bytes/4, dtype.F32, 0); err != nil {
			return err
		}
		calls := max(1, min(10, 16<<20/bytes))
		var times []float64
		for range 5 {
			if err := errors.Join(p.rt.Synchronize(ctx), c.Barrier(ctx)); err != nil {
				return err
			}
			started := time.Now()
			for range calls {
				if err := c.AllReduce(p.buf, p.buf, bytes/4, dtype.F32, comm.Sum); err != nil {
					return err
				}
			}
			if err := c.Sync(ctx); err != nil {
				return err
			}
			times = append(times, float64(time.Since(started).Nanoseconds())/1000/float64(calls))
		}
		slices.Sort(times)
		fmt.Fprintf(p.out, "  %d KiB %.1f", bytes>>10, times[len(times)/2])
	}
	fmt.Fprintln(p.out)
	return nil
}
