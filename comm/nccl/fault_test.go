package nccl_test

import (
	"context"
	"os"
	"testing"

	"github.com/tutti-go/tutti/comm/faulttest"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func TestFaults(t *testing.T) {
	b := faultRanks(t, 2)
	t.Run("nccl", func(t *testing.T) {
		own := b
		own.Elsewhere = map[string]func(*testing.T){
			"dead": TestAKilledRank, "exit": TestAnExitedRank, "stopped": TestAStoppedRank, "no library": TestALibraryThatDoesNotServe,
		}
		faulttest.Run(t, "nccl", own)
	})
	t.Run("checked", func(t *testing.T) { faulttest.Run(t, faulttest.Checked, b) })
}

func TestSoak(t *testing.T) {
	if os.Getenv(faulttest.SoakVariable) == "" {
		t.Skipf("runs with %s=1000000", faulttest.SoakVariable)
	}
	faulttest.Soak(t, faultRanks(t, 1))
}

func faultRanks(t *testing.T, least int) faulttest.Backend {
	comms, gpus := ranks(t, least, 3)
	return gputest.Faults(t, comms, gpus)
}

// ranks makes those of this process.
func ranks(t *testing.T, least, most int) ([]*nccl.Comm, []*cuda.Runtime) {
	return gputest.Ranks(t, least, most, connect, func(ctx context.Context, gpus []*cuda.Runtime) ([]*nccl.Comm, error) {
		return nccl.InProcess(ctx, gpus)
	})
}
