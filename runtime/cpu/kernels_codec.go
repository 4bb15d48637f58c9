package cpu

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/tutti-go/tutti/internal/gaps"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu/internal/f32"
	"github.com/tutti-go/tutti/runtime/cpu/internal/quant"
	"github.com/tutti-go/tutti/runtime/kernel"
)

func (k kernels) TopKChunks(src kernel.Source, n, chunk int, dst kernel.Entries) error {
	c := k.checks("TopKChunks")
	from := c.source(src)
	to := c.target("dst", dst)
	c.length("k", n)
	if c.length("chunk", chunk) == 0 {
		c.fail("chunks have no elements")
	}
	if c.err != nil {
		return c.err
	}
	total := kernel.ChunkedLen(src.N, n, chunk)
	c.room(dst, total, total)
	return c.with(func(s *scratch) {
		s.topKChunks(&from, n, chunk, to.entries)
		set(to.length, int32(total))
	})
}

// topKChunks writes the k largest of each chunk to dst. The chunks before tell which elements of the next one are
// candidates, so that one pass adds the gradient and finds them.
func (s *scratch) topKChunks(src *source, k, size int, dst entries) {
	var f chunkFilter
	src.access = f32.Ahead // the memory rests while a chunk is looked at
	for from := 0; from < len(src.x); from += size {
		part := src.part(from, min(from+size, len(src.x)))
		count := s.topKChunk(&part, k, dst, &f)
		for i := range dst.idx[:count] {
			dst.idx[i] += int32(from)
		}
		dst = dst.from(count)
	}
}

// chunkFilter is what makes candidates of elements of a chunk. It only ever costs time.
type chunkFilter struct {
	low  float32 // the smallest candidate; 0: there is no filter
	last float32 // the k-th element of the chunk before
}

// usable reports whether the filter may leave a part of the elements out.
func (f *chunkFilter) usable() bool { return f.low > 0 && isFinite(f.last) }

// adapt takes account of a chunk's number of candidates and its k-th element. Enough candidates are half as many again
// as are selected, since thresholds of chunks differ.
func (f *chunkFilter) adapt(found, k int, t float32) {
	const step = 1. / 32
	switch {
	case found < k+k/2:
		f.low *= 1 - step
	case found > 3*k:
		f.low = min(f.low*(1+step), t)
	}
	f.last = t
}

// reset makes the filter from the k-th element of a chunk alone.
func (f *chunkFilter) reset(t float32) {
	const margin = 1. / 16
	f.low = t * (1 - margin)
	f.last = t
}

// topKChunk is topK, zeros included, of the elements of a chunk.
func (s *scratch) topKChunk(src *source, k int, dst entries, f *chunkFilter) (count int) {
	// Fewer entries are selected than not: they are zeroed afterwards, instead of the others being put back.
	take := src.take
	src.take = false
	room := len(src.x) / 2
	found := 0
	if 2*k <= room && f.usable() {
		// Where a chunk has too few candidates, it is in the cache, and to look again takes less than to go without.
		for low := f.low; found < k && low >= f.low/4; low *= 3. / 4 {
			bracket := keyRange{f32.Key(low), f32.Key(f.last * 1.5)}
			found = s.findCandidates(src, bracket.lo, room)
			if k <= found && found <= room {
				count, key := s.topKOfChunk(src, found, k, bracket, f.last, dst)
				if take {
					scatterZero(src.x, dst.idx[:count])
				}
				if low < f.low {
					found = 0
				}
				f.adapt(found, k, math.Float32frombits(key))
				return count
			}
			src.grad = 0 // it is added
		}
	}
	src.take = take
	count, key := s.topK(src, k, dst, guess{}, true)
	f.reset(math.Float32frombits(key))
	return count
}

// topKOfChunk is topKOfCandidates, zeros included, by a threshold that is probably near t.
func (s *scratch) topKOfChunk(src *source, found, k int, bracket keyRange, t float32, dst entries) (
	count int, key uint32,
) {
	filled := (found + blockSlack - 1) / blockSlack * blockSlack
	x := s.candidates.val[:filled] // whole blocks, with zeros, which are below the bracket
	clear(x[found:])
	key, ok := separate(x, found, k, bracket, f32.Key(t))
	if !ok {
		return s.topKOfCandidates(src, found, k, bracket, dst, true)
	}
	f32.SelectRange(x, 0, key, f32.MaxKey, dst.idx, dst.val)
	translate(dst.idx[:k], s.candidates.idx)
	return k, key
}

// separate returns a key that k elements of x are not below. As many as were found are not below the lower end of
// bracket, k or more, and few are above its upper end. It interpolates between what it has counted, from a first key
// on, and ends after a few tries: where elements are equal there may be no such key.
//
// An end that stays for two tries counts half (the Illinois algorithm), as counts fall about exponentially, but not
// quite: otherwise the other end would creep.
func separate(x []float32, found, k int, bracket keyRange, first uint32) (key uint32, ok bool) {
	const tries = 12
	lower := bracket.lo
	if found == k {
		return lower, true
	}
	upper := bracket.hi
	excess := logarithm(found) - logarithm(k) // of the lower end's count
	deficit := logarithm(k) - logarithm(0)    // of the upper end's
	moved := 0                                // 1: the lower end, -1: the upper one
	key = first
	for range tries {
		if key <= lower || key >= upper {
			key = lower + (upper-lower)/2
		}
		count := f32.CountRange(x, key, f32.MaxKey)
		switch {
		case count == k:
			return key, true
		case count > k:
			lower = key
			excess = logarithm(count) - logarithm(k)
			if moved > 0 {
				deficit /= 2
			}
			moved = 1
		default:
			upper = key
			deficit = logarithm(k) - logarithm(count)
			if moved < 0 {
				excess /= 2
			}
			moved = -1
		}
		key = lower + uint32(excess/(excess+deficit)*float32(upper-lower))
	}
	return 0, false
}

// logarithm returns about log(n + 1/2), to some base, plus a constant: exponent, and mantissa behind it.
func logarithm(n int) float32 { return float32(math.Float32bits(float32(n) + 0.5)) }

func (k kernels) Encode(l kernel.Entries, codec kernel.Codec, n int, dst kernel.Message, lost kernel.Array) error {
	c := k.checks("Encode")
	c.codec(codec, codec.Encodes())
	var from entries
	if codec == kernel.CodecPositions {
		from.idx = c.indices("l", l)
	} else {
		from = c.list("l", l)
	}
	message := slice[byte](&c, "dst", dst.Ptr, dst.Bytes)
	length := optional[int32](&c, dst.Len)
	c.length("n", n)
	if dst.Bytes < codecHeader {
		c.fail("dst has %d bytes, want at least %d", dst.Bytes, codecHeader)
	}
	x, faults := c.optionalArray(lost)
	return c.with(func(s *scratch) {
		bytes, outside := s.encode(from, codec, n, message, x)
		set(length, int32(bytes))
		if lost.Ptr != 0 {
			add(faults, outside)
		}
	})
}

func (k kernels) Decode(src kernel.Message, codec kernel.Codec, dst kernel.Entries) error {
	c := k.checks("Decode")
	c.codec(codec, codec.Encodes())
	message := slice[byte](&c, "src", src.Ptr, src.Bytes)
	to := entries{idx: c.ints("dst", dst.Idx, dst.N)}
	length := number[int32](&c, "dst.Len", dst.Len)
	if codec != kernel.CodecPositions {
		to.val = c.floats("dst", dst.Val, dst.N)
	}
	if c.err != nil {
		return c.err
	}
	*length = int32(decode(message, codec, to))
	return nil
}

func (k kernels) Quantize(dst uintptr, codec kernel.Codec, src uintptr, n int, lost uintptr) error {
	c := k.checks("Quantize")
	c.codec(codec, codec.Quantizes())
	x := c.floats("src", src, n)
	l := c.optionalFloats("lost", lost, n)
	out := c.message("dst", dst, codec, n)
	if c.err != nil {
		return c.err
	}
	quant.Encode(codec, out, x, l)
	return nil
}

func (k kernels) Dequantize(dst uintptr, codec kernel.Codec, src uintptr, n int, sum bool) error {
	c := k.checks("Dequantize")
	c.codec(codec, codec.Quantizes())
	x := c.floats("dst", dst, n)
	in := c.message("src", src, codec, n)
	if c.err != nil {
		return c.err
	}
	quant.Decode(codec, x, in, n, sum)
	return nil
}

func (c *checks) codec(codec kernel.Codec, ok bool) {
	if !ok {
		c.fail("the codec is %v", codec)
	}
}

// message returns the bytes of an array in a codec.
func (c *checks) message(name string, p uintptr, codec kernel.Codec, n int) []byte {
	if !c.buffer(name, p, n) {
		return nil
	}
	return hostmem.Slice[byte](p, codec.Size(n))
}

const codecHeader = 8

// encode writes a list, and adds to lost what its message does not hold.
func (s *scratch) encode(l entries, c kernel.Codec, n int, message []byte, lost []float32) (length int, outside int32) {
	m := min(len(l.idx), c.Fit(len(message), n))
	_, valuesAt, _ := c.Layout(m)
	length = s.encodeIndices(l.idx[:m], c, message)
	if c == kernel.CodecPositions {
		return length, 0
	}
	values := message[valuesAt:][:c.Size(m)]
	if len(lost) == 0 {
		quant.EncodeList(c, values, l.val[:m], nil)
		return length, 0
	}
	s.lost = slices.Grow(s.lost[:0], m)[:m]
	quant.EncodeList(c, values, l.val[:m], s.lost)
	outside = scatterAdd(lost, entries{l.idx[:m], s.lost}, 1)
	outside += scatterAdd(lost, l.from(m), 1)
	return length, outside
}

// encodeIndices writes all of a message but its values, and returns its length.
func (s *scratch) encodeIndices(all []int32, c kernel.Codec, message []byte) (length int) {
	headersAt, valuesAt, blocksAt := c.Layout(len(all))
	le := binary.LittleEndian
	le.PutUint32(message, uint32(len(all)))
	clear(message[headersAt:valuesAt])
	length = blocksAt
	for from := 0; from < len(all); from += kernel.IndexBlock {
		idx := all[from:min(from+kernel.IndexBlock, len(all))]
		previous := idx[0] - 1
		if from%kernel.CodecGroup != 0 {
			previous = all[from-1]
		} else {
			directory := message[codecHeader+from/kernel.CodecGroup*8:]
			le.PutUint32(directory, uint32(idx[0]))
			le.PutUint32(directory[4:], uint32(length))
		}
		s.gaps.Set(idx, previous)
		h := s.gaps.Choose()
		if length+h.Bytes(len(idx)) > len(message) { // the list does not ascend, or not in n
			h = 0
		}
		le.PutUint16(message[headersAt+from/kernel.IndexBlock*2:], uint16(h))
		end := length + h.Bytes(len(idx))
		s.gaps.Encode(message[length:end], h)
		length = end
	}
	le.PutUint32(message[4:], uint32(length))
	return length
}

// decode reads a list, and returns how many entries it has.
func decode(message []byte, c kernel.Codec, dst entries) int {
	if len(message) < codecHeader {
		return 0
	}
	le := binary.LittleEndian
	count := le.Uint32(message)
	length := le.Uint32(message[4:])
	if uint64(length) > uint64(len(message)) || count > math.MaxInt32 {
		return 0
	}
	headersAt, valuesAt, blocksAt := c.Layout(int(count))
	if blocksAt > int(length) {
		return 0
	}
	message = message[:length]
	m := min(int(count), len(dst.idx))
	position := 0    // of the block in the message
	next := int32(0) // the index that a gap of 0 means
	for from := 0; from < m; from += kernel.IndexBlock {
		if from%kernel.CodecGroup == 0 {
			directory := message[codecHeader+from/kernel.CodecGroup*8:]
			next = int32(le.Uint32(directory))
			position = int(le.Uint32(directory[4:]))
		}
		h := gaps.Header(le.Uint16(message[headersAt+from/kernel.IndexBlock*2:]))
		idx := dst.idx[from:min(from+kernel.IndexBlock, m)]
		size := min(int(count)-from, kernel.IndexBlock)
		gaps.Decode(idx, size, message[min(position, len(message)):], h, next)
		next = idx[len(idx)-1] + 1
		position += h.Bytes(size)
	}
	if c != kernel.CodecPositions {
		quant.Decode(c, dst.val[:m], message[valuesAt:blocksAt], int(count), false)
	}
	return m
}
