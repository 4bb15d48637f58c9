package base

import (
	"bytes"
	"context"
	"fmt"
	"hash/fnv"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// TermsBytes is the maximum length of terms when they are sent, which happens only between ranks that disagree: some
// 1,000 lines.
const TermsBytes = 32 << 10

// module is the path of this library, whose version must be the same on all ranks.
const module = "github.com/tutti-go/tutti"

// Version returns the version of this library that the program was built with.
var Version = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if m.Path == module {
			return m.Version
		}
	}
	return "unknown"
})

// Agree compares terms between the ranks: their hash, which is one element of each rank, and the terms themselves only
// if the hash differs. An error is the same on every rank, and names the first difference from rank 0. After an error
// the communicator may still write to memory of the buffers, which stays allocated.
func Agree(ctx context.Context, rt runtime.Runtime, c comm.Communicator, o *Order, memory *Buffers,
	terms string) error {
	h := fnv.New64a()
	h.Write([]byte(terms))
	hashes, err := swapBytes(ctx, rt, c, o, memory, h.Sum(nil), dtype.I64)
	if err != nil {
		return err
	}
	differs := func(h []byte) bool {
		return !bytes.Equal(h, hashes[0])
	}
	if !slices.ContainsFunc(hashes, differs) {
		return nil
	}
	text := make([]byte, TermsBytes)
	copy(text, terms)
	texts, err := swapBytes(ctx, rt, c, o, memory, text, dtype.U8)
	if err != nil {
		return err
	}
	return difference(texts)
}

// swapBytes returns every rank's bytes, sent as elements of a type.
func swapBytes(ctx context.Context, rt runtime.Runtime, c comm.Communicator, o *Order, memory *Buffers,
	local []byte, dt dtype.DType) ([][]byte, error) {
	size := len(local)
	ranks := c.WorldSize()
	b := new(Buffer)
	if err := memory.Allocate(rt, b, (ranks+1)*size); err != nil {
		return nil, err
	}
	if err := rt.CopyIn(b.Ptr, local); err != nil {
		return nil, err
	}
	first := b.Ptr + uintptr(size)
	if err := o.Around(ctx, func() error {
		return c.AllGather(b.Ptr, first, size/dt.Size(), dt)
	}); err != nil {
		return nil, err
	}
	if err := o.HostAfterAll(ctx); err != nil {
		return nil, err
	}
	all := make([]byte, ranks*size)
	if err := rt.CopyOut(all, first); err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(all, size)), memory.Release(rt, len(*memory)-1)
}

// difference returns an error with the terms of the first rank that differs from rank 0.
func difference(texts [][]byte) error {
	lines := func(rank int) []string {
		return strings.Split(string(bytes.TrimRight(texts[rank], "\x00")), "\n")
	}
	zero := lines(0)
	for rank := range texts {
		differing := lines(rank)
		for i := range max(len(zero), len(differing)) {
			line := func(text []string) string {
				if i < len(text) {
					return text[i]
				}
				return "nothing"
			}
			if a, b := line(zero), line(differing); a != b {
				return fmt.Errorf("%w: rank 0 has %q, rank %d has %q", comm.ErrMismatch, a, rank, b)
			}
		}
	}
	return fmt.Errorf("%w: the ranks' configurations differ", comm.ErrMismatch)
}
