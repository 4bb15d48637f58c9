// Package classes finds elements by their class, the eight bits after the sign, and by the number of earlier elements
// of the same class. It reads classes in chunks, with vector instructions if there are any.
package classes

import (
	"encoding/binary"
	"math"
	"math/bits"
	"slices"
)

// chunkLen is the number of elements of a chunk; the last one may have fewer.
const chunkLen = 256

// List sets classes to the classes of elements of size bytes. The class of a one-byte element ends with a zero.
func List(classes, data []byte, size int) {
	done := listFast(classes, data, size)
	tail := data[done*size:]
	for i := range classes[done:] {
		element := tail[i*size : (i+1)*size]
		class := element[size-1] << 1
		if size > 1 {
			class |= element[size-2] >> 7
		}
		classes[done+i] = class
	}
}

// Index has the classes of an array's elements.
type Index struct {
	Classes []uint8    // of each element
	Starts  [256]int32 // number of elements with a lower class
	chunks  []chunk    // of elements, in order
	counts  []uint16   // of the classes of all chunks
}

// chunk has the counts of chunkLen elements.
type chunk struct {
	lowest uint8 // class
	end    int32 // end of its counts, which begin at the end of the previous chunk's, with the lowest class
}

// Reset makes x the index of elements of size bytes.
func (x *Index) Reset(data []byte, size int) {
	n := len(data) / size
	x.Classes = slices.Grow(x.Classes[:0], n)[:n]
	List(x.Classes, data, size)
	x.chunks = x.chunks[:0]
	x.counts = x.counts[:0]
	var totals [256]int32
	for part := range slices.Chunk(x.Classes, chunkLen) {
		from := len(x.counts)
		lowest := x.count(part)
		for i, n := range x.counts[from:] {
			totals[int(lowest)+i] += int32(n)
		}
		x.chunks = append(x.chunks, chunk{lowest, int32(len(x.counts))})
	}
	sum := int32(0)
	for class, n := range totals {
		x.Starts[class] = sum
		sum += n
	}
}

// count appends the counts of a chunk's classes, from the lowest to the highest, and returns the lowest.
func (x *Index) count(part []uint8) (lowest uint8) {
	from := len(x.counts)
	x.counts = slices.Grow(x.counts, chunkLen)
	if lowest, span := countFast(part, x.counts[from:cap(x.counts)]); span > 0 {
		x.counts = x.counts[:from+span]
		return lowest
	}
	var counts [256]uint16
	lowest = math.MaxUint8
	highest := uint8(0)
	for _, class := range part {
		counts[class]++
		lowest = min(lowest, class)
		highest = max(highest, class)
	}
	x.counts = append(x.counts, counts[lowest:int(highest)+1]...)
	return lowest
}

// found are entries in a chunk, by their position.
type found struct {
	set     [chunkLen / 64]uint64 // bit set of positions with an entry
	entries [chunkLen]int32       // by position
}

// Unsort maps ascending ranks in the order of classes, then of the array, to positions in the array. It sets positions
// to these, ascending, and entries to the index in places of each.
func (x *Index) Unsort(positions, entries, places []int32) {
	var entry [256]int32 // next entry of each class
	var place [256]int32 // its place
	next := func(class int, i int32) {
		entry[class] = i
		place[class] = math.MaxInt32
		if int(i) < len(places) {
			place[class] = places[i]
		}
	}
	for class, start := range x.Starts {
		i, _ := slices.BinarySearch(places, start)
		next(class, int32(i))
	}
	before := x.Starts // rank of the next element of each class
	var hits found
	done := 0
	from := int32(0)
	for i, c := range x.chunks {
		first := i * chunkLen
		part := x.Classes[first:min(first+chunkLen, len(x.Classes))]
		for k, n := range x.counts[from:c.end] {
			class := int(c.lowest) + k
			end := before[class] + int32(n)
			for place[class] < end {
				position := find(part, uint8(class), int(place[class]-before[class]))
				hits.set[position/64] |= 1 << (position % 64)
				hits.entries[position] = entry[class]
				next(class, entry[class]+1)
			}
			before[class] = end
		}
		from = c.end
		for j, word := range hits.set {
			for ; word != 0; word &= word - 1 {
				position := 64*j + bits.TrailingZeros64(word)
				positions[done] = int32(first + position)
				entries[done] = hits.entries[position]
				done++
			}
			hits.set[j] = 0
		}
	}
}

// find returns the position in a chunk of the occurrence of a class with this rank, which exists.
func find(part []uint8, class uint8, rank int) int {
	if position, ok := findFast(part, class, rank); ok {
		return position
	}
	const (
		low  = 0x7f7f_7f7f_7f7f_7f7f
		ones = 0x0101_0101_0101_0101
	)
	position := 0
	for ; len(part)-position >= 8; position += 8 {
		word := binary.LittleEndian.Uint64(part[position:]) ^ ones*uint64(class)
		differ := (word&low + low) | word | low // a clear top bit marks a byte of the class
		n := bits.OnesCount64(^differ)
		if rank < n {
			break
		}
		rank -= n
	}
	for ; ; position++ {
		if part[position] != class {
			continue
		}
		if rank == 0 {
			return position
		}
		rank--
	}
}
