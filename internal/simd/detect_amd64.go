package simd

import "golang.org/x/sys/cpu"

// detect asks for F16C itself, a separate feature, which golang.org/x/sys/cpu
// does not report and a hypervisor may hide. The operating system saves the
// registers if it does for AVX2.
func detect() bool {
	_, _, features, _ := cpuid(1, 0)
	return cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasBMI2 && features&cpuidF16C != 0
}

const cpuidF16C = 1 << 29

// largestCache asks at Intel's place for it, and then at AMD's, which has the same form
// (Intel SDM, volume 2, CPUID; AMD64 APM, volume 3, appendix E). Of a leaf beyond the last
// one, processors tell something else.
func largestCache() (largest int) {
	for _, leaf := range [...]uint32{0x4, 0x8000001d} {
		if last, _, _, _ := cpuid(leaf&0x80000000, 0); last < leaf || largest > 0 {
			continue
		}
		for i := range uint32(16) { // there are about four
			kind, shape, sets, _ := cpuid(leaf, i)
			if kind&31 == 0 { // no cache
				break
			}
			line := shape&0xfff + 1
			partitions := shape>>12&0x3ff + 1
			ways := shape>>22 + 1
			largest = max(largest, int(line)*int(partitions)*int(ways)*(int(sets)+1))
		}
	}
	return largest
}
