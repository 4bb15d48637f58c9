package p2p_test

import (
	"context"
	"os"
	"testing"

	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func TestFaults(t *testing.T) {
	b := faultRanks(t)
	b.Elsewhere = map[string]func(*testing.T){
		"dead":    TestAKilledRank,
		"exit":    TestAnExitedRank,
		"stopped": TestAStoppedRank,
	}
	faulttest.Run(t, "p2p", b)
}

func TestSoak(t *testing.T) {
	if os.Getenv(faulttest.SoakVariable) == "" {
		t.Skipf("runs with %s=1000000", faulttest.SoakVariable)
	}
	faulttest.Soak(t, faultRanks(t))
}

func faultRanks(t *testing.T) faulttest.Backend {
	comms, gpus := gputest.Ranks(t, 2, 3,
		func(ctx context.Context, gpu *cuda.Runtime) (*p2p.Comm, error) { return connect(ctx, gpu, p2p.New) },
		func(ctx context.Context, gpus []*cuda.Runtime) ([]*p2p.Comm, error) { return world(ctx, gpus, p2p.New) })
	return gputest.Faults(t, comms, gpus)
}
