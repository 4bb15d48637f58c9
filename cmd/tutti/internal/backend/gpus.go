package backend

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// GPUs describes this machine's equipment for the nccl backend. Its JSON form is a part of `tutti info --json`;
// missing items are "".
type GPUs struct {
	// Driver is the version of the kernel's driver, "" if it is unknown or there is none.
	Driver string `json:"driver"`
	// CUDA is the newest CUDA version that the driver supports.
	CUDA string `json:"cuda"`
	// NCCL is the library's version, and NCCLLibrary its name.
	NCCL        string `json:"nccl"`
	NCCLLibrary string `json:"nccl_library"`
	// Devices are all GPUs visible to this process.
	Devices []cuda.DeviceInfo `json:"gpus"`
	// NoGPU and NoNCCL say why devices and NCCL are missing.
	NoGPU  string `json:"gpu_unavailable"`
	NoNCCL string `json:"nccl_unavailable"`
	// NoPeerMemory says why --p2p does not work on all devices.
	NoPeerMemory string `json:"p2p_unavailable"`

	err error // about the first missing item
}

// LookForGPUs inspects this machine. A missing library is no error.
func LookForGPUs() GPUs {
	g := GPUs{Devices: []cuda.DeviceInfo{}}
	devices, gpuErr := cuda.Devices()
	if gpuErr == nil && len(devices) == 0 {
		gpuErr = errors.New("cuda: the driver shows no GPU (is CUDA_VISIBLE_DEVICES set?)")
	}
	if gpuErr == nil {
		g.Devices = devices
		g.Driver = driverVersion(os.ReadFile)
	}
	if major, minor, err := cuda.DriverVersion(); err == nil {
		g.CUDA = fmt.Sprintf("%d.%d", major, minor)
	}
	var ncclErr error
	g.NCCL, g.NCCLLibrary, ncclErr = nccl.Version()
	g.NoGPU = Reason(gpuErr)
	g.NoNCCL = Reason(ncclErr)
	g.NoPeerMemory = Reason(g.PeerMemory())
	g.err = cmp.Or(gpuErr, ncclErr) // the first item to fix
	return g
}

// Reason is the text of an error, "" for none.
func Reason(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Usable returns nil if the nccl backend works, and otherwise an error that wraps [comm.ErrUnavailable] and says what
// is missing.
func (g GPUs) Usable() error {
	if g.err == nil || errors.Is(g.err, comm.ErrUnavailable) {
		return g.err
	}
	return fmt.Errorf("nccl: %w: %w", comm.ErrUnavailable, g.err)
}

// PeerMemory returns nil if all GPUs of this machine can write into each other's memory (comm/p2p), and otherwise the
// reason.
func (g GPUs) PeerMemory() error {
	switch n := len(g.Devices); {
	case runtime.GOOS != "linux":
		return fmt.Errorf("processes share GPU memory on Linux only, this is %s", runtime.GOOS)
	case n < 2:
		return fmt.Errorf("there %s", map[int]string{0: "are no GPUs", 1: "is one GPU only"}[n])
	case n > p2p.MaxRanks:
		return fmt.Errorf("there are %d GPUs: use up to %d of them", n, p2p.MaxRanks)
	}
	for i, d := range g.Devices {
		for k := range g.Devices {
			if k != i && !d.Peers[k] {
				return fmt.Errorf("GPU %d does not reach the memory of GPU %d", i, k)
			}
		}
	}
	return nil
}

// driverFiles are the files in which Linux reports the driver's version as one of several words.
var driverFiles = []string{"/sys/module/nvidia/version", "/proc/driver/nvidia/version"}

var driverNumber = regexp.MustCompile(`\b\d{3,}\.\d+(\.\d+)?\b`)

// driverVersion returns the version of the driver, "" if it cannot be found.
func driverVersion(read func(name string) ([]byte, error)) string {
	for _, name := range driverFiles {
		if text, err := read(name); err == nil {
			if version := driverNumber.Find(text); version != nil {
				return string(version)
			}
		}
	}
	return ""
}
