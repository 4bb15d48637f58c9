// Package compare sets allreduce on the host against MPI_Allreduce in C and
// against what the hardware takes at least, on this machine.
//
// A subject is a program that measures all sizes. They take turns, several
// times, so that whatever else the machine does falls on all of them.
package compare

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/cluster"
	"github.com/tutti-go/tutti/internal/measure"
)

// Config is what to compare.
type Config struct {
	Ranks           int
	Low, High, Step int // sizes in bytes, as in [bench.Sizes]
	Runs            int // turns of every subject
	// Tutti is the path of the tutti command, whose ranks are measured.
	Tutti string
	// Progress is called after each turn, nil for nobody.
	Progress func(done, total int)
}

// mostRuns take weeks.
const mostRuns = 1 << 20

// Validate names the first setting that cannot be used.
func (c Config) Validate() error {
	switch {
	case c.Ranks < 2 || c.Ranks > backend.MaxLocalRanks:
		return fmt.Errorf("%d ranks are not in [2, %d]", c.Ranks, backend.MaxLocalRanks)
	case c.Runs < 1 || c.Runs > mostRuns:
		return fmt.Errorf("%d runs are not in [1, %d]", c.Runs, mostRuns)
	case c.Low < 4:
		return fmt.Errorf("smallest size %d is less than an element, 4 bytes", c.Low)
	}
	if _, err := bench.Sizes(c.Low, c.High, c.Step); err != nil {
		return err
	}
	return backend.Rank{HostRanks: c.Ranks}.Fits("compare", "the buffers", 2*float64(c.High), "--max or --ranks")
}

// Work is what subjects are measured at: an allreduce in a place, or steps of a pattern of package sparse.
type Work struct {
	Bytes   int         `json:"bytes"`
	Place   bench.Place `json:"place,omitempty"`
	Pattern string      `json:"pattern,omitempty"`
	Values  string      `json:"values,omitempty"` // as what those of a pattern travel
}

// String names the work without its size.
func (w Work) String() string {
	if w.Pattern == "" {
		return string(w.Place)
	}
	return backend.PatternName(w.Pattern, "", w.Values)
}

// Result is one line of --json: what one subject takes for one work.
type Result struct {
	Work
	Subject string    `json:"subject"`
	Ranks   int       `json:"ranks"`
	Time    float64   `json:"time_us"` // the median of the runs
	Best    float64   `json:"best_us"` // the fastest run
	Runs    []float64 `json:"runs_us"`
	// Against is the subject that this one is set against, "" for none, and Ratio
	// and BestRatio are those of the times.
	Against   string  `json:"against,omitempty"`
	Ratio     float64 `json:"ratio,omitempty"`
	BestRatio float64 `json:"best_ratio,omitempty"`
}

// Subjects are named by what runs and where: floor, local, c/openmpi,
// mpi/openmpi, c/mpich, mpi/mpich.
const (
	floor = "floor"
	local = "local"
	inC   = "c/"
	inGo  = "mpi/"
)

// subject is something that is measured.
type subject struct {
	name    string
	against []string // the first one that was measured at the same work
	turn    func(ctx context.Context) ([]measured, error)
}

// measured is a line of a subject's output.
type measured struct {
	Work
	Time float64 `json:"time_us"`
}

//go:embed c/allreduce.c
var program []byte

// Run measures and returns the results, by size, place and subject. Libraries
// that cannot be measured here are left out, and missing says why.
func Run(ctx context.Context, cfg Config) (results []Result, missing []error, err error) {
	dir, err := os.MkdirTemp("", "tutti-compare-")
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	subjects, missing := cfg.subjects(ctx, dir)
	results, err = inTurns(ctx, subjects, cfg.Runs, cfg.Ranks, cfg.Progress)
	return results, missing, err
}

// inTurns has each subject measure, again and again.
func inTurns(
	ctx context.Context,
	subjects []subject,
	runs, ranks int,
	progress func(done, total int),
) (results []Result, err error) {
	type key struct {
		Work
		subject int
	}
	times := map[key][]float64{}
	for run := range runs {
		for i, s := range subjects {
			lines, err := s.turn(ctx)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.name, err)
			}
			for _, l := range lines {
				times[key{l.Work, i}] = append(times[key{l.Work, i}], l.Time)
			}
			if progress != nil {
				progress(run*len(subjects)+i+1, runs*len(subjects))
			}
		}
	}
	place := map[string]int{}
	for i, s := range subjects {
		place[s.name] = i
	}
	for k, seconds := range times {
		r := Result{
			Work:    k.Work,
			Subject: subjects[k.subject].name,
			Ranks:   ranks,
			Time:    measure.Median(seconds),
			Best:    slices.Min(seconds),
			Runs:    seconds,
		}
		for _, against := range subjects[k.subject].against {
			if base := times[key{k.Work, place[against]}]; len(base) > 0 {
				r.Against, r.Ratio, r.BestRatio = against, r.Time/measure.Median(base), r.Best/slices.Min(base)
				break
			}
		}
		results = append(results, r)
	}
	slices.SortFunc(results, func(a, b Result) int {
		return cmp.Or(min(1, len(a.Pattern))-min(1, len(b.Pattern)), a.Bytes-b.Bytes, -cmp.Compare(a.Place, b.Place),
			cmp.Compare(a.Pattern, b.Pattern), cmp.Compare(a.Values, b.Values), place[a.Subject]-place[b.Subject])
	})
	return results, nil
}

// subjects returns what can be measured here, in the order of the columns of a
// table.
func (c Config) subjects(ctx context.Context, dir string) (all []subject, missing []error) {
	var pairs []subject
	for _, name := range cluster.MPIs() {
		if name == cluster.NoMPI {
			continue
		}
		pair, err := c.pairOf(ctx, dir, name)
		if err != nil {
			missing = append(missing, err)
			continue
		}
		pairs = append(pairs, pair...)
	}
	library := subject{
		name:    local,
		against: []string{floor},
		turn: c.program(c.Tutti, nil,
			append(c.bench(), "--ranks", strconv.Itoa(c.Ranks))...),
	}
	if len(pairs) > 0 {
		library.against = []string{pairs[0].name}
	}
	return append([]subject{{name: floor, turn: c.floor}, library}, pairs...), missing
}

// pairOf returns the two subjects of an MPI library: C and this.
func (c Config) pairOf(ctx context.Context, dir, name string) ([]subject, error) {
	mpirun, env, err := cluster.Launcher(name)
	if err != nil {
		return nil, err
	}
	compiler, err := exec.LookPath("mpicc." + name)
	if err != nil { // the only library here, or one with a folder of its own
		if compiler, err = exec.LookPath(filepath.Join(filepath.Dir(mpirun), "mpicc")); err != nil {
			return nil, fmt.Errorf("no compiler for %s: looked for mpicc.%[1]s and mpicc beside %s", name, mpirun)
		}
	}
	source := filepath.Join(dir, "allreduce.c")
	binary := filepath.Join(dir, name)
	if err := os.WriteFile(source, program, 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, compiler, "-O3", "-o", binary, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", compiler, err, out)
	}
	job := []string{"-n", strconv.Itoa(c.Ranks)}
	if name == "openmpi" && c.Ranks > runtime.NumCPU() {
		job = append(job, "--oversubscribe")
	}
	inGoArgs := append(append(slices.Clone(job), c.Tutti), c.bench()...)
	return []subject{
		{
			name: inC + name,
			turn: c.program(mpirun, env, append(
				slices.Clone(job),
				binary,
				strconv.Itoa(c.Low),
				strconv.Itoa(c.High),
				strconv.Itoa(c.Step),
			)...),
		},
		{
			name:    inGo + name,
			against: []string{inC + name},
			turn:    c.program(mpirun, env, append(inGoArgs, "--backend", "mpi")...),
		},
	}, nil
}

// bench is the command line of tutti that measures as the program in C does.
func (c Config) bench() []string {
	return []string{"bench", "allreduce", "--json", "--verify=false",
		"--min", strconv.Itoa(c.Low), "--max", strconv.Itoa(c.High), "--step", strconv.Itoa(c.Step)}
}

// program is the turn of a subject that is a program.
func (c Config) program(path string, env []string, args ...string) func(context.Context) ([]measured, error) {
	return func(ctx context.Context) ([]measured, error) {
		lines, err := run(ctx, path, env, args...)
		for i := range lines {
			lines[i].Bytes = max(lines[i].Bytes, c.Low) // tutti rounds to whole elements
		}
		return lines, err
	}
}

// run runs a program that prints what it measures.
func run(ctx context.Context, path string, env []string, args ...string) ([]measured, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // launchers end their ranks
	var stdout, stderr bytes.Buffer
	cmd.Stdout = &stdout
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, stderr.Bytes())
	}
	var lines []measured
	for line := range strings.Lines(stdout.String()) {
		var m measured
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			return nil, fmt.Errorf("%s printed %q: %w", path, line, err)
		}
		if m.Pattern != "" { // it has one form
			m.Place = ""
		}
		lines = append(lines, m)
	}
	return lines, nil
}
