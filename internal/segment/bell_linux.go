package segment

import (
	"math"

	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// The operations of the futex call, on memory that processes share.
const (
	futexWait = 0
	futexWake = 1
)

// sleep blocks this thread while the bell is armed, until it rings.
func (b Bell) sleep() {
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, hostmem.AddrOf(b.word), futexWait, armed, 0, 0, 0)
}

// wake ends all sleeps.
func (b Bell) wake() {
	_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, hostmem.AddrOf(b.word), futexWake, math.MaxInt32, 0, 0, 0)
}
