package compare

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/tutti-go/tutti/internal/machine"
)

// Provenance is the time and the machine of a measurement: the first line of --json.
type Provenance struct {
	Date       time.Time `json:"date"`
	Runs       int       `json:"runs"`
	Processors int       `json:"processors"`       // processors that this process may keep busy
	Online     int       `json:"online"`           // processors in its affinity mask
	Quota      float64   `json:"quota,omitempty"`  // processors in its control group's quota, 0 for no limit below Online
	Load       string    `json:"load,omitempty"`   // at the beginning, averaged over 1, 5 and 15 minutes
	Kernel     string    `json:"kernel,omitempty"` // release of the system
	// Torch is PyTorch's description of itself, "" without PyTorch.
	Torch string `json:"torch,omitempty"`
	// Info is the output of `tutti info --json`: processor, memory, versions of MPI and NCCL.
	Info json.RawMessage `json:"info"`
}

// Describe describes this machine with a tutti command.
func Describe(ctx context.Context, tutti string, runs int) (Provenance, error) {
	p := Provenance{
		Date:       time.Now().UTC().Truncate(time.Second),
		Runs:       runs,
		Processors: machine.Processors(),
		Online:     runtime.NumCPU(),
		Quota:      machine.Quota(),
		Load:       firstFields("/proc/loadavg", 3),
		Kernel:     firstFields("/proc/sys/kernel/osrelease", 1),
	}
	info, err := exec.CommandContext(ctx, tutti, "info", "--json").Output()
	if err != nil {
		return p, fmt.Errorf("tutti info: %w", err)
	}
	p.Info = info
	return p, nil
}

// firstFields returns the first words of a file, "" if it cannot be read.
func firstFields(path string, n int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	fields := strings.Fields(string(text))
	return strings.Join(fields[:min(n, len(fields))], " ")
}

// String formats the provenance as lines.
func (p Provenance) String() string {
	var info struct {
		CPU      string `json:"cpu"`
		Go       string `json:"go"`
		Version  string `json:"version"`
		Backends []struct{ Name, Detail string }
	}
	_ = json.Unmarshal(p.Info, &info) // missing fields stay empty
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d turns, %s, %d processors", p.Date.Format(time.DateTime+" MST"), p.Runs, info.CPU, p.Online)
	if p.Processors != p.Online {
		fmt.Fprintf(&b, " of which %d can be busy", p.Processors)
	}
	if p.Load != "" {
		fmt.Fprintf(&b, ", load %s", p.Load)
	}
	if p.Kernel != "" {
		fmt.Fprintf(&b, ", kernel %s", p.Kernel)
	}
	fmt.Fprintf(&b, "\ntutti %s, %s", info.Version, info.Go)
	for _, backend := range info.Backends {
		if library, _, _ := strings.Cut(backend.Detail, ","); backend.Name == "mpi" {
			fmt.Fprintf(&b, ", %s", library)
		}
	}
	if p.Torch != "" {
		fmt.Fprintf(&b, ", %s", p.Torch)
	}
	return b.String()
}
