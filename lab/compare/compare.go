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
	Ranks           []int // numbers of ranks
	Low, High, Step int   // sizes in bytes, as in [bench.Sizes]
	Runs            int   // turns of every subject
	// Tutti is the path of the tutti command, whose ranks are measured.
	Tutti  string
	Python string // the one that is to have PyTorch, for gloo
	// Progress is called after each turn, nil for nobody.
	Progress func(done, total int)
}

// mostRuns take weeks.
const mostRuns = 1 << 20

// Validate names the first setting that cannot be used.
func (c Config) Validate() error {
	if len(c.Ranks) == 0 {
		return errors.New("no number of ranks")
	}
	for _, ranks := range c.Ranks {
		if ranks < 2 || ranks > backend.MaxLocalRanks {
			return fmt.Errorf("%d ranks are not in [2, %d]", ranks, backend.MaxLocalRanks)
		}
	}
	switch {
	case c.Runs < 1 || c.Runs > mostRuns:
		return fmt.Errorf("%d runs are not in [1, %d]", c.Runs, mostRuns)
	case c.Low < 4:
		return fmt.Errorf("smallest size %d is less than an element, 4 bytes", c.Low)
	}
	if _, err := bench.Sizes(c.Low, c.High, c.Step); err != nil {
		return err
	}
	largest := backend.Rank{HostRanks: slices.Max(c.Ranks)}
	return largest.Fits("compare", "the buffers", 2*float64(c.High), "--max or --ranks")
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

// Subjects are named by what runs and where: floor, local, tcp, shared, shared/bound, gloo, c/openmpi, mpi/openmpi,
// mpi/openmpi/bound, c/mpich, mpi/mpich.
const (
	floor  = "floor"
	local  = "local"
	tcp    = "tcp"
	shared = "shared" // tcp whose ranks may share memory
	gloo   = "gloo"
	inC    = "c/"
	inGo   = "mpi/"
	bound  = "/bound" // after the name of what it is like: each rank has processors of its own
)

// canBind reports whether ranks can have processors of their own.
func canBind(ranks int) bool { return runtime.GOOS == "linux" && ranks <= runtime.NumCPU() }

// subject is something that is measured.
type subject struct {
	name  string // as in tables
	ranks int    // of its world
	// against are subjects: a time is divided by the time of the first one with as many ranks and the same work.
	against []string
	turn    func(ctx context.Context) ([]measured, error) // measures all works once
}

// measured is a line of a subject's output.
type measured struct {
	Work
	Time float64 `json:"time_us"`
}

//go:embed c/allreduce.c
var program []byte

// Run measures and returns the results, by ranks, size, place and subject. Subjects that cannot be measured here, or
// fail, are left out, and missing says why. If ctx ends, the results are of the turns until then.
func Run(ctx context.Context, cfg Config) (results []Result, missing []error, err error) {
	dir, err := os.MkdirTemp("", "tutti-compare-")
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	subjects, missing := cfg.subjects(ctx, dir)
	results, failed, err := inTurns(ctx, subjects, cfg.Runs, cfg.Progress)
	return results, append(missing, failed...), err
}

// inTurns has each subject measure, again and again. One that fails is left out from there on.
func inTurns(
	ctx context.Context,
	subjects []subject,
	runs int,
	progress func(done, total int),
) (results []Result, failed []error, err error) {
	times := map[timeKey][]float64{}
	left := map[int]bool{}
	for run := range runs {
		for i, s := range subjects {
			if left[i] {
				continue
			}
			lines, err := s.turn(ctx)
			if ctx.Err() != nil {
				return medians(subjects, times), failed, context.Cause(ctx)
			}
			if err != nil {
				failed = append(failed, fmt.Errorf("%s, %d ranks: %w", s.name, s.ranks, err))
				left[i] = true
			}
			for _, l := range lines {
				times[timeKey{l.Work, i}] = append(times[timeKey{l.Work, i}], l.Time)
			}
			if progress != nil {
				progress(run*len(subjects)+i+1, runs*len(subjects))
			}
		}
	}
	return medians(subjects, times), failed, nil
}

// timeKey is a work and the index of a subject that did it.
type timeKey struct {
	Work
	subject int // an index
}

// medians makes results of times.
func medians(subjects []subject, times map[timeKey][]float64) (results []Result) {
	type seat struct {
		name  string // of a subject
		ranks int    // of its world
	}
	place := map[seat]int{}
	for i, s := range subjects {
		place[seat{s.name, s.ranks}] = i
	}
	for k, seconds := range times {
		s := subjects[k.subject]
		r := Result{
			Work:    k.Work,
			Subject: s.name,
			Ranks:   s.ranks,
			Time:    measure.Median(seconds),
			Best:    slices.Min(seconds),
			Runs:    seconds,
		}
		for _, against := range s.against {
			i, ok := place[seat{against, s.ranks}]
			if base := times[timeKey{k.Work, i}]; ok && len(base) > 0 {
				r.Against = against
				r.Ratio = r.Time / measure.Median(base)
				r.BestRatio = r.Best / slices.Min(base)
				break
			}
		}
		results = append(results, r)
	}
	slices.SortFunc(results, func(a, b Result) int {
		return cmp.Or(a.Ranks-b.Ranks, min(1, len(a.Pattern))-min(1, len(b.Pattern)), a.Bytes-b.Bytes,
			-cmp.Compare(a.Place, b.Place), cmp.Compare(a.Pattern, b.Pattern), cmp.Compare(a.Values, b.Values),
			place[seat{a.Subject, a.Ranks}]-place[seat{b.Subject, b.Ranks}])
	})
	return results
}

// subjects returns what can be measured here, by number of ranks and then in the order of the columns of a table.
func (c Config) subjects(ctx context.Context, dir string) (all []subject, missing []error) {
	var libraries []library
	for _, name := range cluster.MPIs() {
		if name == cluster.NoMPI {
			continue
		}
		l, err := findLibrary(ctx, dir, name)
		if err != nil {
			missing = append(missing, err)
			continue
		}
		libraries = append(libraries, l)
	}
	script := filepath.Join(dir, "gloo.py")
	_, err := TorchVersion(ctx, c.Python)
	if err == nil {
		err = os.WriteFile(script, glooProgram, 0o600)
	}
	withGloo := err == nil
	if err != nil {
		missing = append(missing, err)
	}
	for _, ranks := range c.Ranks {
		all = append(all, c.ofTutti(ranks, libraries)...)
		for _, l := range libraries {
			all = append(all, c.ofMPI(l, ranks)...)
		}
		if withGloo {
			all = append(all, c.ofGloo(ranks, script, libraries))
		}
	}
	return all, missing
}

// inCNames are the names of the subjects in C.
func inCNames(libraries []library) (names []string) {
	for _, l := range libraries {
		names = append(names, inC+l.name)
	}
	return names
}

// sharedOff keeps ranks over TCP from sharing memory.
const sharedOff = "TUTTI_TCP_SHARED=off"

// ofTutti are the subjects of tutti that need no MPI, and the floor.
func (c Config) ofTutti(ranks int, libraries []library) []subject {
	job := append(append([]string{"-n", strconv.Itoa(ranks), c.Tutti}, c.bench()...), "--backend", "tcp")
	launched := append([]string{"launch", "--no-prefix"}, job...)
	all := []subject{
		{name: floor, ranks: ranks, turn: func(ctx context.Context) ([]measured, error) { return c.floor(ctx, ranks) }},
		{
			name:    local,
			ranks:   ranks,
			against: append(inCNames(libraries), floor),
			turn:    c.program(c.Tutti, nil, append(c.bench(), "--ranks", strconv.Itoa(ranks))...),
		},
		{name: shared, ranks: ranks, against: append(inCNames(libraries), gloo), turn: c.program(c.Tutti, nil, launched...)},
		{
			name:    tcp,
			ranks:   ranks,
			against: append([]string{gloo}, inCNames(libraries)...),
			turn:    c.program(c.Tutti, []string{sharedOff}, launched...),
		},
	}
	if canBind(ranks) {
		all = append(all, subject{
			name:    shared + bound,
			ranks:   ranks,
			against: append(inCNames(libraries), gloo),
			turn:    c.program(c.Tutti, nil, append([]string{"launch", "--bind", "--no-prefix"}, job...)...),
		})
	}
	return all
}

//go:embed torch/gloo.py
var glooProgram []byte

// ofGloo is the subject of PyTorch over gloo, processes of this machine.
func (c Config) ofGloo(ranks int, script string, libraries []library) subject {
	sizes := list(c.Low, c.High, c.Step)
	return subject{
		name:    gloo,
		ranks:   ranks,
		against: inCNames(libraries),
		turn:    c.program(c.Python, []string{"OMP_NUM_THREADS=1"}, script, strconv.Itoa(ranks), sizes),
	}
}

// library is an MPI library and the program in C that was compiled for it.
type library struct {
	name   string   // "openmpi" or "mpich"
	mpirun string   // its launcher, a path
	binary string   // the program, a path
	env    []string // that the launcher needs besides the process's own, as NAME=value
}

// findLibrary compiles the program in C for an MPI library.
func findLibrary(ctx context.Context, dir, name string) (l library, err error) {
	l.name = name
	if l.mpirun, l.env, err = cluster.Launcher(name); err != nil {
		return l, err
	}
	compiler, err := exec.LookPath("mpicc." + name)
	if err != nil { // the only library here, or one with its own folder
		if compiler, err = exec.LookPath(filepath.Join(filepath.Dir(l.mpirun), "mpicc")); err != nil {
			return l, fmt.Errorf("no compiler for %s: looked for mpicc.%[1]s and mpicc beside %s", name, l.mpirun)
		}
	}
	source := filepath.Join(dir, "allreduce.c")
	l.binary = filepath.Join(dir, name)
	if err := os.WriteFile(source, program, 0o600); err != nil {
		return l, err
	}
	if out, err := exec.CommandContext(ctx, compiler, "-O3", "-o", l.binary, source).CombinedOutput(); err != nil {
		return l, fmt.Errorf("%s: %w\n%s", compiler, err, out)
	}
	return l, nil
}

// ofMPI are the subjects of an MPI library: C and tutti, also bound where that is the library's own option.
func (c Config) ofMPI(l library, ranks int) []subject {
	job := []string{"-n", strconv.Itoa(ranks)}
	if l.name == "openmpi" && ranks > runtime.NumCPU() {
		job = append(job, "--oversubscribe")
	}
	bench := append(append([]string{c.Tutti}, c.bench()...), "--backend", "mpi")
	all := []subject{
		{
			name:  inC + l.name,
			ranks: ranks,
			turn: c.program(l.mpirun, l.env, append(
				slices.Clone(job),
				l.binary,
				strconv.Itoa(c.Low),
				strconv.Itoa(c.High),
				strconv.Itoa(c.Step),
			)...),
		},
		{
			name:    inGo + l.name,
			ranks:   ranks,
			against: []string{inC + l.name},
			turn:    c.program(l.mpirun, l.env, slices.Concat(job, bench)...),
		},
	}
	if l.name == "openmpi" && canBind(ranks) {
		binding := []string{"--bind-to", "core", "-x", "GOMAXPROCS=2"} // as launch --bind has it
		all = append(all, subject{
			name:    inGo + l.name + bound,
			ranks:   ranks,
			against: []string{inC + l.name},
			turn:    c.program(l.mpirun, l.env, slices.Concat(binding, job, bench)...),
		})
	}
	return all
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
