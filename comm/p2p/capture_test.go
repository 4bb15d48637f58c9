package p2p_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// ordered is a streamed communicator that orders its stream with others.
type ordered struct{ streamed }

func (o ordered) CommAfter(stream uintptr) error {
	return o.rt.Stream().WaitFor(o.rt.WrapStream(stream))
}

func (o ordered) AfterComm(stream uintptr) error {
	return o.rt.WrapStream(stream).WaitFor(o.rt.Stream())
}

// Kernels that a framework captures with separate driver calls number their messages at each launch, on all ranks. The
// ranks of a process capture at the same time, which the global mode forbids.
func TestForeignCaptures(t *testing.T) {
	const ranks = 2
	n, err := cuda.Count()
	if err != nil || os.Getenv(gputest.StandInVariable) != "" {
		t.Skipf("needs NVIDIA GPUs: %v", err)
	}
	gpus := make([]*cuda.Runtime, ranks)
	for r := range gpus {
		gpus[r], err = cuda.Open(r % n)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, gpus[r].Close()) })
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, separate := range []bool{false, true} {
		for _, mode := range []gputest.CaptureMode{gputest.CaptureThreadLocal, gputest.CaptureRelaxed} {
			t.Run(fmt.Sprintf("separate stream %t, %v", separate, mode), func(t *testing.T) {
				assert.NoError(t, local.Run(ctx, ranks, func(ctx context.Context, base comm.Communicator) error {
					rt := gpus[base.Rank()]
					c, err := p2p.New(ctx, ordered{streamed{Communicator: base, rt: rt}}, rt)
					if err != nil {
						return err
					}
					if err := gputest.ForeignCapture(ctx, c, rt, mode, separate); err != nil {
						return err
					}
					return c.Close()
				}))
			})
		}
	}
}
