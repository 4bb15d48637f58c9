package checkpoint

import (
	"bytes"
	"cmp"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// encoder receives the changes of a tensor in the shared format, from its beginning to its end.
type encoder interface {
	// Encode receives the next bytes, old and new. It overwrites old.
	Encode(old, now []byte) error
	// Finish completes the frame and returns it; nil if nothing has changed.
	Finish() (*spool, error)
	// Close removes temporary data that Finish has not returned.
	Close() error
}

// encoder returns an encoder of a tensor with this many bytes. Its temporary files are in dir.
func (f Format) encoder(dir *os.Root, bytes int64) encoder {
	if f.Encoding == encodingXor {
		return &xorEncoder{
			bytes: bytes,
			frame: &spool{dir: dir},
		}
	}
	return &overwriteEncoder{
		dir:       dir,
		positions: &spool{dir: dir},
		values:    &spool{dir: dir},
	}
}

// xorEncoder writes a frame of the XOR of old and new bytes.
type xorEncoder struct {
	bytes     int64       // length of the tensor
	frame     *spool      // nil once it is returned
	to        *compressor // nil: nothing has changed yet
	unchanged int64       // bytes before the first change
}

func (x *xorEncoder) Encode(old, now []byte) error {
	if x.to == nil {
		if bytes.Equal(old, now) {
			x.unchanged += int64(len(now))
			return nil
		}
		x.to = newCompressor(x.frame, x.bytes)
		if _, err := io.CopyN(x.to, zeros{}, x.unchanged); err != nil {
			return err
		}
	}
	subtle.XORBytes(old, old, now)
	_, err := x.to.Write(old)
	return err
}

func (x *xorEncoder) Finish() (*spool, error) {
	if x.to == nil {
		return nil, nil
	}
	if err := x.to.Close(); err != nil {
		return nil, err
	}
	frame := x.frame
	x.frame = nil
	return frame, nil
}

func (x *xorEncoder) Close() error {
	if x.frame == nil {
		return nil
	}
	return x.frame.Close()
}

// zeros is an endless stream of zeros.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// overwriteEncoder writes a frame of the changed bytes and their positions, after it has seen all of them.
type overwriteEncoder struct {
	dir       *os.Root // of spools
	positions *spool   // of changes
	values    *spool   // of changes
	position  int64    // of the next element
	batch     []byte   // positions found so far
	bytes     []byte   // their values
}

func (o *overwriteEncoder) Encode(old, now []byte) error {
	o.batch = o.batch[:0]
	o.bytes = o.bytes[:0]
	for i, b := range now {
		if b == old[i] {
			continue
		}
		position := o.position + int64(i)
		if position > math.MaxUint32 {
			return fmt.Errorf("%w: byte %d changes, which positions of 32 bits do not reach: use %s",
				errFormat, position, encodingXor)
		}
		o.batch = binary.LittleEndian.AppendUint32(o.batch, uint32(position))
		o.bytes = append(o.bytes, b)
	}
	o.position += int64(len(now))
	if _, err := o.positions.Write(o.batch); err != nil {
		return err
	}
	_, err := o.values.Write(o.bytes)
	return err
}

func (o *overwriteEncoder) Finish() (frame *spool, err error) {
	if o.values.length == 0 {
		return nil, nil
	}
	frame = &spool{dir: o.dir}
	defer func() {
		if err != nil {
			_ = frame.Close()
			frame = nil
		}
	}()
	to := newCompressor(frame, countBytes+o.positions.length+o.values.length)
	count := binary.LittleEndian.AppendUint32(nil, uint32(o.values.length))
	if _, err := to.Write(count); err != nil {
		return frame, err
	}
	for _, part := range []*spool{o.positions, o.values} {
		if _, err := part.WriteTo(to); err != nil {
			return frame, err
		}
	}
	return frame, to.Close()
}

func (o *overwriteEncoder) Close() error {
	return cmp.Or(o.positions.Close(), o.values.Close())
}

// singleSegment is the length up to which frames are one segment; short frames do not state the length of their data
// otherwise.
const singleSegment = 1 << 20

var (
	shortFrames = sync.OnceValues(func() (*zstd.Encoder, error) {
		return zstd.NewWriter(nil,
			zstd.WithEncoderLevel(zstd.SpeedFastest),
			zstd.WithSingleSegment(true),
		)
	})
	longFrames = sync.Pool{New: func() any {
		encoder, err := zstd.NewWriter(nil,
			zstd.WithEncoderLevel(zstd.SpeedFastest),
			zstd.WithEncoderConcurrency(1),
		)
		if err != nil {
			panic(err) // the options are constants
		}
		return encoder
	}}
)

// compressor writes a frame that states the length of its content, as engines require.
type compressor struct {
	to    io.Writer     // destination of the frame
	short []byte        // content of a short frame
	long  *zstd.Encoder // nil for a short frame
}

// newCompressor returns a compressor for this many bytes.
func newCompressor(to io.Writer, bytes int64) *compressor {
	if bytes <= singleSegment {
		return &compressor{to: to}
	}
	encoder := longFrames.Get().(*zstd.Encoder)
	encoder.ResetContentSize(to, bytes)
	return &compressor{
		to:   to,
		long: encoder,
	}
}

// Write implements [io.Writer].
func (c *compressor) Write(p []byte) (int, error) {
	if c.long != nil {
		return c.long.Write(p)
	}
	c.short = append(c.short, p...)
	return len(p), nil
}

// Close completes the frame.
func (c *compressor) Close() error {
	if c.long != nil {
		err := c.long.Close()
		longFrames.Put(c.long)
		return err
	}
	encoder, err := shortFrames()
	if err != nil {
		return err
	}
	_, err = c.to.Write(encoder.EncodeAll(c.short, nil))
	return err
}
