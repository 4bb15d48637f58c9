package runtimetest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/tutti-go/tutti/runtime"
)

// churn allocates, writes, reads back and frees blocks of random sizes, some
// of them held for a while; what it writes tells worker and round apart.
func churn(rt runtime.Runtime, worker uint64, rounds int) (err error) {
	type block struct {
		ptr  uintptr
		data []byte
	}
	rng := rand.New(rand.NewPCG(Seed, worker))
	var held []block
	release := func(i int) error {
		b := held[i]
		held[i] = held[len(held)-1]
		held = held[:len(held)-1]
		got := make([]byte, len(b.data))
		if err := rt.CopyOut(got, b.ptr); err != nil {
			return err
		}
		if !bytes.Equal(got, b.data) {
			return fmt.Errorf("worker %d: %d bytes at %#x changed", worker, len(b.data), b.ptr)
		}
		return rt.Deallocate(b.ptr)
	}
	defer func() {
		for len(held) > 0 {
			err = errors.Join(err, release(0))
		}
	}()
	for round := range rounds {
		size := 1 + rng.IntN(1<<rng.IntN(20))
		b := block{data: bytes.Repeat([]byte{byte(worker), byte(round)}, size)}
		if b.ptr, err = rt.Allocate(len(b.data)); err != nil {
			return err
		}
		held = append(held, b)
		if err := rt.CopyIn(b.ptr, b.data); err != nil {
			return err
		}
		for len(held) > rng.IntN(20) {
			if err := release(rng.IntN(len(held))); err != nil {
				return err
			}
		}
	}
	return nil
}
