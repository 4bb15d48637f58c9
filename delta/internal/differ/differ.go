// Package differ finds where two arrays differ, with vector instructions where there are any.
package differ

import "math/bits"

// Room is by how many entries a list has to be longer than there are elements.
const Room = 7

// List lists the elements of size bytes in which words of old and now differ, and returns how many there are. list
// has room for all elements and [Room] more; what lies behind the last entry is overwritten.
func List(list []uint16, old, now []uint64, size int) (found int) {
	done, found := listBlocks(list, old, now, size)
	sizeLog := uint(bits.TrailingZeros(uint(size))) & 3
	element := uint64(1)<<(8*size-1)<<1 - 1
	for i, word := range now[done:] {
		for w := word ^ old[done+i]; w != 0; found++ {
			position := uint(bits.TrailingZeros64(w)) >> 3 >> sizeLog
			w &^= element << (position << 3 << sizeLog & 63)
			list[found] = uint16(uint(done+i)<<3>>sizeLog + position)
		}
	}
	return found
}
