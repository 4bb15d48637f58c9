package backend

import (
	"slices"

	"github.com/tutti-go/tutti/comm"
)

// Clone returns a copy of a call that owns its lists.
func Clone(c comm.Call) comm.Call {
	for _, list := range []*[]int{&c.SendCounts, &c.SendDispls, &c.RecvCounts, &c.RecvDispls} {
		*list = slices.Clone(*list)
	}
	return c
}

// messageMemory returns the memory of a Send or a Recv on this rank: its first address and the address after its end.
func messageMemory(c *comm.Call) (start, end uintptr) {
	start = c.Send
	if c.Op == comm.OpRecv {
		start = c.Recv
	}
	return start, start + uintptr(c.Bytes())
}
