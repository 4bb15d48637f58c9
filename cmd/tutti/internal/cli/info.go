package cli

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/klauspost/cpuid/v2"
	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/cluster"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/machine"
	"github.com/tutti-go/tutti/internal/sparsity"
)

// information is the output of `tutti info --json`.
type information struct {
	Version    string `json:"version"`       // of tutti
	Go         string `json:"go"`            // version of the compiler
	OS         string `json:"os"`            // as Go names it
	Arch       string `json:"arch"`          // as Go names it
	CPU        string `json:"cpu"`           // model name, "" if unknown
	Cores      int    `json:"logical_cores"` // usable by this process
	GoMaxProcs int    `json:"gomaxprocs"`    // of this process
	// Bound is a warning if the launcher bound this process to one of several processors.
	Bound string `json:"bound,omitempty"`
	// Features are the instruction sets that tutti uses and this processor has.
	Features []string `json:"cpu_features"`
	Memory   uint64   `json:"memory_bytes"`
	Free     uint64   `json:"memory_free_bytes"`
	backend.GPUs
	Backends []backendInfo `json:"backends"`
	// NoCluster says why `tutti cluster` does not work here; "" if it works.
	NoCluster string   `json:"cluster_unavailable"`
	Patterns  []string `json:"patterns"`
	DTypes    []string `json:"dtypes"`
}

// backendInfo says whether a backend works on this machine.
type backendInfo struct {
	Name      string `json:"name"`      // for --backend
	Summary   string `json:"summary"`   // one line
	Available bool   `json:"available"` // it works here
	// Detail is what the backend would use, or the reason why it does not work.
	Detail string `json:"detail"`
}

func newInfo() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "info",
		Short: "Show the machine, the backends and what tutti supports",
		Long: `info shows the machine, its GPUs and how they are linked, which backends work
here and why the others do not. In a job of several processes the first one
prints.`,
		Example: `  tutti info
  tutti info --json | jq '.backends[] | select(.available) | .name'`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// The rank is known even if the rest of the environment is wrong.
			if job, _ := rendezvous.FromEnv(os.Getenv); job.Rank > 0 {
				return nil
			}
			info := collect(cmd)
			object, text := console.Forms(cmd.OutOrStdout(), asJSON)
			console.WriteJSON(object, info)
			info.print(text)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object instead of the tables")
	return cmd
}

// newProbe makes the hidden command that the info command starts in a separate process; see [backend.ProbeMPI].
func newProbe() *cobra.Command {
	return &cobra.Command{
		Use:     backend.ProbeCommand,
		Short:   "Initialize MPI and print the level of threads that it provides",
		Example: "  tutti " + backend.ProbeCommand,
		Hidden:  true,
		Args:    noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			threads, err := backend.ThreadLevel()
			if err == nil {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), threads)
			}
			return err
		},
	}
}

func collect(cmd *cobra.Command) information {
	info := information{
		Version:    version(),
		Go:         runtime.Version(),
		OS:         runtime.GOOS,
		Arch:       runtime.GOARCH,
		CPU:        cpuid.CPU.BrandName,
		Cores:      runtime.NumCPU(),
		GoMaxProcs: runtime.GOMAXPROCS(0),
		Features:   []string{},
		Bound:      machine.Bound(),
		GPUs:       backend.LookForGPUs(),
		Patterns:   sparsity.Patterns(),
		NoCluster:  backend.Reason(cluster.Available("")),
	}
	info.Memory, info.Free = machine.Memory()
	for _, f := range []cpuid.FeatureID{cpuid.AVX2, cpuid.F16C, cpuid.POPCNT} {
		if cpuid.CPU.Has(f) {
			info.Features = append(info.Features, f.String())
		}
	}
	for _, b := range backend.All() {
		detail, err := b.Probe(cmd.Context())
		if err != nil {
			detail = err.Error()
		}
		info.Backends = append(info.Backends, backendInfo{
			Name:      b.Name,
			Summary:   b.Summary,
			Available: err == nil,
			Detail:    detail,
		})
	}
	for _, d := range dtype.All() {
		info.DTypes = append(info.DTypes, d.String())
	}
	return info
}

func (info information) print(out io.Writer) {
	features := strings.Join(info.Features, " ")
	if features == "" {
		features = "none, portable code only"
	}
	host := console.NewTable()
	host.AppendRows([]table.Row{
		{"tutti", info.Version},
		{"go", fmt.Sprintf("%s %s/%s", info.Go, info.OS, info.Arch)},
		{"cpu", fmt.Sprintf("%s, %s, GOMAXPROCS %d", info.CPU, backend.Counted(info.Cores, "logical core"), info.GoMaxProcs)},

		{"instruction sets used", features},
		{"memory", fmt.Sprintf("%s, %s free", gibibytes(info.Memory), gibibytes(info.Free))},
		{"patterns", strings.Join(info.Patterns, " ")},
		{"dtypes", strings.Join(info.DTypes, " ")},
		{"emulated clusters", cmp.Or(info.NoCluster, "tutti cluster works here")},
	})
	if info.Bound != "" {
		host.AppendRow(table.Row{"warning", info.Bound})
	}
	console.PrintTable(out, host, nil, 2)
	fmt.Fprintln(out)
	printGPUs(out, info.GPUs)
	fmt.Fprintln(out)

	backends := console.NewTable()
	backends.AppendHeader(table.Row{"backend", "ranks are", "available", ""})
	for _, b := range info.Backends {
		backends.AppendRow(table.Row{
			b.Name,
			b.Summary,
			console.Yes[b.Available],
			info.detail(b),
		})
	}
	console.PrintTable(out, backends, nil, 2, 4)
}

// detail describes a backend without repeating the output above it.
func (info information) detail(b backendInfo) string {
	for _, absence := range []struct{ text, short string }{
		{info.NoGPU, "no GPU, see above"},
		{info.NoNCCL, "no NCCL, see above"},
	} {
		if !b.Available && absence.text != "" && strings.Contains(b.Detail, absence.text) {
			return absence.short
		}
	}
	return b.Detail
}

func gibibytes(bytes uint64) string {
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}

// newVersion makes the version command, which users try before --version.
func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  tutti version",
		Args:    noArguments,
		Hidden:  true,
		Run:     func(cmd *cobra.Command, _ []string) { cmd.Printf("tutti %s\n", version()) },
	}
}

// version returns the module's version and, for builds in a checkout, the revision.
func version() string {
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := strings.Trim(build.Main.Version, "()")
	for _, s := range build.Settings {
		if s.Key == "vcs.revision" && !strings.Contains(v, s.Value[:min(12, len(s.Value))]) {
			v += " " + s.Value[:min(12, len(s.Value))]
		}
	}
	return v
}
