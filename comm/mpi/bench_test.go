package mpi_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// BenchmarkAllReduce compares AllReduce and Sync with the blocking
// MPI_Allreduce of a C program (testdata/allreduce.c) under every MPI of the
// machine that has a compiler wrapper, with two ranks, and prints a table. C
// runs before and after, the better of the two counts.
//
//	go test -run '^$' -bench AllReduce -benchtime 1x ./comm/mpi
func BenchmarkAllReduce(b *testing.B) {
	for _, l := range launchers {
		b.Run(l.name, func(b *testing.B) {
			if _, ok := l.mpirunPath(); !ok {
				b.Skip(installHint)
			}
			program := l.compile(b, "testdata/allreduce.c")
			for b.Loop() {
				before := l.timings(b, job{ranks: 2, program: program})
				tutti := l.timings(b, job{ranks: 2, test: "TestRankBenchmark"})
				after := l.timings(b, job{ranks: 2, program: program})
				fmt.Printf("\n%-8s %10s %10s %10s %8s\n", l.name, "bytes", "C µs", "tutti µs", "ratio")
				for _, bytes := range slices.Sorted(maps.Keys(tutti)) {
					c := min(before[bytes], after[bytes])
					fmt.Printf("%-8s %10d %10.2f %10.2f %8.2f\n", "", bytes, c, tutti[bytes], tutti[bytes]/c)
				}
			}
		})
	}
}

// timings runs a job that prints timings and returns them by size.
func (l launcher) timings(b *testing.B, j job) map[int]float64 {
	b.Helper()
	j.plain = true
	out, err := l.run(b, j)
	require.NoError(b, err, "%s", out)
	micros := map[int]float64{}
	for line := range strings.Lines(out) {
		var t timing
		if json.Unmarshal([]byte(line), &t) == nil {
			micros[t.Bytes] = t.Micros
		}
	}
	require.NotEmpty(b, micros, "%s", out)
	return micros
}

// timing is one line of a benchmark's output, in tutti and in C.
type timing struct {
	Backend string  `json:"backend"`
	Ranks   int     `json:"ranks"`
	Bytes   int     `json:"bytes"`
	Micros  float64 `json:"time_us"`
}

// TestRankBenchmark is one rank of BenchmarkAllReduce. It measures AllReduce and
// Sync of float32, out of place, as the C program does: the median of seven
// rounds.
func TestRankBenchmark(t *testing.T) {
	onlyChild(t)
	world, err := mpi.Init()
	require.NoError(t, err)
	rt := cpu.New()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for bytes := 8; bytes <= 16<<20; bytes *= 8 {
		n := bytes / 4
		send, err := rt.Allocate(bytes)
		require.NoError(t, err)
		recv, err := rt.Allocate(bytes)
		require.NoError(t, err)
		require.NoError(t, rt.Fill(send, n, dtype.F32, float64(world.Rank()+1)))
		require.NoError(t, rt.Fill(recv, n, dtype.F32, 0))
		rounds := make([]float64, 7)
		for r := range rounds {
			require.NoError(t, world.Barrier(ctx))
			iterations := benchmarkIterations(bytes)
			start := time.Now()
			for range iterations {
				if err = world.AllReduce(send, recv, n, dtype.F32, comm.Sum); err == nil {
					err = world.Sync(ctx)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			rounds[r] = float64(time.Since(start).Nanoseconds()) / 1e3 / float64(iterations)
		}
		want := float32(world.WorldSize() * (world.WorldSize() + 1) / 2)
		require.Equal(t, want, hostmem.Slice[float32](recv, n)[n-1])
		slices.Sort(rounds)
		if world.Rank() == 0 {
			line, err := json.Marshal(timing{"mpi", world.WorldSize(), bytes, rounds[len(rounds)/2]})
			require.NoError(t, err)
			fmt.Println(string(line))
		}
		require.NoError(t, rt.Deallocate(send))
		require.NoError(t, rt.Deallocate(recv))
	}
	require.NoError(t, mpi.Finalize())
}

func benchmarkIterations(bytes int) int {
	switch {
	case bytes < 100_000:
		return 2000
	case bytes < 10_000_000:
		return 50
	}
	return 10
}
