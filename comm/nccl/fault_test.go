package nccl_test

import (
	"context"
	"os"
	"testing"

	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func TestFaults(t *testing.T) {
	comms, gpus := ranks(t, 2, 3)
	b := gputest.Faults(t, comms, gpus)
	t.Run("nccl", func(t *testing.T) {
		backend := b
		backend.Elsewhere = map[string]func(*testing.T){
			"dead":       TestAKilledRank,
			"exit":       TestAnExitedRank,
			"stopped":    TestAStoppedRank,
			"no library": TestALibraryThatDoesNotServe,
		}
		faulttest.Run(t, "nccl", backend)
	})
	t.Run("checked", func(t *testing.T) { faulttest.Run(t, faulttest.Checked, b) })
}

func TestSoak(t *testing.T) {
	if os.Getenv(faulttest.SoakVariable) == "" {
		t.Skipf("runs with %s=1000000", faulttest.SoakVariable)
	}
	comms, gpus := ranks(t, 1, 3)
	b := gputest.Faults(t, comms, gpus)
	if comms[0].WorldSize() == 1 {
		// Where there is nothing to launch, NCCL forgets 160 bytes and what malloc adds:
		// https://github.com/NVIDIA/nccl/issues/1944, since 2.27.3.
		b.Keeps = 180
	}
	faulttest.Soak(t, b)
}

// ranks makes those of this process.
func ranks(t *testing.T, least, most int) ([]*nccl.Comm, []*cuda.Runtime) {
	inProcess := func(ctx context.Context, gpus []*cuda.Runtime) ([]*nccl.Comm, error) {
		return nccl.InProcess(ctx, gpus)
	}
	return gputest.Ranks(t, least, most, connect, inProcess)
}
