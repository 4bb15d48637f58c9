// Command staged measures where the time of an allreduce of a GPU's memory over TCP goes, between two processes of one
// machine that share its first GPU, and the machine's memory:
//
//	go build -C lab -o /tmp/staged ./probe/staged && tutti launch -n 2 /tmp/staged
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"slices"
	"time"

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

func main() {
	log.SetFlags(0)
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
		fmt.Println("| bytes | call | µs |\n| ---: | --- | ---: |")
	}
	err = measureAll(ctx, base, gpu, host)
	return errors.Join(err, base.Close(), gpu.Close(), host.Close())
}

func measureAll(ctx context.Context, base comm.Communicator, gpu *cuda.Runtime, host runtime.Runtime) error {
	for _, bytes := range []int{1 << 20, 16 << 20, 100 << 20} {
		if err := measure(ctx, base, gpu, host, bytes); err != nil {
			return err
		}
	}
	return base.Barrier(ctx)
}

// median times some calls of f, all ranks together, and prints what rank 0 saw.
func median(ctx context.Context, base comm.Communicator, line string, f func() error) error {
	var times []time.Duration
	for i := range rounds + 3 {
		if err := base.Barrier(ctx); err != nil {
			return err
		}
		begin := time.Now()
		if err := f(); err != nil {
			return err
		}
		if i >= 3 {
			times = append(times, time.Since(begin))
		}
	}
	slices.Sort(times)
	if base.Rank() == 0 {
		fmt.Printf("| %s | %.0f |\n", line, float64(times[rounds/2].Nanoseconds())/1e3)
	}
	return nil
}

// measure measures allreduces of some bytes, and the copies that they need.
func measure(ctx context.Context, base comm.Communicator, gpu *cuda.Runtime, host runtime.Runtime, bytes int) error {
	tensor, err := runtime.New(gpu, dtype.F32, bytes/4)
	if err != nil {
		return err
	}
	defer tensor.Free() //nolint:errcheck // the program ends
	memory, err := tensor.Ptr()
	if err != nil {
		return err
	}
	if err := tensor.Fill(1); err != nil {
		return err
	}
	pinned, err := gpu.AllocatePinned(bytes)
	if err != nil {
		return err
	}
	defer gpu.FreePinned(pinned) //nolint:errcheck // the program ends
	clear(pinned)
	pageable := make([]byte, bytes)
	child, err := base.Split(ctx, 0, base.Rank())
	if err != nil {
		return err
	}
	device, err := staged.New(child, gpu, host)
	if err != nil {
		return err
	}
	address := hostmem.Addr(pageable)
	for _, c := range []struct {
		name string
		call func() error
	}{
		{"device to pageable memory", func() error { return gpu.CopyOut(pageable, memory) }},
		{"pageable memory to device", func() error { return gpu.CopyIn(memory, pageable) }},
		{"device to pinned memory", func() error { return gpu.CopyOut(pinned, memory) }},
		{"pinned memory to device", func() error { return gpu.CopyIn(memory, pinned) }},
		{"allreduce of host memory", func() error { return reduce(ctx, base, address, bytes) }},
		{"staged allreduce", func() error { return reduce(ctx, device, memory, bytes) }},
	} {
		if err := median(ctx, base, fmt.Sprintf("%d | %s", bytes, c.name), c.call); err != nil {
			return err
		}
	}
	return device.Close()
}

func reduce(ctx context.Context, c comm.Communicator, address uintptr, bytes int) error {
	if err := c.AllReduce(address, address, bytes/4, dtype.F32, comm.Max); err != nil {
		return err
	}
	return c.Sync(ctx)
}
