package checkpoint

import (
	"bufio"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

// decoder applies a frame of the shared format to a tensor, from its beginning to its end.
type decoder interface {
	// Decode changes the next bytes.
	Decode(data []byte) error
	// Finish returns an error if the frame has more data.
	Finish() error
	Close()
}

// decoder returns a decoder of a frame, for a tensor with this many bytes.
func (f Format) decoder(frame io.ReaderAt, length, bytes int64) (decoder, error) {
	open := func() (*zstd.Decoder, error) {
		return decompress(io.NewSectionReader(frame, 0, length), f.longest(bytes))
	}
	from, err := open()
	if err != nil {
		return nil, err
	}
	if f.Encoding == encodingXor {
		return &xorDecoder{from: from}, nil
	}
	values, err := open() // a second reader: values follow all positions
	if err != nil {
		from.Close()
		return nil, err
	}
	o := &overwriteDecoder{
		frames:    [2]*zstd.Decoder{from, values},
		positions: bufio.NewReaderSize(from, readBytes),
		values:    bufio.NewReaderSize(values, readBytes),
		bytes:     bytes,
	}
	if err := o.begin(); err != nil {
		o.Close()
		return nil, err
	}
	return o, nil
}

// readBytes is the size of reads of positions and values.
const readBytes = 64 << 10

// xorDecoder applies a frame of XORs.
type xorDecoder struct {
	from *zstd.Decoder // the decompressed XOR
	bits []byte        // of a chunk, reused
}

func (x *xorDecoder) Decode(data []byte) error {
	if len(x.bits) < len(data) {
		x.bits = make([]byte, len(data))
	}
	if _, err := io.ReadFull(x.from, x.bits[:len(data)]); err != nil {
		return damaged(err)
	}
	subtle.XORBytes(data, data, x.bits)
	return nil
}

func (x *xorDecoder) Finish() error { return checkEnd(x.from) }

func (x *xorDecoder) Close() { x.from.Close() }

// overwriteDecoder applies a frame of bytes and their positions.
type overwriteDecoder struct {
	frames    [2]*zstd.Decoder // of positions and of values
	positions *bufio.Reader    // of changes, decompressed
	values    *bufio.Reader    // of changes, decompressed
	bytes     int64            // of the tensor
	decoded   int64            // bytes of the tensor so far
	left      int64            // changes not yet applied
	next      int64            // position of the next change, if there is one
}

// begin reads the number of changed bytes, and the first position.
func (o *overwriteDecoder) begin() error {
	count, err := o.number()
	if err != nil {
		return err
	}
	if count > o.bytes {
		return fmt.Errorf("%w: %d bytes change of %d", errFormat, count, o.bytes)
	}
	o.left = count
	o.next = -1
	if _, err := io.CopyN(io.Discard, o.values, countBytes*(count+1)); err != nil {
		return damaged(err)
	}
	return o.advance()
}

// number reads a count or a position.
func (o *overwriteDecoder) number() (int64, error) {
	var b [countBytes]byte
	if _, err := io.ReadFull(o.positions, b[:]); err != nil {
		return 0, damaged(err)
	}
	return int64(binary.LittleEndian.Uint32(b[:])), nil
}

// advance reads the next position, if there is one.
func (o *overwriteDecoder) advance() error {
	if o.left == 0 {
		return nil
	}
	position, err := o.number()
	if err != nil {
		return err
	}
	if position <= o.next {
		return fmt.Errorf("%w: byte %d changes after byte %d", errFormat, position, o.next)
	}
	if position >= o.bytes {
		return fmt.Errorf("%w: byte %d of a tensor of %d", errFormat, position, o.bytes)
	}
	o.next = position
	return nil
}

func (o *overwriteDecoder) Decode(data []byte) error {
	end := o.decoded + int64(len(data))
	for o.left > 0 && o.next < end {
		value, err := o.values.ReadByte()
		if err != nil {
			return damaged(err)
		}
		data[o.next-o.decoded] = value
		o.left--
		if err := o.advance(); err != nil {
			return err
		}
	}
	o.decoded = end
	return nil
}

func (o *overwriteDecoder) Finish() error { return checkEnd(o.values) }

func (o *overwriteDecoder) Close() {
	for _, frame := range o.frames {
		frame.Close()
	}
}

// checkEnd returns an error if a frame has more data.
func checkEnd(r io.Reader) error {
	var b [1]byte
	n, err := io.ReadFull(r, b[:])
	if n > 0 {
		return fmt.Errorf("%w: a frame is longer than its tensor", errFormat)
	}
	if !errors.Is(err, io.EOF) {
		return damaged(err)
	}
	return nil
}

// damaged returns the error of a frame that is too short, or nil.
func damaged(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%w: %w", errFormat, err)
}

// longest returns the maximum length of a tensor's frame.
func (f Format) longest(size int64) int64 {
	if f.Encoding == encodingXor {
		return size
	}
	return countBytes + size*(countBytes+1)
}

// usualWindow is the largest window of encoders that do not know the length.
const usualWindow = 8 << 20

// decompress returns the content of a frame, whose window may be at most limit bytes or usualWindow.
func decompress(frame io.Reader, limit int64) (*zstd.Decoder, error) {
	return zstd.NewReader(frame,
		zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(uint64(max(limit, usualWindow))),
	)
}
