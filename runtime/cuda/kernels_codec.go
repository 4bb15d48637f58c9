package cuda

import "github.com/tutti-go/tutti/runtime/kernel"

// groupsPerSM is the number of blocks of encode and decode for each multiprocessor; a block uses 36 KiB of shared
// memory.
const groupsPerSM = 4

// groups is the number of groups of n entries or values, of which the last one may be empty.
func groups(n int) int { return n/kernel.CodecGroup + 1 }

// TopKChunks implements [kernel.Kernels].
func (s *sparse) TopKChunks(src kernel.Source, k, chunk int, dst kernel.Entries) error {
	c := s.checks("TopKChunks")
	c.source(src)
	c.target(dst)
	c.length("k", k)
	if c.length("chunk", chunk) == 0 {
		c.fail("chunks have no elements")
	}
	if c.err == nil {
		total := kernel.ChunkedLen(src.N, k, chunk)
		c.room(dst, total, total)
	}
	return c.submit(func() error {
		return launch(s.rt, kernelTopKChunks, (src.N+chunk-1)/chunk, blocksPerSM, &topKChunksParameters{
			x:                  src.X,
			gradientParameters: gradientOf(src),
			keep:               src.Keep,
			n:                  src.N,
			take:               flag(src.Take),
			k:                  k,
			chunk:              chunk,
			idx:                dst.Idx,
			val:                dst.Val,
			length:             dst.Len,
		})
	})
}

// Encode implements [kernel.Kernels].
func (s *sparse) Encode(l kernel.Entries, codec kernel.Codec, n int, dst kernel.Message, lost kernel.Array) error {
	c := s.checks("Encode")
	c.codec(codec, codec.Encodes())
	c.indices("l", l)
	if codec != kernel.CodecPositions {
		c.floats("l", l.Val, l.N)
	}
	c.buffer("dst", dst.Ptr, dst.Bytes, 4)
	c.optional("dst.Len", dst.Len)
	c.length("n", n)
	if dst.Bytes < 8 {
		c.fail("dst has %d bytes, want at least 8", dst.Bytes)
	}
	if lost.Ptr != 0 {
		c.array(lost)
	}
	return c.submit(func() error {
		if err := s.growStatus(l.N); err != nil {
			return err
		}
		blocks := groups(l.N) // of indices
		if codec != kernel.CodecPositions {
			blocks *= 2
		}
		return launch(s.rt, kernelEncode, blocks, groupsPerSM, &encodeParameters{
			control:  s.address(control),
			status:   s.address(status),
			l:        listOf(l),
			codec:    uint64(codec),
			fit:      codec.Fit(dst.Bytes, n),
			message:  dst.Ptr,
			capacity: dst.Bytes,
			length:   dst.Len,
			lost:     arrayOf(lost),
		})
	})
}

// Decode implements [kernel.Kernels].
func (s *sparse) Decode(src kernel.Message, codec kernel.Codec, dst kernel.Entries) error {
	c := s.checks("Decode")
	c.codec(codec, codec.Encodes())
	c.buffer("src", src.Ptr, src.Bytes, 4)
	c.indices("dst", dst)
	c.number("dst.Len", dst.Len, 4)
	if codec != kernel.CodecPositions {
		c.floats("dst", dst.Val, dst.N)
	}
	return c.submit(func() error {
		return launch(s.rt, kernelDecode, groups(dst.N), groupsPerSM, &decodeParameters{
			codec:    uint64(codec),
			message:  src.Ptr,
			capacity: src.Bytes,
			dst:      listOf(dst),
		})
	})
}

// Quantize implements [kernel.Kernels].
func (s *sparse) Quantize(dst uintptr, codec kernel.Codec, src uintptr, n int, lost uintptr) error {
	c := s.checks("Quantize")
	c.codec(codec, codec.Quantizes())
	c.floats("dst", dst, n)
	c.floats("src", src, n)
	c.optional("lost", lost)
	return c.submit(func() error {
		return launch(s.rt, kernelQuantize, groups(n), blocksPerSM, &quantizeParameters{
			dst:   dst,
			codec: uint64(codec),
			src:   src,
			n:     n,
			lost:  lost,
		})
	})
}

// Dequantize implements [kernel.Kernels].
func (s *sparse) Dequantize(dst uintptr, codec kernel.Codec, src uintptr, n int, add bool) error {
	c := s.checks("Dequantize")
	c.codec(codec, codec.Quantizes())
	c.floats("dst", dst, n)
	c.floats("src", src, n)
	return c.submit(func() error {
		if n == 0 {
			return nil
		}
		const quad = 4 // elements for each thread
		return launch(s.rt, kernelDequantize, blocksOf((n+quad-1)/quad), blocksPerSM, &dequantizeParameters{
			dst:   dst,
			codec: uint64(codec),
			src:   src,
			n:     n,
			add:   flag(add),
		})
	})
}

func (c *checks) codec(codec kernel.Codec, ok bool) {
	if !ok {
		c.fail("the codec is %v", codec)
	}
}
