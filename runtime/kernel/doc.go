// Package kernel is for authors of devices: implement [Kernels], return it from a method Kernels of the
// [runtime.Runtime] ([Provider]), and the sparse patterns of package distributed run on the device.
//
//	func (r *Device) Kernels() kernel.Kernels { return kernels{r} }
//
// Programs do not need this package. They make a runtime and pass it on; what drives the kernels finds them
// with [Lookup].
//
// The suite runtime/runtimetest compares every method with those of runtime/cpu, bit for bit. A device whose
// messages other devices read also implements the formats of [Codec]. A device that works asynchronously
// implements [AsyncCopier], so that the host reads numbers without waiting for later work.
package kernel
