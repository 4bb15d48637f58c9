package elastic

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	gort "runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/exponents"
	"github.com/tutti-go/tutti/runtime"
)

// A sender in whose memory the host computes sends floats with their exponents coded: bf16 takes a third less, F32 a
// sixth. A device sends tensors as they are: its links are faster than the host codes.
//
// A tensor is sent in pieces, of which one is coded while the one before travels. A piece is coded in parts, on all
// processors: first come the lengths of their codes (32 bits each).
const (
	partElements  = exponents.Chunk
	pieceElements = 32 * partElements
	lengthBytes   = 4
)

// How tensors are sent, as the sender announces.
const (
	sendsPlain = iota
	sendsCoded
)

// sending returns how a member sends tensors.
func (m *Member) sending() int64 {
	if m.cfg.Runtime.Device().Kind == runtime.CPU {
		return sendsCoded
	}
	return sendsPlain
}

// isCoded reports whether senders that code exponents code those of a tensor: a short one is not worth a message more.
func isCoded(t *runtime.Tensor) bool {
	d := t.DType()
	return d.IsFloat() && exponents.Supports(d.Size()) && t.Len() >= partElements
}

// piece is a part of a tensor, in memory of the host.
type piece struct {
	data    []byte  // of the tensor, which a code replaces
	address uintptr // of data, as runtimes name memory
}

// cut returns the pieces of a tensor, without memory yet.
func cut(t *runtime.Tensor) ([]piece, error) {
	address, err := t.Ptr()
	if err != nil {
		return nil, err
	}
	size := t.DType().Size()
	buffers := [2][]byte{} // of a piece that is coded, and of one that travels
	var all []piece
	for from := 0; from < t.Len(); from += pieceElements {
		bytes := min(t.Len()-from, pieceElements) * size
		buffer := &buffers[len(all)%2]
		if *buffer == nil {
			*buffer = make([]byte, bytes)
		}
		all = append(all, piece{
			data:    (*buffer)[:bytes],
			address: address + uintptr(from*size),
		})
	}
	return all, nil
}

// sendCoded sends the pieces of a tensor: the length of the code of each, and that.
func (m *Member) sendCoded(
	ctx context.Context, e *Epoch, t *runtime.Tensor, post func(t *runtime.Tensor) error,
) error {
	pieces, err := cut(t)
	if err != nil {
		return err
	}
	next, err := startEncoding(t, pieces[0])
	for i := 0; i < len(pieces) && err == nil; i++ {
		code := next()
		if i+1 < len(pieces) {
			next, err = startEncoding(t, pieces[i+1])
			if err != nil {
				return err
			}
		}
		err = communicate(ctx, m, e, []int64{int64(len(code))}, post)
		if err == nil {
			err = communicate(ctx, m, e, code, post)
		}
	}
	return err
}

// startEncoding begins to code a piece, and returns what waits for its code.
func startEncoding(t *runtime.Tensor, p piece) (wait func() []byte, err error) {
	if err := t.Runtime().CopyOut(p.data, p.address); err != nil {
		return nil, err
	}
	done := make(chan []byte, 1)
	go func() { done <- encodeParts(p.data, t.DType().Size()) }()
	return func() []byte { return <-done }, nil
}

// receiveCoded receives what sendCoded sends.
func (m *Member) receiveCoded(
	ctx context.Context, e *Epoch, t *runtime.Tensor, fetch func(t *runtime.Tensor) error,
) error {
	pieces, err := cut(t)
	if err != nil {
		return err
	}
	finish := func() error { return nil } // of the piece before
	for _, p := range pieces {
		length := []int64{0}
		if err := communicate(ctx, m, e, length, fetch); err != nil {
			return errors.Join(err, finish())
		}
		if length[0] <= 0 || length[0] > int64(longestCode(p.data, t.DType().Size())) {
			return errors.Join(fmt.Errorf("elastic: %w: %d bytes for %d of a tensor",
				comm.ErrMismatch, length[0], len(p.data)), finish())
		}
		code := make([]byte, length[0])
		err := communicate(ctx, m, e, code, fetch)
		if err := errors.Join(err, finish()); err != nil {
			return err
		}
		finish = startDecoding(t, p, code)
	}
	return finish()
}

// startDecoding begins to decode a piece, and returns what waits for that, and stores it.
func startDecoding(t *runtime.Tensor, p piece, code []byte) (finish func() error) {
	done := make(chan error, 1)
	go func() {
		done <- decodeParts(p.data, code, t.DType().Size())
	}()
	return func() error {
		if err := <-done; err != nil {
			return fmt.Errorf("elastic: %w: a tensor: %w", comm.ErrMismatch, err)
		}
		return t.Runtime().CopyIn(p.address, p.data)
	}
}

// countParts returns how many parts a piece has.
func countParts(data []byte, size int) int {
	return (len(data)/size + partElements - 1) / partElements
}

// longestCode returns how long the code of a piece is, at most.
func longestCode(data []byte, size int) int {
	return lengthBytes*countParts(data, size) + exponents.Longest(len(data), size)
}

// encodeParts returns the code of a piece.
func encodeParts(data []byte, size int) []byte {
	parts := slices.Collect(slices.Chunk(data, partElements*size))
	codes := make([][]byte, len(parts))
	parallel(len(parts), func(i int) {
		codes[i] = exponents.Append(nil, parts[i], size)
	})
	code := make([]byte, 0, longestCode(data, size))
	for _, c := range codes {
		code = binary.LittleEndian.AppendUint32(code, uint32(len(c)))
	}
	for _, c := range codes {
		code = append(code, c...)
	}
	return code
}

// decodeParts sets data to the piece that encodeParts has coded.
func decodeParts(data, code []byte, size int) error {
	parts := slices.Collect(slices.Chunk(data, partElements*size))
	if len(code) < lengthBytes*len(parts) {
		return exponents.ErrDamaged
	}
	lengths := code
	code = code[lengthBytes*len(parts):]
	codes := make([][]byte, len(parts))
	for i := range codes {
		length := binary.LittleEndian.Uint32(lengths[lengthBytes*i:])
		if uint64(length) > uint64(len(code)) {
			return exponents.ErrDamaged
		}
		codes[i] = code[:length]
		code = code[length:]
	}
	if len(code) > 0 {
		return exponents.ErrDamaged
	}
	errs := make([]error, len(parts))
	parallel(len(parts), func(i int) {
		errs[i] = exponents.Decode(parts[i], codes[i], size)
	})
	return errors.Join(errs...)
}

// parallel does n pieces of work, on all processors.
func parallel(n int, work func(i int)) {
	var next atomic.Int64
	var all sync.WaitGroup
	for range min(n, gort.GOMAXPROCS(0)) {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				work(i)
			}
		})
	}
	all.Wait()
}
