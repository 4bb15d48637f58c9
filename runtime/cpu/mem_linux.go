package cpu

import (
	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// adviseHugePages asks for transparent huge pages: fewer page faults at first
// touch and fewer TLB misses after. Slabs are left out, because the first small
// block of each would take a whole huge page. It is advice, so a kernel without
// huge pages is no error.
func adviseHugePages(addr uintptr, bytes int) {
	if bytes > slabBytes {
		_ = unix.Madvise(hostmem.Slice[byte](addr, bytes), unix.MADV_HUGEPAGE)
	}
}
