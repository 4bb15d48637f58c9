package simd

import "golang.org/x/sys/cpu"

// detect checks F16C itself, a separate feature that golang.org/x/sys/cpu does not report and a hypervisor may hide.
// An operating system that saves the registers of AVX2 saves those of F16C.
func detect() bool {
	_, _, features, _ := cpuid(1, 0)
	return cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasBMI2 && features&cpuidF16C != 0
}

const cpuidF16C = 1 << 29

// largestCache queries Intel's leaf, and then AMD's, which has the same form (Intel SDM, volume 2, CPUID; AMD64 APM,
// volume 3, appendix E). For a leaf beyond the last one, processors return other data.
func largestCache() (largest int) {
	for _, leaf := range [...]uint32{0x4, 0x8000001d} {
		if last, _, _, _ := cpuid(leaf&0x80000000, 0); last < leaf || largest > 0 {
			continue
		}
		for i := range uint32(16) { // there are about four
			kind, shape, sets, _ := cpuid(leaf, i)
			if kind&31 == 0 { // no more caches
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
