// Package compare compares allreduce on the host with MPI_Allreduce in C, and with the least time that the hardware
// of this machine allows.
//
// A subject is a program that measures all sizes. Subjects take turns several times, so that other load on the
// machine affects all of them.
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

// Config describes a comparison.
type Config struct {
	Ranks           []int // numbers of ranks
	Low, High, Step int   // sizes in bytes, as in [bench.Sizes]
	Runs            int   // number of turns of each subject
	// Tutti is the path of the measured tutti command.
	Tutti  string
	Python string // interpreter that has PyTorch, for gloo
	// Progress is called after each turn; nil for no calls.
	Progress func(done, total int)
}

// mostRuns would take weeks.
const mostRuns = 1 << 20

// Validate returns an error that names the first invalid setting.
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

// Work is a measurement that subjects make: an allreduce in a place, or steps of a pattern of package sparse.
type Work struct {
	Bytes   int         `json:"bytes"`
	Place   bench.Place `json:"place,omitempty"`
	Pattern string      `json:"pattern,omitempty"`
	Values  string      `json:"values,omitempty"` // codec of a pattern's values
}

// String names the work without its size.
func (w Work) String() string {
	if w.Pattern == "" {
		return string(w.Place)
	}
	return backend.PatternName(w.Pattern, "", w.Values)
}

// Result is one line of --json: the times of one subject for one work.
type Result struct {
	Work
	Subject string    `json:"subject"`
	Ranks   int       `json:"ranks"`
	Time    float64   `json:"time_us"` // median of the runs
	Best    float64   `json:"best_us"` // fastest run
	Runs    []float64 `json:"runs_us"`
	// Against is the subject that this one is compared with, "" for none. Ratio and BestRatio are the ratios of the
	// times.
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
	shared = "shared" // tcp with shared memory between ranks
	gloo   = "gloo"
	inC    = "c/"
	inGo   = "mpi/"
	bound  = "/bound" // suffix of a subject whose ranks each have their own processors
)

// canBind reports whether each rank can have its own processors.
func canBind(ranks int) bool { return runtime.GOOS == "linux" && ranks <= runtime.NumCPU() }

// subject is a measured program.
type subject struct {
	name  string // in tables
	ranks int    // of its world
	// against lists subjects. A time is divided by the time of the first listed one with as many ranks and the same
	// work.
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

// Run measures and returns the results by ranks, size, place and subject. It leaves out subjects that cannot be
// measured here, or fail; missing has the reasons. If ctx ends, the results are from the turns so far.
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

// inTurns makes the subjects measure alternately. A failed subject takes no more turns.
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

// timeKey is a work and the index of a subject that measured it.
type timeKey struct {
	Work
	subject int // an index
}

// medians makes results from times.
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

// subjects returns the subjects that can be measured here, by number of ranks and then in the order of a table's
// columns.
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

// inCNames returns the names of the subjects in C.
func inCNames(libraries []library) (names []string) {
	for _, l := range libraries {
		names = append(names, inC+l.name)
	}
	return names
}

// sharedOff keeps ranks over TCP from sharing memory.
const sharedOff = "TUTTI_TCP_SHARED=off"

// ofTutti returns the subjects of tutti without MPI, and the floor.
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

// ofGloo returns the subject of PyTorch over gloo, with processes on this machine.
func (c Config) ofGloo(ranks int, script string, libraries []library) subject {
	sizes := list(c.Low, c.High, c.Step)
	return subject{
		name:    gloo,
		ranks:   ranks,
		against: inCNames(libraries),
		turn:    c.program(c.Python, []string{"OMP_NUM_THREADS=1"}, script, strconv.Itoa(ranks), sizes),
	}
}

// library is an MPI library and the C program compiled for it.
type library struct {
	name   string   // "openmpi" or "mpich"
	mpirun string   // its launcher, a path
	binary string   // the program, a path
	env    []string // additional environment for the launcher, as NAME=value
}

// findLibrary compiles the C program for an MPI library.
func findLibrary(ctx context.Context, dir, name string) (l library, err error) {
	l.name = name
	if l.mpirun, l.env, err = cluster.Launcher(name); err != nil {
		return l, err
	}
	compiler, err := exec.LookPath("mpicc." + name)
	if err != nil { // the only library here, or one in a separate folder
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

// ofMPI returns the subjects of an MPI library: C and tutti, also bound if the library has that option.
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
		binding := []string{"--bind-to", "core", "-x", "GOMAXPROCS=2"} // as launch --bind does
		all = append(all, subject{
			name:    inGo + l.name + bound,
			ranks:   ranks,
			against: []string{inC + l.name},
			turn:    c.program(l.mpirun, l.env, slices.Concat(binding, job, bench)...),
		})
	}
	return all
}

// bench returns tutti's arguments for the measurement that the C program makes.
func (c Config) bench() []string {
	return []string{"bench", "allreduce", "--json", "--verify=false",
		"--min", strconv.Itoa(c.Low), "--max", strconv.Itoa(c.High), "--step", strconv.Itoa(c.Step)}
}

// program is the turn of a subject that is one program.
func (c Config) program(path string, env []string, args ...string) func(context.Context) ([]measured, error) {
	return func(ctx context.Context) ([]measured, error) {
		lines, err := run(ctx, path, env, args...)
		for i := range lines {
			lines[i].Bytes = max(lines[i].Bytes, c.Low) // tutti rounds to whole elements
		}
		return lines, err
	}
}

// run runs a program and parses its measurements.
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
		if m.Pattern != "" { // a pattern has no place
			m.Place = ""
		}
		lines = append(lines, m)
	}
	return lines, nil
}
