package segment

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/hostmem"
)

const capacity = 256

// ringMemory returns the address of memory for a ring, as bytes as well.
func ringMemory(t *testing.T) (uintptr, []byte) {
	const line = 64 // rings begin with one
	room := make([]byte, RingBytes(capacity)+line)
	first := -int(hostmem.Addr(room)) & (line - 1)
	memory := room[first:][:RingBytes(capacity)]
	address := hostmem.Addr(memory)
	t.Cleanup(func() { runtime.KeepAlive(room) })
	return address, memory
}

// The bytes of a ring arrive in their order, whatever is written and read at a time, and all room comes back.
func TestRing(t *testing.T) {
	const seed = 11
	random := rand.New(rand.NewPCG(seed, 0))
	address, _ := ringMemory(t)
	writer := NewRing(address, capacity)
	reader := NewRing(address, capacity)
	var sent, got []byte
	for len(sent) < 100*capacity {
		room, err := writer.Room()
		require.NoError(t, err)
		require.Equal(t, capacity-(len(sent)-len(got)), room, "seed %d", seed)
		b := make([]byte, random.IntN(room+1))
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		writer.Write(b)
		available, err := reader.Available()
		require.NoError(t, err)
		require.Equal(t, len(sent)-len(got), available, "nothing is seen before it is published")
		writer.Publish()
		sent = append(sent, b...)

		available, err = reader.Available()
		require.NoError(t, err)
		require.Equal(t, len(sent)-len(got), available)
		b = make([]byte, random.IntN(available+1))
		reader.Read(b)
		got = append(got, b...)
		writer.Starve()
		require.True(t, reader.Release())
		require.False(t, reader.Release(), "the writer waits once")
	}
	assert.True(t, bytes.Equal(sent[:len(got)], got), "seed %d", seed)
}

// Counts of a ring that another process writes are checked.
func TestRingChecksCounts(t *testing.T) {
	for _, count := range []uint64{capacity + 1, 1 << 32, 1<<64 - 1} {
		address, memory := ringMemory(t)
		binary.LittleEndian.PutUint64(memory, count)
		_, err := NewRing(address, capacity).Available()
		assert.Error(t, err, "%d bytes published", count)
	}
	for _, count := range []uint64{1, 1 << 32} {
		address, memory := ringMemory(t)
		binary.LittleEndian.PutUint64(memory[lineBytes:], count)
		_, err := NewRing(address, capacity).Room()
		assert.Error(t, err, "%d bytes read of 0", count)
	}
}
