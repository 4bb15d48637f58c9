//go:build !simulated

// Package simulation runs this repository's concurrent code in seeded simulations. Its tests build a binary from the
// files with the tag simulated, in which the packages in [simulated] get their locks, goroutines and connections from
// package internal/sim, and run it.
//
// A seed fixes the program of the ranks, the network, the faults, and the interleaving of goroutines. It does not fix
// random numbers of cryptography, which change no event. In long runs (TUTTI_SIM_SECONDS, TUTTI_SIM_RUNS,
// TUTTI_SIM_EVENTS) and in replays (TUTTI_SIM_SEED), changes to the runtime make select's choice among ready cases,
// and the order of maps, follow from the virtual time as well. TestReplay compares the traces of runs. A failure
// prints the seed and the last events.
package simulation

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/mutate"
)

// simulated are the packages whose goroutines all run from point to point.
var simulated = []string{
	"comm", "comm/backend", "comm/checked", "comm/internal/peers", "comm/internal/schedule", "comm/internal/trees", "comm/local",
	"comm/record", "comm/rendezvous", "comm/store", "comm/tcp", "internal/gate", "internal/poll", "internal/tally",
	"distributed", "distributed/internal/base", "distributed/sparse", "distributed/ddp", "distributed/outer", "distributed/elastic",
}

const (
	module    = "github.com/tutti-go/tutti/"
	scheduler = "simulated_by"
)

// change replaces a text that occurs once in a file.
type change struct{ file, old, new string }

// The simulation answers instead of the operating system, and waiting ranks poll less often before they sleep.
var adaptations = []change{
	{"comm/tcp/link_unix.go", "syscall.Write(int(fd), b)", scheduler + ".TrySend(fd, b)"},
	{"internal/poll/pause_linux.go", "_, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0)", scheduler + ".Pause()"},
	{"comm/tcp/shared.go", "segment.Machine()", "uint64(0), error(nil)"}, // each rank is on a separate host
	{"comm/internal/schedule/segment.go", "const wholeSharedLimit = 16 << 10", "const wholeSharedLimit = 400"},
	{"comm/internal/schedule/segment.go", "const pairBlockBytes = 256 << 10", "const pairBlockBytes = 2 << 10"},
	{"comm/internal/schedule/segment.go", "shortBlock  = 128 << 10", "shortBlock  = 2 << 10"},
	{"comm/internal/schedule/segment.go", "longBlock   = 512 << 10", "longBlock   = 4 << 10"},
	{"comm/internal/schedule/segment.go", "const looks = 64", "const looks = 2"},
	{"comm/local/spin.go", "const yieldLooks = 16", "const yieldLooks = 2"},
	{"comm/local/spin.go", "const looksBetween = 16", "const looksBetween = 2"},
	{"internal/poll/pace.go", "return maxSleep\n}", "return " + scheduler + ".Longer(maxSleep)\n}"},
	{"internal/poll/pause_linux.go", "_ = syscall.Nanosleep(&t, nil)", "_ = t; time.Sleep(d)"},
}

// Copies take time.
var slow = []change{
	{"comm/local/message.go", "n := min(bytes-offset, messageChunk)", "n := min(bytes-offset, messageChunk); " + scheduler + ".Linger()"},
	{"comm/tcp/lane.go", "memory[0] = l.head[0]", scheduler + ".Linger(); memory[0] = l.head[0]"},
}

// The runtime chooses randomly among ready cases and orders maps randomly. The other changes make points cheaper.
var determined = []change{
	{"runtime/select.go", "j := cheaprandn(uint32(norder + 1))",
		"j := cheaprandn(uint32(norder + 1)); if b := getg().bubble; b != nil { j = uint32((uint64(b.now) + uint64(norder)) * 0x9e3779b97f4a7c15 >> 33) % uint32(norder+1) }"},
	{"runtime/rand.go", "func maps_rand() uint64 {\n\treturn rand()\n",
		"func maps_rand() uint64 {\n\tif b := getg().bubble; b != nil { return uint64(b.now) * 0x9e3779b97f4a7c15 }\n\treturn 0\n"},
	// The compiler makes maps that do not escape begin with a number from rand.
	{"runtime/rand.go", "func rand() uint64 {\n", "func rand() uint64 {\n\tif b := getg().bubble; b != nil {\n\t\treturn b.draw()\n\t}\n"},
	{"runtime/synctest.go", "type synctestBubble struct {\n", "type synctestBubble struct {\n\tdrawn   uint64 // numbers of rand\n\tdrawing int64  // when\n"},
	// The hash functions' keys determine where a large map has its entries. Every process draws new keys.
	{"runtime/alg.go", "\t\tkey[i] = bootstrapRand()\n", "\t\tkey[i] = uint64(i+1) * 0x9e3779b97f4a7c15\n"},
	{"runtime/alg.go", "\t\thashkey[i] = uintptr(bootstrapRand())\n", "\t\thashkey[i] = uintptr(uint64(i+1) * 0x9e3779b97f4a7c15)\n"},
	// A sleep ends at once if nothing precedes its end, and the last goroutine to sleep advances the clock itself.
	{"runtime/time.go", "\tgp.sleepWhen = when\n", "\tgp.sleepWhen = when\n\tif gp.bubble != nil && gp.bubble.leap(when) {\n\t\treturn\n\t}\n"},
	{"runtime/synctest.go", "\t\tthrow(\"active < 0\")\n\t}\n\twake := bubble.maybeWakeLocked()\n", "\t\tthrow(\"active < 0\")\n\t}\n\twake := bubble.advance(bubble.maybeWakeLocked())\n"},
	{"runtime/synctest.go", "var bubbleGen atomic.Uint64", leaps + "\nvar bubbleGen atomic.Uint64"},
}

// leaps is the simulation's addition to bubbles: leap and advance act as their root does, in the same order, without
// a switch to it.
const leaps = `
// draw returns a number that follows from the time and from how many were drawn at that time.
//
//go:nosplit
func (bubble *synctestBubble) draw() uint64 {
	if bubble.drawing != bubble.now {
		bubble.drawing = bubble.now
		bubble.drawn = 0
	}
	bubble.drawn++
	x := uint64(bubble.now)*0x9e3779b97f4a7c15 + bubble.drawn*0xbf58476d1ce4e5b9
	x = (x ^ x>>30) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (bubble *synctestBubble) leap(when int64) bool {
	lock(&bubble.mu)
	next := bubble.timers.wakeTime()
	alone := bubble.running == 1 && bubble.active == 0 && (next == 0 || when < next)
	if alone {
		bubble.now = when
	}
	unlock(&bubble.mu)
	return alone
}

func (bubble *synctestBubble) advance(wake *g) *g {
	for wake == bubble.root && getg() == getg().m.g0 && !bubble.done {
		next := bubble.timers.wakeTime()
		if next == 0 {
			break
		}
		bubble.now = next
		unlock(&bubble.mu)
		bubble.timers.check(next, bubble)
		lock(&bubble.mu)
		bubble.active--
		wake = bubble.maybeWakeLocked()
	}
	return wake
}
`

// calls are the functions and types that the simulation provides to packages.
var calls = map[string]string{
	"runtime.Gosched": "Pause", "runtime.GOMAXPROCS": "Processors", "time.AfterFunc": "AfterFunc", "context.AfterFunc": "AfterContext",
	"net.Dialer": "Dialer", "net.ListenConfig": "ListenConfig", "net.Listen": "Listen", "rand.Uint64": "RandomNumber", "rand.IntN": "RandomIntN", "rand.Text": "RandomText",
}

// seeded are the names that a package may use from one that makes random numbers. The simulation provides the others.
var seeded = []string{"New", "NewPCG", "Rand", "Reader"}

// used keeps imports that a changed file no longer uses.
var used = map[string]string{
	"runtime": "var _ runtime.Error", "time": "var _ time.Duration", "context": "var _ context.Context", "net": "var _ net.Conn", "syscall": "var _ syscall.Errno", "math/rand/v2": "var _ rand.Source", "crypto/rand": "var _ = rand.Reader",
}

// build makes the binary. It contains the mutants, of which TUTTI_SIM_MUTANT selects one.
func build(t *testing.T, deterministic bool, mutants ...mutant) (binary string, err error) {
	root, err := filepath.Abs("../../..")
	require.NoError(t, err)
	dir := t.TempDir()
	if keep := os.Getenv("TUTTI_SIM_KEEP"); keep != "" {
		dir = keep
	}
	replace := map[string]string{}
	write := func(file, text string) {
		to := filepath.Join(dir, strings.ReplaceAll(file, "/", "-"))
		require.NoError(t, os.WriteFile(to, []byte(text), 0o600))
		if !filepath.IsAbs(file) {
			file = filepath.Join(root, file)
		}
		replace[file] = to
	}
	own, _ := filepath.Glob("*_test.go")
	for _, file := range own { // so that go test's cache has no results from before they changed
		_, _ = os.ReadFile(file)
	}
	for _, file := range []string{"sched", "network"} {
		text, err := os.ReadFile(filepath.Join(root, "internal/sim", file+"_test.go"))
		require.NoError(t, err)
		write("internal/sim/"+file+".go", string(text))
	}
	changes := slices.Concat(adaptations, slow)
	for _, folder := range simulated {
		files, _ := os.ReadDir(filepath.Join(root, folder))
		for _, f := range files {
			name := folder + "/" + f.Name()
			if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				continue
			}
			text, err := os.ReadFile(filepath.Join(root, name))
			require.NoError(t, err)
			write(name, instrument(t, withMutants(t, name, apply(t, name, string(text), changes), mutants)))
		}
	}
	if deterministic {
		goroot, err := exec.Command("go", "env", "GOROOT").Output()
		require.NoError(t, err)
		for _, c := range determined {
			name := filepath.Join(strings.TrimSpace(string(goroot)), "src", c.file)
			text, err := os.ReadFile(name)
			require.NoError(t, err)
			write(name, apply(t, c.file, string(text), determined))
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	require.NoError(t, err)
	overlay, binary := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "simulation.test")
	require.NoError(t, os.WriteFile(overlay, text, 0o600))
	out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-tags", "simulated", "-overlay", overlay, "-o", binary, ".").CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w:\n%.3000s", err, out)
	}
	return binary, err
}

// apply makes the changes to one file.
func apply(t *testing.T, name, text string, changes []change) string {
	for _, c := range changes {
		if c.file == name {
			require.Equal(t, 1, strings.Count(text, c.old), "%s: %q", name, c.old)
			text = strings.Replace(text, c.old, c.new, 1)
		}
	}
	return text
}

// withMutants inserts the mutants of a file into it.
func withMutants(t *testing.T, name, text string, mutants []mutant) string {
	var variants []mutate.Variant
	for i, m := range mutants {
		if m.file == name {
			variants = append(variants, mutate.Variant{Number: i + 1, Old: m.old, New: m.new})
		}
	}
	changed, err := mutate.Functions(text, scheduler+".Mutant", variants)
	require.NoError(t, err, name)
	return changed
}

// instrument inserts points into a file.
func instrument(t *testing.T, text string) string {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "", text, parser.ParseComments)
	require.NoError(t, err, text)
	type edit struct {
		at, end int
		text    string
	}
	var edits []edit
	offset := func(p token.Pos) int { return files.Position(p).Offset }
	insert := func(p token.Pos, text string) { edits = append(edits, edit{offset(p), offset(p), text}) }
	const point = scheduler + ".Point()"
	tail := ""
	ast.Inspect(file, func(n ast.Node) bool {
		var list []ast.Stmt
		switch n := n.(type) {
		case *ast.ImportSpec:
			if path, _ := strconv.Unquote(n.Path.Value); path == "sync" || path == "sync/atomic" {
				insert(n.Pos(), filepath.Base(path)+" ")
				edits = append(edits, edit{offset(n.Path.Pos()), offset(n.Path.End()), strconv.Quote(module + "internal/sim")})
			} else if keep := used[path]; keep != "" && n.Name == nil {
				tail += "\n" + keep
			}
		case *ast.SelectorExpr:
			x, ok := n.X.(*ast.Ident)
			if ok && x.Name == "rand" && calls["rand."+n.Sel.Name] == "" {
				require.Contains(t, seeded, n.Sel.Name, "random numbers that no seed fixes: %v", files.Position(n.Pos()))
			}
			if ok && calls[x.Name+"."+n.Sel.Name] != "" {
				edits = append(edits, edit{offset(n.Pos()), offset(n.End()), scheduler + "." + calls[x.Name+"."+n.Sel.Name]})
			}
		case *ast.GoStmt:
			edits = append(edits, edit{offset(n.Pos()), offset(n.Pos()) + 2, scheduler + ".Go(func() {"})
			insert(n.End(), " })")
		case *ast.BlockStmt:
			list = n.List
		case *ast.CaseClause:
			list = n.Body
		case *ast.CommClause:
			insert(n.Colon+1, " "+point+";")
			list = n.Body
		}
		for _, s := range list {
			if !communicates(s) {
				continue
			}
			insert(s.Pos(), point+"; ")
			switch s.(type) {
			case *ast.SendStmt, *ast.ExprStmt, *ast.AssignStmt:
				insert(s.End(), "; "+point)
			}
		}
		return true
	})
	insert(file.Name.End(), "; import "+scheduler+" "+strconv.Quote(module+"internal/sim"))
	slices.SortStableFunc(edits, func(a, b edit) int { return b.at - a.at })
	for i := 0; i < len(edits); {
		// The order of points at one place stays.
		j := i
		for j < len(edits) && edits[j].at == edits[i].at {
			j++
		}
		for k := j - 1; k >= i; k-- {
			text = text[:edits[k].at] + edits[k].text + text[edits[k].end:]
		}
		i = j
	}
	return text + tail + "\nvar _ = " + point[:len(point)-2] + "\n"
}

// communicates reports whether a statement uses a channel, apart from its nested statements.
func communicates(s ast.Stmt) (found bool) {
	switch s.(type) {
	case *ast.SelectStmt:
		return true
	case *ast.DeferStmt, *ast.GoStmt, *ast.CommClause, *ast.CaseClause:
		return false
	}
	ast.Inspect(s, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit, *ast.BlockStmt:
			return false
		case *ast.SendStmt:
			found = true
		case *ast.UnaryExpr:
			found = found || n.Op == token.ARROW
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.Ident); ok && f.Name == "close" {
				found = true
			}
		}
		return true
	})
	return found
}

// simulate runs TestSeeds of a binary with environment variables.
func simulate(t *testing.T, binary, test string, variables ...string) (string, error) {
	c := exec.CommandContext(t.Context(), binary, "-test.run", "^"+test+"$", "-test.timeout", "0", "-test.v")
	c.Env = append(append(os.Environ(), "GOMAXPROCS=1", "GOGC=400"), variables...)
	out, err := c.CombinedOutput()
	return string(out), err
}

// here skips the test if there is no go command or its programs do not run.
func here(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil || testing.Short() || runtime.GOOS != "linux" {
		t.Skip("builds a program with the go command, on Linux")
	}
}

// TestSimulation runs fixed seeds. It then runs new ones for TUTTI_SIM_SECONDS, or TUTTI_SIM_RUNS of them, or seeds
// in which members of elastic jobs have TUTTI_SIM_EVENTS events. TUTTI_SIM_SEED runs one seed, as the report of a
// failure says.
func TestSimulation(t *testing.T) {
	here(t)
	long := slices.ContainsFunc([]string{"TUTTI_SIM_SECONDS", "TUTTI_SIM_RUNS", "TUTTI_SIM_EVENTS", "TUTTI_SIM_SEED"}, func(name string) bool { return os.Getenv(name) != "" })
	binary, err := build(t, long)
	require.NoError(t, err)
	out, err := simulate(t, binary, "TestSeeds")
	require.NoError(t, err, out)
	t.Log(out)
}

// TestReplay runs seeds twice, in two processes, and compares all events. It rebuilds the runtime; set
// TUTTI_EXTENDED.
func TestReplay(t *testing.T) {
	here(t)
	if os.Getenv("TUTTI_EXTENDED") == "" {
		t.Skip("builds the runtime anew; set TUTTI_EXTENDED")
	}
	binary, err := build(t, true)
	require.NoError(t, err)
	var traces [2]string
	for i := range traces {
		traces[i], err = simulate(t, binary, "TestTraces")
		require.NoError(t, err, traces[i])
	}
	require.Equal(t, lines(traces[0]), lines(traces[1]))
}

// lines returns the lines of traces.
func lines(out string) (traces []string) {
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "trace ") {
			traces = append(traces, line)
		}
	}
	return traces
}
