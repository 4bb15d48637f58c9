package p2p

// sizes are the parameters that must be equal on all ranks.
type sizes struct {
	words      int // bytes of each of the two places of the sentinel wire
	tagged     int // bytes of each of the two places of the tagged wire
	ringBlocks int // of kernels with rings
	chunk      int // packs of a ring's slot
	oneStep    int // bytes of the largest one-step allreduce
	twoSteps   int // bytes of the largest two-step allreduce; 0: none
	blocks     int // maximum of any kernel
}

// worldSizes is defaults. Tests with stand-ins have less memory to fill.
var worldSizes = defaults

// defaults returns the sizes for a number of ranks.
func defaults(ranks int) sizes {
	s := sizes{
		words:      8 << 20,
		tagged:     2 << 20,
		ringBlocks: 128,
		blocks:     maxBlocks,
	}
	switch {
	case ranks <= 2:
		s.oneStep = 8 << 20
		s.chunk = 256
	case ranks <= 4:
		s.words = 16 << 20
		s.oneStep = 256 << 10
		s.twoSteps = 8 << 20
		s.chunk = 128
	default:
		s.oneStep = 96 << 10
		s.twoSteps = 4 << 20
		s.chunk = 64
	}
	return s
}

// layout lays out the parts, and returns their total size.
func (s sizes) layout(ranks int) (l layout, bytes int) {
	l.wordsSize = uint64(s.words)
	l.taggedSize = uint64(s.tagged)
	l.ringSlot = uint64(s.chunk * packBytes)
	l.lines = uint32(s.ringBlocks * maxWidth / lineWidth)
	l.chunk = uint32(s.chunk)

	l.words = headBytes
	l.tagged = l.words + 2*l.wordsSize
	l.ring = l.tagged + 2*l.taggedSize
	stages := uint64(min(ranks, 3) - 1) // of an allreduce
	rings := stages * 2 * uint64(l.lines) * ringSlots * uint64(ranks-1) * l.ringSlot
	return l, int(l.ring + rings)
}
