package simd

import "golang.org/x/sys/cpu"

// detect asks for F16C itself, a feature of its own, which golang.org/x/sys/cpu
// does not report and a hypervisor may hide. The operating system saves the
// registers if it does for AVX2.
func detect() bool { return cpu.X86.HasAVX2 && cpuid1ecx()&cpuidF16C != 0 }

const cpuidF16C = 1 << 29
