package cuda

import (
	"bytes"
	goruntime "runtime"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// Device attributes, CUdevice_attribute of the driver API.
const (
	attrMultiprocessors     = 16
	attrCapabilityMajor     = 75
	attrCapabilityMinor     = 76
	attrVirtualMemory       = 102 // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
	attrPosixFileDescriptor = 103 // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
	attrRDMAWithVMM         = 110 // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
	attrWriteValue64        = 122 // CAN_USE_64_BIT_STREAM_MEM_OPS
)

// Peer attributes, CUdevice_P2PAttribute.
const (
	p2pAccessSupported = 2
	p2pNativeAtomic    = 3
)

// DeviceInfo describes one GPU.
type DeviceInfo struct {
	Index           int    `json:"index"`           // the ordinal, from 0
	Name            string `json:"name"`            // as the driver reports it
	MemoryBytes     int64  `json:"memory_bytes"`    // total memory
	Major           int    `json:"compute_major"`   // compute capability
	Minor           int    `json:"compute_minor"`   // of the same
	Multiprocessors int    `json:"multiprocessors"` // number of them
	PCIBus          string `json:"pci_bus"`         // as in nvidia-smi, such as 0000:1b:00.0
	// Peers says, for every device, whether this one can access its memory directly; PeerAtomics whether the link has
	// native atomics (NVLink). Both are false for the device itself.
	Peers       []bool `json:"peers"`
	PeerAtomics []bool `json:"peer_atomics"`
}

// Count returns the number of GPUs. Without a driver or a GPU the error wraps [runtime.ErrUnavailable] and says what
// is missing.
func Count() (int, error) {
	d, err := open()
	if err != nil {
		return 0, err
	}
	n, err := d.get(-1, d.sym.DeviceGetCount)
	return int(int32(n)), err
}

// DriverVersion returns the newest CUDA version that the driver supports, such
// as 13 and 0.
func DriverVersion() (major, minor int, err error) {
	d, err := open()
	if err != nil {
		return 0, 0, err
	}
	v := d.version()
	return v / 1000, v % 1000 / 10, nil
}

// Devices describes all GPUs of this machine.
func Devices() ([]DeviceInfo, error) {
	n, err := Count()
	if err != nil {
		return nil, err
	}
	d, err := open()
	if err != nil {
		return nil, err
	}
	all := make([]DeviceInfo, n)
	for i := range all {
		if all[i], err = d.describe(i, n); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// handle returns the CUdevice of an ordinal.
func (d *driver) handle(index int) (uintptr, error) {
	h, err := d.get(index, d.sym.DeviceGet, uintptr(index))
	if err != nil {
		return 0, err
	}
	return uintptr(h), nil
}

// describe fills a DeviceInfo for one of n devices.
func (d *driver) describe(index, n int) (DeviceInfo, error) {
	info := DeviceInfo{
		Index:       index,
		Peers:       make([]bool, n),
		PeerAtomics: make([]bool, n),
	}
	dev, err := d.handle(index)
	if err != nil {
		return info, err
	}
	if info.Name, err = d.text(index, d.sym.DeviceGetName, dev); err != nil {
		return info, err
	}
	if info.PCIBus, err = d.text(index, d.sym.DeviceGetPCIBusID, dev); err != nil {
		return info, err
	}
	total, err := d.get(index, d.sym.DeviceTotalMem, dev)
	if err != nil {
		return info, err
	}
	info.MemoryBytes = int64(total)
	for _, a := range []struct {
		attribute uintptr
		target    *int
	}{
		{attrMultiprocessors, &info.Multiprocessors},
		{attrCapabilityMajor, &info.Major},
		{attrCapabilityMinor, &info.Minor},
	} {
		*a.target, err = d.attribute(index, dev, a.attribute)
		if err != nil {
			return info, err
		}
	}
	for peer := range n {
		if peer == index {
			continue
		}
		remote, err := d.handle(peer)
		if err != nil {
			return info, err
		}
		access, err := d.get(index, d.sym.DeviceGetP2P, p2pAccessSupported, dev, remote)
		if err != nil {
			return info, err
		}
		atomics, err := d.get(index, d.sym.DeviceGetP2P, p2pNativeAtomic, dev, remote)
		if err != nil {
			return info, err
		}
		info.Peers[peer] = int32(access) != 0
		info.PeerAtomics[peer] = int32(atomics) != 0
	}
	return info, nil
}

// attribute queries a number that describes a device.
func (d *driver) attribute(index int, dev, attribute uintptr) (int, error) {
	v, err := d.get(index, d.sym.DeviceGetAttribute, attribute, dev)
	return int(int32(v)), err
}

// text makes a call of the form f(char *out, int length, CUdevice).
func (d *driver) text(device int, fn dl.Func, dev uintptr) (string, error) {
	buf := make([]byte, 256)
	status := fn.Int(hostmem.Addr(buf), uintptr(len(buf)), dev)
	goruntime.KeepAlive(buf)
	if err := d.check(fn, device, status); err != nil {
		return "", err
	}
	if end := bytes.IndexByte(buf, 0); end >= 0 {
		buf = buf[:end]
	}
	return string(buf), nil
}

// deviceOf returns the runtime.Device of an ordinal.
func deviceOf(index int) runtime.Device {
	return runtime.Device{Kind: runtime.CUDA, Index: index}
}
