// Command staged measures where the time goes in an allreduce of GPU memory over TCP, between two processes on one
// machine that share its first GPU and the machine's memory:
//
//	go build -C lab -o /tmp/staged ./probe/staged && tutti launch -n 2 /tmp/staged
//
// The table has the copies that it is made of, what a device does with memory that the processes share (window.go), and
// staged allreduces through such memory and without it, each with the timeline of the last one.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"syscall"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

const rounds = 15

// parts are the measurements for each size.
var parts string

func main() {
	log.SetFlags(0)
	flag.StringVar(&parts, "parts", "copies,window,staged", "what is measured")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("staged: unknown arguments: %q", flag.Args())
	}
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	base, err := tcp.FromEnv(ctx)
	if err != nil {
		return err
	}
	gpu, err := cuda.Open(0)
	if err != nil {
		return errors.Join(err, base.Close())
	}
	host := cpu.New()
	if base.Rank() == 0 {
		fmt.Println("| bytes | call | µs | least | faults | switches |\n| ---: | --- | ---: | ---: | ---: | ---: |")
	}
	err = measureAll(ctx, base, gpu, host)
	return errors.Join(err, base.Close(), gpu.Close(), host.Close())
}

// sizes are bytes of calls: TUTTI_TEST_SIZES, separated by commas, or 2, 4, 16 and 100 MiB.
func sizes() (all []int) {
	for _, word := range strings.Split(os.Getenv("TUTTI_TEST_SIZES"), ",") {
		if n, err := strconv.Atoi(word); err == nil {
			all = append(all, n)
		}
	}
	if all == nil {
		all = []int{2 << 20, 4 << 20, 16 << 20, 100 << 20}
	}
	return all
}

func measureAll(ctx context.Context, base comm.Communicator, gpu *cuda.Runtime, host runtime.Runtime) error {
	for _, bytes := range sizes() {
		if err := measure(ctx, base, gpu, host, bytes); err != nil {
			return err
		}
	}
	return base.Barrier(ctx)
}

// median times calls of f on all ranks together and prints rank 0's results: the median, the minimum, and the page
// faults and thread switches of a call.
func median(ctx context.Context, base comm.Communicator, line string, f func() error) error {
	var times []time.Duration
	var before, after syscall.Rusage
	for i := range rounds + 3 {
		if i == 3 {
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &before); err != nil {
				return err
			}
		}
		if err := base.Barrier(ctx); err != nil {
			return err
		}
		begin := time.Now()
		if err := f(); err != nil {
			return fmt.Errorf("%s: %w", line, err)
		}
		if i >= 3 {
			times = append(times, time.Since(begin))
		}
	}
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &after); err != nil {
		return err
	}
	slices.Sort(times)
	if base.Rank() == 0 {
		fmt.Printf("| %s | %.0f | %.0f | %d | %d |\n", line, micros(times[rounds/2]), micros(times[0]),
			(after.Minflt-before.Minflt)/rounds, (after.Nvcsw-before.Nvcsw)/rounds)
	}
	return nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// once prints the time of one call.
func once(base comm.Communicator, line string, f func() error) error {
	begin := time.Now()
	if err := f(); err != nil {
		return fmt.Errorf("%s: %w", line, err)
	}
	if base.Rank() == 0 {
		fmt.Printf("| %s | %.0f | | | |\n", line, micros(time.Since(begin)))
	}
	return nil
}

// buffers is the memory for calls of one size.
type buffers struct {
	bytes                int     // of a call
	memory               uintptr // of the device
	pageable, second     []byte  // Go memory
	pinned, pinnedSecond []byte  // memory pinned by the device
}

// measure measures allreduces of one size, and the copies that they need.
func measure(ctx context.Context, base comm.Communicator, gpu *cuda.Runtime, host runtime.Runtime, bytes int) error {
	tensor, err := runtime.New(gpu, dtype.F32, bytes/4)
	if err != nil {
		return err
	}
	defer tensor.Free() //nolint:errcheck // the program ends
	b := &buffers{bytes: bytes}
	if b.memory, err = tensor.Ptr(); err != nil {
		return err
	}
	if err := tensor.Fill(1); err != nil {
		return err
	}
	err = once(base, fmt.Sprintf("%d | pin memory twice", bytes), func() (err error) {
		if b.pinned, err = gpu.AllocatePinned(bytes); err != nil {
			return err
		}
		b.pinnedSecond, err = gpu.AllocatePinned(bytes)
		return err
	})
	if err != nil {
		return err
	}
	defer gpu.FreePinned(b.pinned)       //nolint:errcheck // the program ends
	defer gpu.FreePinned(b.pinnedSecond) //nolint:errcheck // the program ends
	err = once(base, fmt.Sprintf("%d | clear it, twice", bytes), func() error {
		clear(b.pinned)
		clear(b.pinnedSecond)
		return nil
	})
	if err != nil {
		return err
	}
	b.pageable = make([]byte, bytes)
	b.second = make([]byte, bytes)
	for _, part := range []struct {
		name    string
		measure func() error
	}{
		{"copies", func() error { return measureCopies(ctx, base, gpu, b) }},
		{"window", func() error { return measureWindow(ctx, base, gpu, b) }},
		{"staged", func() error { return measureStaged(ctx, base, gpu, host, b) }},
	} {
		if !strings.Contains(parts, part.name) {
			continue
		}
		if err := part.measure(); err != nil {
			return err
		}
	}
	return nil
}

// call is a timed call.
type call struct {
	name string       // of its line
	run  func() error // the call
}

func measureAllOf(ctx context.Context, base comm.Communicator, bytes int, calls []call) error {
	for _, c := range calls {
		if err := median(ctx, base, fmt.Sprintf("%d | %s", bytes, c.name), c.run); err != nil {
			return err
		}
	}
	return nil
}

// measureCopies measures copies, and allreduces of host memory, in place and not in place.
func measureCopies(ctx context.Context, base comm.Communicator, gpu *cuda.Runtime, b *buffers) error {
	block := make([]byte, 256<<10)
	through := func(memory []byte) func() error { // a block that stays in the caches
		return func() error {
			for remaining := memory; len(remaining) > 0; remaining = remaining[copy(block, remaining):] {
			}
			return nil
		}
	}
	hostReduce := func(send, recv []byte) func() error {
		return func() error { return reduce(ctx, base, hostmem.Addr(send), hostmem.Addr(recv), b.bytes) }
	}
	return measureAllOf(ctx, base, b.bytes, []call{
		{"device to pageable memory", func() error { return gpu.CopyOut(b.pageable, b.memory) }},
		{"pageable memory to device", func() error { return gpu.CopyIn(b.memory, b.pageable) }},
		{"device to pinned memory", func() error { return gpu.CopyOut(b.pinned, b.memory) }},
		{"pinned memory to device", func() error { return gpu.CopyIn(b.memory, b.pinned) }},
		{"pageable memory to a block in the caches", through(b.pageable)},
		{"pinned memory to a block in the caches", through(b.pinned)},
		{"pinned memory to pinned memory", func() error { copy(b.pinnedSecond, b.pinned); return nil }},
		{"allreduce of pageable memory, in place", hostReduce(b.pageable, b.pageable)},
		{"allreduce of pageable memory, apart", hostReduce(b.pageable, b.second)},
		{"allreduce of pinned memory, in place", hostReduce(b.pinned, b.pinned)},
		{"allreduce of pinned memory, apart", hostReduce(b.pinned, b.pinnedSecond)},
	})
}

// unshared is a communicator that offers no memory: allreduces of it are staged without a window.
type unshared struct{ comm.Communicator }

// measureStaged checks and measures staged allreduces with a window and without, and prints the timeline of one each.
func measureStaged(
	ctx context.Context,
	base comm.Communicator,
	gpu *cuda.Runtime,
	host runtime.Runtime,
	b *buffers,
) error {
	for _, way := range []struct {
		name string                                      // of its lines
		hide func(c comm.Communicator) comm.Communicator // what the product is to see
	}{
		{"staged allreduce", func(c comm.Communicator) comm.Communicator { return c }},
		{"staged allreduce without a window", func(c comm.Communicator) comm.Communicator { return unshared{c} }},
	} {
		child, err := base.Split(ctx, 0, base.Rank())
		if err != nil {
			return err
		}
		l := &timeline{}
		device, err := staged.New(way.hide(timedComm{comm.Wrap(child), l}), &timedGPU{gpu, l}, host)
		if err != nil {
			return err
		}
		name := fmt.Sprintf("%d | %s", b.bytes, way.name)
		run := func() error { return reduce(ctx, device, b.memory, b.memory, b.bytes) }
		err = once(base, name+", the first", run)
		if err == nil {
			err = check(ctx, device, gpu, b)
		}
		if err == nil {
			err = median(ctx, base, name, func() error { l.restart(); return run() })
		}
		if err == nil && base.Rank() == 0 {
			l.print(b.bytes)
		}
		if err := errors.Join(err, device.Close()); err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
	}
	return nil
}

// check reports whether a communicator adds up.
func check(ctx context.Context, c comm.Communicator, gpu *cuda.Runtime, b *buffers) error {
	values := make([]float32, b.bytes/4)
	for i := range values {
		values[i] = float32((i%1009 + 1) * (c.Rank() + 1))
	}
	if err := gpu.CopyIn(b.memory, hostmem.Bytes(values)); err != nil {
		return err
	}
	if err := c.AllReduce(b.memory, b.memory, len(values), dtype.F32, comm.Sum); err != nil {
		return err
	}
	if err := c.Sync(ctx); err != nil {
		return err
	}
	if err := gpu.CopyOut(hostmem.Bytes(values), b.memory); err != nil {
		return err
	}
	ranks := c.WorldSize()
	for i, v := range values {
		if want := float32(ranks * (ranks + 1) / 2 * (i%1009 + 1)); v != want {
			return fmt.Errorf("element %d is %v, want %v", i, v, want)
		}
	}
	return nil
}

func reduce(ctx context.Context, c comm.Communicator, send, recv uintptr, bytes int) error {
	if err := c.AllReduce(send, recv, bytes/4, dtype.F32, comm.Max); err != nil {
		return err
	}
	return c.Sync(ctx)
}
