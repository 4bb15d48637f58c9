package kernel

// FixedBlock is the number of elements that have an exponent in common.
const FixedBlock = 64

// Fixed is an array of sums in fixed point. A term of block b, with exponent field e, is an integer number of units
// of 2^(e-126-Bits): what is in the block is less than 2^(e-126). As integers, terms give one sum in any order.
type Fixed struct {
	// Sums is the address of N I32. With m terms of an element, m*2^Bits is less than 2^31, or they wrap around.
	Sums uintptr
	// Exponents is the address of the blocks' I8: the exponent field of the largest F32 in a block, less 128. The field
	// is 0 where all are zeros or subnormal, and 255 where one is not finite.
	Exponents uintptr
	// N is the number of elements, at most 2^31-1.
	N int
	// Skip is how many elements of the first block lie before the first one, less than FixedBlock.
	Skip int
	// Bits is the precision of a term below the exponent: 1 to 30.
	Bits int
}

// Blocks is the number of exponents.
func (f Fixed) Blocks() int { return (f.Skip + f.N + FixedBlock - 1) / FixedBlock }
