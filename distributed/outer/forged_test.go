package outer

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/state"
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
		saved, err := l.State(ctx)
		require.NoError(t, err)
		bytes := base.WordSize * 10
		for name, change := range map[string]func(s *savedLoop){
			"nothing":                func(s *savedLoop) {},
			"no fragments":           func(s *savedLoop) { s.fragments = nil },
			"a fragment more":        func(s *savedLoop) { s.fragments = append(s.fragments, savedFragment{}) },
			"a longer tensor":        func(s *savedLoop) { s.common = make([]byte, bytes+4) },
			"no tensor":              func(s *savedLoop) { s.common = nil },
			"a longer velocity":      func(s *savedLoop) { s.velocity = make([]byte, bytes+4) },
			"deltas from nowhere":    func(s *savedLoop) { s.fragments[0].deltas = make([]byte, bytes) },
			"no deltas":              func(s *savedLoop) { s.fragments[0].phase = landed },
			"a phase of none":        func(s *savedLoop) { s.fragments[0].phase = 200 },
			"an exchange of another": func(s *savedLoop) { s.fragments[0].phase = inFlight },
			"a negative step":        func(s *savedLoop) { s.position.Now.Step = -1 },
			"a negative window":      func(s *savedLoop) { s.position.Length = math.MinInt },
			"a window without steps": func(s *savedLoop) { s.position.Length = 0 },
			"an endless window":      func(s *savedLoop) { s.position.Length = math.MaxInt },
			"a window in the future": func(s *savedLoop) { s.position.First = 1 },
			"a window of the past":   func(s *savedLoop) { s.position.Now.Step = 2 },
			"the last steps":         func(s *savedLoop) { s.position.First, s.position.Now.Step = math.MaxInt, math.MaxInt },
			"a negative sum":         func(s *savedLoop) { s.position.Now.Made = -1 },
			"no sum":                 func(s *savedLoop) { s.fragments[0].sent.Made = math.NaN() },
			"an endless sum":         func(s *savedLoop) { s.fragments[0].sent.Made = math.Inf(1) },
			"no reduction":           func(s *savedLoop) { s.fragments[0].reduction = nil },
		} {
			s, err := l.parse(saved)
			require.NoError(t, err)
			change(&s)
			err = l.Restore(ctx, forge(s))
			if name == "nothing" {
				require.NoError(t, err)
				continue
			}
			assert.ErrorIs(t, err, comm.ErrArgument, name)
		}
		require.NoError(t, l.Restore(ctx, saved))
		return errors.Join(l.Close(), x.Free())
	}))
}

// forge makes a state, with a checksum that is right.
func forge(s savedLoop) []byte {
	e := state.NewEncoder(kind, 0)
	e.Uint64(s.fingerprint)
	e.Bool(s.shared)
	encodePosition(e, s.position)
	e.Int(len(s.fragments))
	for _, f := range s.fragments {
		e.Uint8(uint8(f.phase))
		encodeMoment(e, f.sent)
		e.Bytes(f.reduction)
		e.Bytes(f.deltas)
	}
	e.Bytes(s.common)
	e.Bytes(s.velocity)
	return e.Seal()
}

// FuzzRestore restores states of which some bytes are others, with a checksum that is right: an error that says so, or
// a loop that goes on.
func FuzzRestore(f *testing.F) {
	for i := range 40 {
		f.Add(uint16(7*i), []byte{byte(i), 1})
	}
	f.Fuzz(func(t *testing.T, place uint16, change []byte) {
		require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
			rt := cpu.New()
			x, err := runtime.New(rt, dtype.F32, 10)
			require.NoError(t, err)
			require.NoError(t, x.Fill(1))
			l, err := New(ctx, rt, c, []*runtime.Tensor{x}, Config{Every: 2, Momentum: 0.9})
			require.NoError(t, err)
			saved, err := l.State(ctx)
			require.NoError(t, err)
			fields := saved[:len(saved)-4]
			copy(fields[int(place)%len(fields):], change)
			table := crc32.MakeTable(crc32.Castagnoli)
			err = l.Restore(ctx, binary.LittleEndian.AppendUint32(fields, crc32.Checksum(fields, table)))
			if err != nil {
				require.True(t, errors.Is(err, comm.ErrArgument) || errors.Is(err, comm.ErrMismatch), "%v", err)
			}
			_ = l.Step(ctx) // in a place where no loop was before, it may be an error
			return errors.Join(l.Close(), x.Free(), rt.Close())
		}))
	})
}
