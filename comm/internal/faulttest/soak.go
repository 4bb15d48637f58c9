package faulttest

import (
	"context"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/trees"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/race"
)

// SoakVariable is the number of operations of [Soak] and [SoakTrees], such as 1000000; without it, the tests are
// skipped.
const SoakVariable = "TUTTI_SOAK"

// usage is the resources of a process.
type usage struct {
	resident, heap          int64 // bytes
	goroutines, descriptors int
}

// use measures this process. Figures that a system does not provide are 0.
func use() usage {
	for range 2 {
		goruntime.GC()
	}
	var m goruntime.MemStats
	goruntime.ReadMemStats(&m)
	u := usage{heap: int64(m.HeapInuse), goroutines: goruntime.NumGoroutine()}
	if text, err := os.ReadFile("/proc/self/statm"); err == nil {
		pages, _ := strconv.ParseInt(strings.Fields(string(text))[1], 10, 64)
		u.resident = pages * int64(os.Getpagesize())
	}
	if entries, err := os.ReadDir("/proc/self/fd"); err == nil {
		u.descriptors = len(entries)
	}
	return u
}

// lifetime is the maximum number of operations of [Soak] on one communicator.
const lifetime = 10_000

// Soak makes the number of operations that the environment asks for on every rank, some of all kinds, on communicators
// that come and go, one for each 10,000 operations but at least ten. It checks that memory, goroutines and descriptors
// of this process do not grow after a tenth of them.
func Soak(t *testing.T, b Backend) {
	t.Helper()
	soak(t, b, 8, Rank.soak)
}

// SoakTrees plays trees of sub-communicators with the number of operations that the environment asks for, of all
// communicators together, and compares every byte. It checks what [Soak] checks. An error names the seed of its tree.
func SoakTrees(t *testing.T, b Backend) {
	t.Helper()
	soak(t, b, 1000, Rank.soakTrees)
}

// soak makes operations in rounds, at least minRounds.
func soak(t *testing.T, b Backend, minRounds int, part func(r Rank, ctx context.Context, n, round int) error) {
	t.Helper()
	total, err := strconv.Atoi(os.Getenv(SoakVariable))
	if err != nil || total < 1 {
		t.Skipf("runs with %s=1000000", SoakVariable)
	}
	round := max(min(total/10, lifetime), minRounds)
	do := func(n int) {
		t.Helper()
		if err := b.Each(t.Context(), func(ctx context.Context, r Rank) error {
			return part(r, ctx, n, round)
		}); err != nil {
			t.Fatal(err)
		}
	}
	do(total / 10)
	before := use()
	do(total)
	const slack = 8 << 20
	kept := int64(total) * int64(b.Keeps)
	// Resources of the last communicators may be freed after their Close.
	for late := time.Now().Add(backgroundTime); ; time.Sleep(time.Millisecond) {
		after := use()
		// The race detector keeps its data about memory permanently.
		resident := race.Enabled || after.resident <= before.resident+slack+kept
		flat := resident && after.heap <= before.heap+slack &&
			after.goroutines <= before.goroutines+4 && after.descriptors <= before.descriptors+4
		if !flat && time.Now().Before(late) {
			continue
		}
		t.Logf("%d operations, after which the library may keep %d bytes: before %+v, after %+v", total, kept, before, after)
		if !flat {
			t.Error("it grew")
		}
		return
	}
}

// soakTrees plays trees of the seeds from 1 on, each with a round of operations.
func (r Rank) soakTrees(ctx context.Context, n, round int) error {
	const workers, open = 4, 240
	for seed := 1; seed <= (n+round-1)/round; seed++ {
		c := trees.Config{
			Seed:       uint64(seed),
			Workers:    workers,
			Open:       open,
			Operations: round,
			Sum:        dtype.I32,
		}
		if _, err := c.Play(ctx, r.Comm, r.Runtime); err != nil {
			return err
		}
	}
	return nil
}

// backgroundTime bounds how long a backend may continue to free resources.
const backgroundTime = 10 * time.Second

// soak makes a number of operations, several on each communicator.
func (r Rank) soak(ctx context.Context, n, round int) error {
	for done := 0; done < n; done += round {
		c, err := r.Comm.Split(ctx, 0, -r.Comm.Rank())
		if err != nil {
			return err
		}
		err = r.soakOn(ctx, c, round)
		if err := errors.Join(err, c.Close()); err != nil {
			return fmt.Errorf("after %d operations: %w", done, err)
		}
	}
	return nil
}

func (r Rank) soakOn(ctx context.Context, c comm.Communicator, n int) error {
	me := c.Rank()
	size := c.WorldSize()
	next := (me + 1) % size
	before := (me + size - 1) % size
	const part = 16 << 10 // bytes of the buffers
	for range n / 8 {
		err := errors.Join(
			c.AllReduce(r.Send, r.Recv, 32, dtype.F32, comm.Sum),
			c.Broadcast(r.Recv+part, 100, dtype.U8, size-1),
			c.AllGather(r.Send, r.Recv+2*part, 16, dtype.F64),
			c.ReduceScatter(r.Send, r.Recv, 8, dtype.I32, comm.Max),
			c.AllToAll(r.Send, r.Recv+3*part, 4, dtype.I64),
			c.Group(
				comm.SendCall(r.Send, 300, dtype.U8, next, 1),
				comm.RecvCall(r.Recv, 300, dtype.U8, before, 1),
			),
			c.Sync(ctx),
		)
		if err != nil {
			return err
		}
	}
	return c.Barrier(ctx)
}
