package cuda

import "github.com/tutti-go/tutti/runtime/kernel"

// groupsPerSM is how many blocks of encode and decode a multiprocessor gets, for 36 KiB of shared memory each.
const groupsPerSM = 4

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
		return s.rt.launchBlocks(kernelTopKChunks, (src.N+chunk-1)/chunk, blocksPerSM,
			uint64(src.X), uint64(from(src)), uint64(src.Grad), gradientType(src), uint64(src.Factor), uint64(src.Keep),
			uint64(src.N), flag(src.Take), uint64(k), uint64(chunk), uint64(dst.Idx), uint64(dst.Val), uint64(dst.Len))
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
	if c.length("n", n); dst.Bytes < 8 {
		c.fail("dst has %d bytes, want at least 8", dst.Bytes)
	}
	if lost.Ptr != 0 {
		c.array(lost)
	}
	return c.submit(func() error {
		if err := s.growStatus(l.N); err != nil {
			return err
		}
		return s.rt.launchBlocks(kernelEncode, l.N/kernel.CodecGroup+1, groupsPerSM,
			s.at(control), s.at(status), uint64(l.Idx), uint64(l.Val), uint64(l.N), uint64(l.Len), uint64(codec), uint64(codec.Fit(dst.Bytes, n)),
			uint64(dst.Ptr), uint64(dst.Bytes), uint64(dst.Len), uint64(lost.Ptr), uint64(lost.N), uint64(lost.Faults))
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
		return s.rt.launchBlocks(kernelDecode, dst.N/kernel.CodecGroup+1, groupsPerSM,
			uint64(codec), uint64(src.Ptr), uint64(src.Bytes), uint64(dst.Idx), uint64(dst.Val), uint64(dst.N), uint64(dst.Len))
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
		return s.rt.launchBlocks(kernelQuantize, n/kernel.CodecGroup+1, blocksPerSM, uint64(dst), uint64(codec), uint64(src), uint64(n), uint64(lost))
	})
}

// Dequantize implements [kernel.Kernels].
func (s *sparse) Dequantize(dst uintptr, codec kernel.Codec, src uintptr, n int, add bool) error {
	c := s.checks("Dequantize")
	c.codec(codec, codec.Quantizes())
	c.floats("dst", dst, n)
	c.floats("src", src, n)
	return c.submit(func() error {
		return s.rt.launch(kernelDequantize, (n+3)/4, uint64(dst), uint64(codec), uint64(src), uint64(n), flag(add))
	})
}

func (c *checks) codec(codec kernel.Codec, ok bool) {
	if !ok {
		c.fail("the codec is %v", codec)
	}
}
