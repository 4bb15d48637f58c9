package nccl

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// memory chooses a runtime whose memory base can carry: the host's, unless
// base says that it cannot reach that.
func memory(base comm.Communicator, rt *cuda.Runtime) runtime.Runtime {
	if r, ok := comm.As[comm.Reacher](base); ok && r.CheckDevice(runtime.Device{Kind: runtime.CPU}) != nil {
		return rt
	}
	return cpu.New()
}
