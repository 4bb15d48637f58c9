package outer

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A state whose checksum is right, and that no loop has written, is refused before anything has changed.
func TestForgedState(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		x, err := runtime.New(rt, dtype.F32, 10)
		require.NoError(t, err)
		require.NoError(t, x.Fill(1))
		l, err := New(ctx, rt, c, []*runtime.Tensor{x}, Config{Every: 2, Momentum: 0.9})
		require.NoError(t, err)
		state, err := l.State(ctx)
		require.NoError(t, err)
		for name, change := range map[string]func(s *saved){
			"no fragments":           func(s *saved) { s.Fragments = nil },
			"a fragment more":        func(s *saved) { s.Fragments = append(s.Fragments, savedFragment{}) },
			"a longer tensor":        func(s *saved) { s.Common = append(s.Common, 0, 0, 0, 0) },
			"no tensor":              func(s *saved) { s.Common = nil },
			"a longer velocity":      func(s *saved) { s.Velocity = append(s.Velocity, 0, 0, 0, 0) },
			"deltas from nowhere":    func(s *saved) { s.Fragments[0].Deltas = make([]byte, 4000) },
			"no deltas":              func(s *saved) { s.Fragments[0].Phase = landed },
			"a phase of none":        func(s *saved) { s.Fragments[0].Phase = 200 },
			"an exchange of another": func(s *saved) { s.Fragments[0].Phase = inFlight },
			"a negative step":        func(s *saved) { s.At.Now.Step = -1 },
			"a negative window":      func(s *saved) { s.At.Length = math.MinInt },
			"a negative sum":         func(s *saved) { s.At.Now.Made = -1 },
			"no sum":                 func(s *saved) { s.Fragments[0].Sent.Made = math.NaN() },
		} {
			body, err := base.Unseal(state, stateMagic, "an outer loop")
			require.NoError(t, err)
			var s saved
			require.NoError(t, gob.NewDecoder(bytes.NewReader(body)).Decode(&s))
			change(&s)
			forged := bytes.NewBufferString(stateMagic)
			require.NoError(t, gob.NewEncoder(forged).Encode(s))
			assert.ErrorIs(t, l.Restore(ctx, base.Seal(forged.Bytes())), comm.ErrArgument, name)
		}
		require.NoError(t, l.Restore(ctx, state))
		return errors.Join(l.Close(), x.Free())
	}))
}
