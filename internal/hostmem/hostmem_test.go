package hostmem_test

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/internal/hostmem"
)

func TestSliceSeesTheMemoryOfAddr(t *testing.T) {
	words := []uint32{1, 2, 3, 4}
	p := hostmem.Addr(words)
	view := hostmem.Slice[uint32](p+4, 2)
	view[0] = 20
	assert.Equal(t, []uint32{1, 20, 3, 4}, words)
	assert.Equal(t, []uint32{20, 3}, view)
	assert.Len(t, hostmem.Bytes(words), 16)
	runtime.KeepAlive(words)
}

func TestEmpty(t *testing.T) {
	assert.Nil(t, hostmem.Slice[byte](0, 0))
	assert.Nil(t, hostmem.Bytes([]uint64{}))
	assert.Zero(t, hostmem.Addr([]byte(nil)))
	assert.Empty(t, hostmem.CString(0))
}

func TestCString(t *testing.T) {
	text := []byte("NCCL\x00 and more")
	assert.Equal(t, "NCCL", hostmem.CString(hostmem.Addr(text)))
	runtime.KeepAlive(text)
}

// grow uses much stack, which makes the runtime move it.
func grow(depth int) int {
	var pad [1 << 10]byte
	if depth == 0 {
		return len(pad)
	}
	pad[depth%len(pad)] = 1
	return grow(depth-1) + int(pad[0])
}

// A local whose address was taken must not live on a stack that moves: the
// address would point to the old stack then.
func TestAddressesSurviveAStackThatMoves(t *testing.T) {
	done := make(chan struct{})
	go func() { // a new goroutine has a small stack
		defer close(done)
		var local uint64
		p := hostmem.AddrOf(&local)
		array := make([]uint64, 4)
		q := hostmem.Addr(array)
		grow(1000)
		hostmem.Slice[uint64](p, 1)[0] = 7
		hostmem.Slice[uint64](q, 4)[3] = 8
		assert.EqualValues(t, 7, local)
		assert.EqualValues(t, 8, array[3])
	}()
	<-done
}
