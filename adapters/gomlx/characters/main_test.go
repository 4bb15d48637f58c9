package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gomlx/compute"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/adapters/gomlx"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// TestSameBits trains on one, two and four ranks over each backend. Goroutines and processes over TCP and both MPI
// libraries end with the same parameters.
func TestSameBits(t *testing.T) {
	program := jobtest.Build(t, ".")
	for _, ranks := range []int{1, 2, 4} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			args := []string{"-steps", "6"}
			want := jobtest.Output(t, program, append(args, "-ranks", fmt.Sprint(ranks))...)
			assert.Contains(t, want, fmt.Sprintf("world size %d, step 6", ranks))
			t.Log(want)
			assert.Equal(t, want, overTCP(t, program, ranks, append(args, "-backend", "tcp")...))
			for _, launcher := range jobtest.Launchers {
				if _, err := exec.LookPath(launcher); err == nil {
					assert.Equal(t, want, jobtest.Output(t, launcher, append([]string{"-n", fmt.Sprint(ranks), program, "-backend", "mpi"}, args...)...), launcher)
				}
			}
		})
	}
}

// overTCP starts a process per rank as torchrun does, and returns their output.
func overTCP(t *testing.T, program string, ranks int, args ...string) string {
	host, port, err := net.SplitHostPort(jobtest.Address(t, 1))
	require.NoError(t, err)
	var all []*exec.Cmd
	var out strings.Builder
	for rank := range ranks {
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Env = append(os.Environ(), fmt.Sprint("RANK=", rank), fmt.Sprint("WORLD_SIZE=", ranks),
			"MASTER_ADDR="+host, "MASTER_PORT="+port, "TUTTI_SECRET=of a test, and long enough")
		if cmd.Stderr = os.Stderr; rank == 0 {
			cmd.Stdout = &out
		}
		require.NoError(t, cmd.Start())
		all = append(all, cmd)
	}
	for _, cmd := range all {
		assert.NoError(t, cmd.Wait())
	}
	return out.String()
}

// trained returns the parameters' checksum, which all ranks must have, and rank 0's loss.
func trained(t *testing.T, ranks int, s settings) (uint32, float32) {
	sums, losses := make([]uint32, ranks), make([]float32, ranks)
	require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) (err error) {
		sums[c.Rank()], losses[c.Rank()], err = run(ctx, c, s)
		return err
	}))
	for _, sum := range sums {
		require.Equal(t, sums[0], sum)
	}
	return sums[0], losses[0]
}

// TestResume checks that a run resumed in the middle of an epoch has the bits of an uninterrupted one, also with
// residuals, and that it continues on other numbers of ranks.
func TestResume(t *testing.T) {
	for _, pattern := range []string{sparse.Dense, sparse.TopkA} {
		straight, _ := trained(t, 2, settings{steps: 10, pattern: pattern, checkpoint: t.TempDir()})
		dir := t.TempDir()
		trained(t, 2, settings{steps: 4, pattern: pattern, checkpoint: dir})
		resumed, _ := trained(t, 2, settings{steps: 10, pattern: pattern, checkpoint: dir})
		assert.Equal(t, straight, resumed, pattern)
		trained(t, 4, settings{steps: 12, pattern: pattern, checkpoint: dir})
		trained(t, 1, settings{steps: 14, pattern: pattern, checkpoint: dir})
	}
}

// TestReadme checks that the table in README.md is from this program, which also learns its text.
func TestReadme(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	for _, ranks := range []int{1, 2, 4} {
		sum, last := trained(t, ranks, settings{steps: 40, pattern: sparse.Dense})
		assert.Contains(t, string(readme), fmt.Sprintf("\n| %d | %.4f | `%08x` |\n", ranks, last, sum))
	}
}

// TestLearns checks that the loss falls below 3.2, the loss of the characters' frequencies alone.
func TestLearns(t *testing.T) {
	_, last := trained(t, 2, settings{steps: 120, pattern: sparse.Dense})
	assert.Less(t, last, float32(2.8))
}

// TestLines counts the lines of run that name the communicator or the average: at most ten differ from a program of
// one rank.
func TestLines(t *testing.T) {
	_, body, _ := strings.Cut(source, "\nfunc run(")
	body, _, _ = strings.Cut(body, "\n}\n")
	changed := regexp.MustCompile(`(?m)^.*\b(c|averaging|gomlx)\b.*$`).FindAllString(body, -1)[1:]
	assert.LessOrEqual(t, len(changed), 10, "%s", strings.Join(changed, "\n"))
}

// BenchmarkStep makes steps of one rank with GoMLX alone and with averaging, alternately. It reports the cost of
// averaging in percent of GoMLX alone: the median over pairs of the time, and the processor time of all steps, which
// other load changes less.
func BenchmarkStep(b *testing.B) {
	require.NoError(b, local.Run(b.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		var steps [2]func() error
		for i := range steps {
			backend, err := compute.NewWithConfig("go")
			if err != nil {
				return err
			}
			inner := optimizer.Adam().Done()
			averaging, err := gomlx.New(ctx, c, inner, ddp.Config{})
			if err != nil {
				return err
			}
			defer averaging.Close()
			inputs, labels := windows(source)
			data, err := gomlx.NewDataset(c, "text", inputs, labels, batch, distributed.SamplerConfig{})
			if err != nil {
				return err
			}
			opt := []optimizer.Interface{inner, averaging}[i]
			loop := train.NewLoop(train.NewTrainer(backend, model.NewStore(), transformer, loss.SparseCategoricalCrossEntropyLogits, opt, nil, nil))
			if i == 1 {
				averaging.Attach(loop)
			}
			data.Infinite(true)
			steps[i] = func() error { _, err := loop.RunSteps(data, 1); return err }
			for range 3 {
				if err := steps[i](); err != nil {
					return err
				}
			}
		}
		processor := func() float64 {
			var u syscall.Rusage
			assert.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
			return float64(u.Utime.Nano() + u.Stime.Nano())
		}
		var ratios []float64
		var used [2]float64
		b.ResetTimer()
		for n := range b.N {
			var times [2]float64
			for i := range steps {
				i = (i + n) % 2
				start := time.Now()
				used[i] -= processor()
				if err := steps[i](); err != nil {
					return err
				}
				used[i] += processor()
				times[i] = float64(time.Since(start))
			}
			ratios = append(ratios, 100*times[1]/times[0])
		}
		slices.Sort(ratios)
		b.ReportMetric(ratios[len(ratios)/2], "%_of_alone")
		b.ReportMetric(100*used[1]/used[0], "cpu_%_of_alone")
		return nil
	}))
}
