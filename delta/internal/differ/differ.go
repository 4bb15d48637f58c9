// Package differ finds the elements in which two arrays differ, with vector instructions if there are any.
package differ

import "math/bits"

// Room is the number of entries that a list needs beyond the number of elements.
const Room = 7

// List lists the elements of size bytes in which words of old and now differ, and returns their number. list needs
// room for all elements and [Room] more; entries after the last are overwritten.
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
