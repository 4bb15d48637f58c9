// In the build with mutants, this is the test of examples/wire.
package wire

import (
	"context"
	"encoding/binary"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/dtype"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// chosen is the mutant that runs, 0 for none.
var chosen, _ = strconv.Atoi(os.Getenv("TUTTI_WIRE_MUTANT"))

// deadline is the deadline of a case. Some mutants wait for what never comes.
func deadline() time.Duration {
	if os.Getenv("TUTTI_WIRE_ENDLESS") != "" {
		return 3 * time.Second
	}
	return time.Minute
}

// calls is how many calls some cases make in a row: more than the first of the mutants that count keeps right.
func calls() int {
	if os.Getenv("TUTTI_EXTENDED") != "" {
		return 0 // all
	}
	return 1536
}

func TestConformance(t *testing.T) {
	rt := cpu.New()
	defer func() {
		if err := rt.Close(); err != nil {
			t.Error(err)
		}
	}()
	commtest.Run(t, commtest.Backend{
		Name:  "wire",
		Sizes: []int{1, 2, 3},
		Calls: calls(),
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return comm.Run(ctx, world(size, rt, net.Pipe), func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
			})
		},
	}, commtest.Timeout(deadline()))
}

var (
	mu     sync.Mutex
	counts = map[any]int{}    // guarded by mu
	copies = map[any][]byte{} // guarded by mu
)

// count returns how many times it was called with a key, this time included.
func count(key any) int {
	mu.Lock()
	defer mu.Unlock()
	counts[key]++
	return counts[key]
}

// cached returns the bytes that it was given first with a key.
func cached(key any, data []byte) []byte {
	mu.Lock()
	defer mu.Unlock()
	if first, ok := copies[key]; ok {
		return first
	}
	copies[key] = data
	return data
}

// swap exchanges what two ranks have sent, if it is as long.
func swap(data [][]byte, a, b int) {
	if len(data) > max(a, b) && len(data[a]) == len(data[b]) {
		data[a], data[b] = data[b], data[a]
	}
}

// flip changes a bit.
func flip(data []byte) {
	if len(data) > 0 {
		data[0] ^= 1
	}
}

// words changes data word by word.
func words(data []byte, change func(uint32) uint32) {
	for ; len(data) >= 4; data = data[4:] {
		binary.LittleEndian.PutUint32(data, change(binary.LittleEndian.Uint32(data)))
	}
}

// words64 changes data by words of 64 bits.
func words64(data []byte, change func(uint64) uint64) {
	for ; len(data) >= 8; data = data[8:] {
		binary.LittleEndian.PutUint64(data, change(binary.LittleEndian.Uint64(data)))
	}
}

// plainZero makes -0 of 32 bits 0.
func plainZero(x uint32) uint32 {
	if x == 1<<31 {
		return 0
	}
	return x
}

// quiet makes signalling NaNs of 32 bits quiet.
func quiet(x uint32) uint32 {
	if x&(1<<31-1) > 0xff<<23 {
		x |= 1 << 22
	}
	return x
}

// rounded is an integer that went through a float64.
func rounded(x uint64) uint64 { return uint64(int64(float64(int64(x)))) }

// later runs f after a while.
func later(f func()) { time.AfterFunc(time.Millisecond, f) }

// as is the type of a name, if dt has another name.
func as(dt dtype.DType, from, to string) dtype.DType {
	if dt.String() != from {
		return dt
	}
	other, err := dtype.Parse(to)
	if err != nil {
		panic(err)
	}
	return other
}

// locked locks a mutex of a key, and returns what unlocks it.
func locked(key any) (unlock func()) {
	mu.Lock()
	lock, ok := locks[key]
	if !ok {
		lock = &sync.Mutex{}
		locks[key] = lock
	}
	mu.Unlock()
	lock.Lock()
	return lock.Unlock
}

var locks = map[any]*sync.Mutex{} // guarded by mu

// parent is the communicator that one was split from.
func parent(id string) string {
	return id[:max(0, strings.LastIndex(id, "/"))]
}
