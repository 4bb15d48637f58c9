package p2p_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/faulttest"
	"github.com/tutti-go/tutti/comm/internal/gputest"
)

func TestFaults(t *testing.T) {
	gpus := gputest.Open(t)
	if len(gpus) < 2 {
		t.Skip("needs two GPUs")
	}
	comms, err := world(t.Context(), gpus[:min(len(gpus), 3)])
	require.NoError(t, err)
	ranks := make([]faulttest.Rank, len(comms))
	for i, c := range comms {
		ranks[i], err = faulttest.NewRank(c, gpus[i])
		require.NoError(t, err)
	}
	faulttest.Run(t, "p2p", faulttest.Backend{
		Elsewhere: map[string]func(*testing.T){"dead": TestAKilledRank, "exit": TestAnExitedRank, "stopped": TestAStoppedRank},
		Each: func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error {
			return each(len(ranks), func(r int) error { return body(ctx, ranks[r]) })
		}})
	assert.NoError(t, each(len(comms), func(r int) error { return comms[r].Close() }))
	for _, r := range ranks {
		assert.NoError(t, r.Free())
	}
}
