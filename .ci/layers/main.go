// Command layers lists forbidden imports in packages of the library and of the module delta, and fails if there are
// any:
//
//	go run ./.ci/layers
//
// A package imports only packages above it in CONTRIBUTING.md's map, so comm knows no backend and distributed no device.
package main

import (
	"fmt"
	"log"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

const module = "github.com/tutti-go/tutti"

// layers maps packages to the packages of this module that they may import, besides dtype, atomicfile and
// internal/..., by patterns of package paths. The first match counts. Tests are ignored.
var layers = []struct{ importer, may string }{
	{"tutti", "comm comm/* runtime runtime/*"}, // the package at the root
	{"internal/*", ""},
	{"internal/*/*", ""},
	{"dtype", ""},
	{"atomicfile", ""},
	{"runtime", ""},
	{"runtime/kernel", "runtime"},
	{"runtime/internal/*", "runtime"},
	{"runtime/cpu/internal/*", "runtime runtime/kernel runtime/cpu/internal/*"},
	{"runtime/*", "runtime runtime/* runtime/internal/* runtime/cpu/internal/*"},

	{"comm", "runtime"},
	{"comm/backend", "comm runtime runtime/kernel"},
	{"comm/internal/trees", "comm runtime"},
	{"comm/commtest", "comm comm/backend comm/internal/trees runtime"},
	{"comm/checked", "comm comm/backend runtime"},
	{"comm/metered", "comm comm/backend runtime/kernel"},
	{"comm/record", "comm comm/backend runtime"},
	{"comm/staged", "comm comm/backend runtime"},
	{"comm/instrument", "comm comm/checked comm/record runtime"},
	{"comm/record/recordhttp", "comm comm/record comm/instrument"},
	{"comm/store", "comm"},
	{"comm/rendezvous", "comm comm/store"},
	{"comm/internal/invitation", "comm/store"},
	{"comm/internal/peers", "comm comm/store"},
	{"comm/internal/schedule", "comm comm/backend runtime runtime/cpu"},
	{"comm/internal/link", "runtime/cuda"},
	{"comm/internal/marks", "comm/backend runtime/cuda"},
	{"comm/internal/faulttest", "comm comm/checked comm/internal/trees runtime"},
	{"comm/internal/hosttest", "comm comm/commtest runtime runtime/cpu"},
	{"comm/internal/gputest", "comm comm/commtest comm/nccl comm/rendezvous comm/internal/faulttest runtime/cuda"},
	{"comm/noop", "comm comm/backend runtime"},
	{"comm/local", "comm comm/backend runtime"},
	{"comm/mpi", "comm comm/backend comm/internal/schedule runtime runtime/cpu"},
	{"comm/tcp", "comm comm/backend comm/internal/schedule comm/store comm/rendezvous runtime runtime/cpu"},
	{
		"comm/nccl",
		"comm comm/backend comm/internal/invitation comm/internal/link comm/internal/marks comm/internal/peers " +
			"comm/store comm/rendezvous runtime runtime/cpu runtime/cuda",
	},
	{
		"comm/p2p",
		"comm comm/backend comm/internal/link comm/internal/marks runtime runtime/kernel runtime/cpu " +
			"runtime/cuda",
	},

	{"distributed", "comm distributed/internal/base runtime"},
	{
		"distributed/internal/standin",
		"comm comm/commtest comm/local comm/metered distributed/internal/engine runtime runtime/kernel " +
			"runtime/cpu",
	},
	{
		"distributed/internal/engine",
		"comm comm/backend comm/metered distributed distributed/internal/base distributed/internal/state " +
			"distributed/internal/tuning runtime runtime/kernel",
	},
	{"distributed/internal/*", "comm runtime"},
	{"distributed/sparse", "comm distributed/internal/engine runtime runtime/kernel"},
	{
		"distributed/ddp",
		"comm comm/metered distributed distributed/internal/base distributed/internal/engine " +
			"distributed/internal/state distributed/sparse runtime runtime/kernel",
	},
	{
		"distributed/outer",
		"comm distributed distributed/internal/base distributed/internal/state distributed/sparse " +
			"distributed/ddp runtime runtime/kernel",
	},
	// runtime/cpu: the default, and host memory.
	{
		"distributed/elastic",
		"comm comm/instrument comm/store comm/rendezvous distributed runtime runtime/kernel runtime/cpu",
	},
	{
		"distributed/distributedtest",
		"comm comm/metered comm/commtest distributed distributed/internal/engine distributed/internal/tuning " +
			"distributed/sparse distributed/ddp distributed/outer runtime runtime/kernel",
	},

	// The module delta, which no package of the library imports.
	{"delta", "delta/internal/* comm distributed runtime runtime/cpu runtime/cuda"},
	{"delta/internal/*", ""},
	{"delta/checkpoint", "delta"},
}

// imports makes go list print a line for each import: the importer and the imported package.
const imports = `{{$p := .ImportPath}}{{range .Imports}}{{printf "%s %s\n" $p .}}{{end}}`

func main() {
	log.SetFlags(0)
	wrong := map[string]bool{}
	for _, goos := range []string{"linux", "windows", "darwin"} {
		list := exec.Command("go", "list", "-f", imports, "./...", "./delta/...")
		list.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+goos)
		list.Stderr = os.Stderr
		text, err := list.Output()
		if err != nil {
			log.Fatalf("go list: %v", err)
		}
		for line := range strings.Lines(string(text)) {
			importer, imported, _ := strings.Cut(strings.TrimSpace(line), " ")
			from, ours := name(importer)
			to, alsoOurs := name(imported)
			if ours && alsoOurs && !allowed(from, to) {
				wrong[from+" may not import "+to] = true
			}
		}
	}
	for w := range wrong {
		fmt.Println(w)
	}
	if len(wrong) > 0 {
		log.Fatalf("%d imports are not in the layers of .ci/layers", len(wrong))
	}
}

// name returns the path of a package within this module, "tutti" for its root, and whether the package is in this
// module.
func name(path string) (within string, ours bool) {
	if path == module {
		return "tutti", true
	}
	return strings.CutPrefix(path, module+"/")
}

// allowed reports whether a package may import another one.
func allowed(from, to string) bool {
	inside := strings.HasPrefix(to, "internal/")
	if strings.HasPrefix(from, "examples/") || from == "delta/example" {
		return !strings.Contains("/"+to, "/internal/")
	}
	if inside || to == "dtype" || to == "atomicfile" {
		return inside || from != "dtype" && from != "atomicfile"
	}
	for _, l := range layers {
		if matches(l.importer, from) {
			return slices.ContainsFunc(strings.Fields(l.may), func(may string) bool { return matches(may, to) })
		}
	}
	return false
}

func matches(pattern, name string) bool {
	ok, err := path.Match(pattern, name)
	if err != nil {
		log.Fatal(err)
	}
	return ok
}
