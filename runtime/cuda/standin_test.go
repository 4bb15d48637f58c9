package cuda

import (
	"fmt"
	"iter"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/cc"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/window"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The driver is opened once per process, so tests with the stand-in of testdata/driver.c run in separate processes:
// this test binary again, with these variables.
const (
	standInVariable = "TUTTI_TEST_STAND_IN" // set in such a process
	wantedVariable  = "TUTTI_TEST_WANTED"   // what the error of Open says there
)

func init() {
	if os.Getenv(standInVariable) != "" {
		moduleText = keptTexts(driverText)
	}
}

// keptTexts returns a function that prepares each text once.
func keptTexts(prepare func(ptx []byte, startsEarly bool) ([]byte, error)) func([]byte, bool) ([]byte, error) {
	type key struct {
		ptx         string
		startsEarly bool
	}
	var mu sync.Mutex
	texts := map[key][]byte{}
	return func(ptx []byte, startsEarly bool) ([]byte, error) {
		mu.Lock()
		defer mu.Unlock()
		k := key{string(ptx), startsEarly}
		if text, kept := texts[k]; kept {
			return text, nil
		}
		text, err := prepare(ptx, startsEarly)
		if err == nil {
			texts[k] = text
		}
		return text, err
	}
}

// TestOnStandIns runs the tests that need a driver, and those that provoke
// what a GPU does not do on request, without a GPU.
func TestOnStandIns(t *testing.T) {
	if os.Getenv(standInVariable) != "" {
		t.Skip("is in the process of the stand-in already")
	}
	library, old := buildStandIn(t), buildStandIn(t, "-DTOO_OLD")
	var building sync.Mutex
	emulating := ""
	emulator := func(t *testing.T) string {
		building.Lock()
		defer building.Unlock()
		if emulating == "" {
			emulating = buildStandIn(t, buildEmulator(t), "-lm")
		}
		return emulating
	}
	short := "-test.short" // fewer and smaller arrays on emulated GPUs
	// Selections of many blocks: a gradient has one of the larger sizes.
	skip := "-test.skip=^TestConformance$/^kernels$/^(top_k_step_by_step|top_k_of_chunks|select_near)$/" +
		"^((64|4097)_(ascending|denormal|descending|sparse|wide)|1000_(clustered|equal|special|ties|zero))$"
	if os.Getenv("TUTTI_EXTENDED") != "" {
		short = "-test.short=false"
		skip = "-test.skip=^$"
	}
	unavailable := []string{"-test.run=^TestOpenSaysWhatIsMissing$"}
	for name, c := range map[string]struct {
		file string
		env  []string
		args []string
	}{
		"all is well": {library, []string{"FAKE_CUDA_DEVICES=2", "FAKE_CUDA_MEMORY=2147483649"},
			[]string{"-test.run=^(TestStandIn|TestConformance$|TestDevices|TestOpenOf|TestEvents|TestGraph|TestScale|TestOutOfMemory|TestHotPaths|TestCopyStreams|TestPointers|TestWindow|TestAdopted|TestClosing|TestReleased|TestModule|TestShared|TestGrowth)",
				"-test.skip=^TestConformance/(kernels|windows)"}}, // it has the kernels of copies, Fill and Store only
		"kernels": {"", []string{"FAKE_CUDA_MEMORY=2147483649"},
			[]string{short, skip, "-test.run=^TestConformance$/^kernels$/(top|lower|copy|select|fit|fixed|union|give|hostile|encode|quantize)"}},
		"kernels beside the CPU's": {"", nil, []string{short, "-test.run=^TestKernels(Equal|DoNot|InA|Merge)"}},
		"windows":                  {"", nil, []string{short, "-test.run=^TestConformance$/^windows$"}},
		"steps of sparse patterns": {"", []string{"FAKE_CUDA_DEVICES=2"}, []string{"-test.run=^TestSteps"}},
		"no GPU": {library, []string{"FAKE_CUDA_DEVICES=0", wantedVariable + "=cuInit|CUDA_ERROR_NO_DEVICE (100)|no CUDA-capable device"},
			unavailable},
		"driver that lacks functions": {old, []string{"FAKE_CUDA_VERSION=11020", wantedVariable + "=" + filepath.Base(old) + "|CUDA 11.2|11.5 or newer"},
			unavailable},
		"driver that lacks functions it should have": {old, []string{wantedVariable + "=" + filepath.Base(old) + "|cuMemCreate|cuGraphInstantiateWithFlags"},
			unavailable},
		"driver that is too old for the kernels": {library, []string{"FAKE_CUDA_VERSION=11040", wantedVariable + "=CUDA 11.4|11.5 or newer"},
			unavailable},
		"no driver": {filepath.Join(t.TempDir(), "absent.so"), []string{wantedVariable + "=absent.so|install the NVIDIA driver|" + libraryVariable},
			unavailable},
		"GPU that is too old": {library, []string{"FAKE_CUDA_MAJOR=7"},
			[]string{"-test.run=^TestOpenRefusesAnOldGPU$"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			self, err := os.Executable()
			require.NoError(t, err)
			if c.file == "" {
				c.file = emulator(t)
			}
			cmd := exec.Command(self, append(c.args, "-test.v", "-test.timeout=5m")...)
			cmd.Env = append(append(os.Environ(), standInVariable+"=1", libraryVariable+"="+c.file), c.env...)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Contains(t, string(out), "--- PASS", "at least one test ran")
			require.NotRegexp(t, "(?m)^--- SKIP", string(out))
		})
	}
}

// buildStandIn compiles testdata/driver.c, or skips the test on a machine
// that cannot.
func buildStandIn(t *testing.T, flags ...string) string {
	t.Helper()
	library, err := cc.Build(t, "cc", "testdata/driver.c", "", append([]string{"-O2", "-shared", "-fPIC", "-lpthread"}, flags...)...)
	require.NoError(t, err)
	return library
}

// buildEmulator compiles the kernels for the host, with the compiler that writes
// their PTX.
func buildEmulator(t *testing.T) string {
	t.Helper()
	object, err := cc.Build(t, "clang-16", "testdata/emulator.cpp", sharedConstants(), "-std=c++17", "-O2", "-fPIC", "-ffp-contract=off",
		"-fno-exceptions", "-fno-rtti", "-Wno-unknown-pragmas", "-Wno-invalid-offsetof", "-c")
	require.NoError(t, err)
	return object
}

// sharedConstants is assertions in C++ that structures and constants are those of the kernels. It is always the same
// text: what has been compiled with it serves the next run.
func sharedConstants() string {
	var text strings.Builder
	equal := func(expression string, value int) {
		fmt.Fprintf(&text, "static_assert(%s == %d, \"%s is not what Go has\");\n", expression, value, expression)
	}
	equal("max_lists", maxLists)
	equal("inline_lists", inlineLists)
	equal("max_counts", maxCounts)
	equal("max_factors", maxFactors)
	equal("max_quantiles", maxQuantiles)
	equal("max_pieces", maxPieces)
	equal("max_copies", kernel.MaxCopies)
	equal("sizeof(moments)", momentsBytes)
	equal("sizeof(square_words)", squareBytes)
	equal("sizeof(put_args::word)", listsOfPut*listBytes)
	equal("sizeof(entries)", listBytes)
	equal("sizeof(piece)", int(reflect.TypeFor[pieceParameters]().Size()))
	equal("pick_blocks", picksPerSM)
	equal("fixed_tile::elements", fixedTile)
	equal("max_operands", window.MaxOperands)
	for _, structure := range slices.Sorted(maps.Keys(kernelStructures)) {
		parameters := kernelStructures[structure]
		equal(fmt.Sprintf("sizeof(%s)", structure), int(parameters.Size()))
		fields := offsets(parameters)
		for _, field := range slices.Sorted(maps.Keys(fields)) {
			equal(fmt.Sprintf("__builtin_offsetof(%s, %s)", structure, field), int(fields[field]))
		}
	}
	fmt.Fprintf(&text, "static_assert(sizeof(control) <= %d, \"the control does not fit\");\n", controlBytes)
	return text.String()
}

func TestSharedConstantsAreOneText(t *testing.T) {
	assert.Equal(t, sharedConstants(), sharedConstants())
}

// kernelStructures are the structures that kernels have as their parameter, and what Go has for them.
var kernelStructures = map[string]reflect.Type{
	"struct back":     reflect.TypeFor[restorationParameters](),
	"struct copy":     reflect.TypeFor[copyParameters](),
	"array":           reflect.TypeFor[arrayParameters](),
	"balance_args":    reflect.TypeFor[balanceParameters](),
	"bounds_args":     reflect.TypeFor[lowerBoundsParameters](),
	"chunks_args":     reflect.TypeFor[topKChunksParameters](),
	"copy_if_args":    reflect.TypeFor[copyIfParameters](),
	"count_args":      reflect.TypeFor[countAboveParameters](),
	"cut_args":        reflect.TypeFor[cutParameters](),
	"decode_args":     reflect.TypeFor[decodeParameters](),
	"dequantize_args": reflect.TypeFor[dequantizeParameters](),
	"encode_args":     reflect.TypeFor[encodeParameters](),
	"entries":         reflect.TypeFor[listParameters](),
	"fixed_args":      reflect.TypeFor[fixedParameters](),
	"square_args":     reflect.TypeFor[squareParameters](),
	"fit_args":        reflect.TypeFor[fitParameters](),
	"merge_args":      reflect.TypeFor[mergeParameters](),
	"narrow_args":     reflect.TypeFor[narrowParameters](),
	"outside_args":    reflect.TypeFor[cutOutsideParameters](),
	"pick_args":       reflect.TypeFor[pickParameters](),
	"piece":           reflect.TypeFor[pieceParameters](),
	"pieces_args":     reflect.TypeFor[copyPiecesParameters](),
	"reduce_args":     reflect.TypeFor[reduceParameters](),
	"put_args":        reflect.TypeFor[putListsParameters](),
	"quantize_args":   reflect.TypeFor[quantizeParameters](),
	"refine_args":     reflect.TypeFor[refineParameters](),
	"sample_args":     reflect.TypeFor[sampleParameters](),
	"scatter_args":    reflect.TypeFor[scatterParameters](),
	"segments":        reflect.TypeFor[segmentsParameters](),
	"sift_args":       reflect.TypeFor[siftParameters](),
	"sifted":          reflect.TypeFor[siftedParameters](),
	"sum_args":        reflect.TypeFor[sumSquaresParameters](),
}

// offsets returns where the fields of a structure are, by the names that they have on the device. Fields of an
// embedded structure are fields of the structure.
func offsets(structure reflect.Type) map[string]uintptr {
	all := map[string]uintptr{}
	for field := range fields(structure) {
		if field.Anonymous {
			for name, offset := range offsets(field.Type) {
				all[name] = field.Offset + offset
			}
			continue
		}
		name := field.Tag.Get("cu")
		if name == "" {
			name = snakeCase(field.Name)
		}
		all[name] = field.Offset
	}
	return all
}

// fields yields the fields of a structure.
func fields(structure reflect.Type) iter.Seq[reflect.StructField] {
	return func(yield func(reflect.StructField) bool) {
		for i := range structure.NumField() {
			if !yield(structure.Field(i)) {
				return
			}
		}
	}
}

// snakeCase returns a name as the kernels' sources would write it.
func snakeCase(name string) string {
	var text strings.Builder
	for _, letter := range name {
		if unicode.IsUpper(letter) {
			text.WriteByte('_')
		}
		text.WriteRune(unicode.ToLower(letter))
	}
	return text.String()
}

// A launch has room for the parameters of every kernel.
func TestParametersFitIntoALaunch(t *testing.T) {
	for structure, parameters := range kernelStructures {
		assert.LessOrEqual(t, int(parameters.Size()), 8*maxValues, structure)
	}
	for _, parameters := range []reflect.Type{
		reflect.TypeFor[fillParameters](),
		reflect.TypeFor[scaleParameters](),
		reflect.TypeFor[storeParameters](),
		reflect.TypeFor[clipFactorParameters](),
		reflect.TypeFor[stridedParameters](),
	} {
		words := 0 // each its own parameter
		for field := range fields(parameters) {
			if field.Name != "_" {
				require.Equal(t, uintptr(8*words), field.Offset, "%v.%s is a parameter", parameters, field.Name)
				words++
			}
		}
		assert.LessOrEqual(t, words, maxParams, parameters)
		assert.LessOrEqual(t, int(parameters.Size()), 8*maxValues, parameters)
	}
}

func TestOpenSaysWhatIsMissing(t *testing.T) {
	wanted := os.Getenv(wantedVariable)
	if wanted == "" {
		t.Skip("needs a driver that does not work; see TestOnStandIns")
	}
	_, countErr := Count()
	_, openErr := Open(0)
	_, devicesErr := Devices()
	for _, err := range []error{countErr, openErr, devicesErr} {
		require.ErrorIs(t, err, runtime.ErrUnavailable)
		for text := range strings.SplitSeq(wanted, "|") {
			assert.ErrorContains(t, err, text)
		}
	}
}

func TestOpenRefusesAnOldGPU(t *testing.T) {
	if os.Getenv(standInVariable) == "" {
		t.Skip("needs an old GPU; see TestOnStandIns")
	}
	_, err := Open(0)
	require.ErrorIs(t, err, runtime.ErrUnsupported)
	assert.ErrorContains(t, err, "compute capability 7.0, 8.0 or newer is needed")
}

// standIn is what testdata/driver.c exports beside the driver API.
type standIn struct {
	Alive      dl.Func `sym:"fake_alive"`
	Violations dl.Func `sym:"fake_violations"`
	Break      dl.Func `sym:"fake_break"`
	Fail       dl.Func `sym:"fake_fail"`
	Hold       dl.Func `sym:"fake_hold"`
	Stall      dl.Func `sym:"fake_stall"`
	Context    dl.Func `sym:"fake_context"`
	Submitted  dl.Func `sym:"fake_submitted"`
	Waited     dl.Func `sym:"fake_waited"`
	Meet       dl.Func `sym:"fake_meet"`
	Exclusive  dl.Func `sym:"fake_exclusive"`
	Full       dl.Func `sym:"fake_full"`

	// Of the API, as others of the process call it.
	BeginCapture dl.Func `sym:"cuStreamBeginCapture_v2"`
	EndCapture   dl.Func `sym:"cuStreamEndCapture"`
	GraphDestroy dl.Func `sym:"cuGraphDestroy"`
}

// kinds are the things that the stand-in counts, in its order.
var kinds = []string{"contexts", "streams", "events", "graphs", "modules", "mappings", "pinned", "registered"}

// alive returns what exists now, by kind; what does not is left out.
func (f *standIn) alive() map[string]int {
	counts := make(map[string]int)
	for i, kind := range kinds {
		if n := int(f.Alive.Int(uintptr(i))); n != 0 {
			counts[kind] = n
		}
	}
	return counts
}

// openStandIn binds the stand-in, or skips the test where there is none, and
// sees at the test's end that no call was made that a driver would refuse for
// its context or crash on.
func openStandIn(t *testing.T) *standIn {
	t.Helper()
	if os.Getenv(standInVariable) == "" {
		t.Skip("needs the stand-in; see TestOnStandIns")
	}
	lib, err := dl.Open(os.Getenv(libraryVariable))
	require.NoError(t, err)
	f := &standIn{}
	require.NoError(t, lib.Bind(f))
	before := f.Violations.Int()
	t.Cleanup(func() {
		f.Break.Call(0, 0)
		f.Hold.Call(0)
		assert.Zero(t, f.Violations.Int()-before, "calls that a driver would refuse or crash on")
	})
	return f
}

// openRuntime opens a runtime that the test closes itself.
func openRuntime(t *testing.T, index int, opts ...Option) *Runtime {
	t.Helper()
	rt, err := Open(index, opts...)
	require.NoError(t, err)
	return rt
}
