// Package link classifies the links between the GPUs of ranks. Backends of GPUs choose by it, in tables.
package link

import "github.com/tutti-go/tutti/runtime/cuda"

// Kind is the kind of link from one GPU to the memory of another, the slowest first.
type Kind uint8

// The kinds of links.
const (
	Unknown Kind = iota // no peer access, another host, or a GPU that this process does not see
	PCIe                // peer access without native atomics
	NVLink              // peer access with native atomics
	SameGPU             // both ranks are on one GPU
)

// String implements [fmt.Stringer].
func (k Kind) String() string {
	switch k {
	case PCIe:
		return "PCIe"
	case NVLink:
		return "NVLink"
	case SameGPU:
		return "the same GPU"
	}
	return "an unknown link"
}

// Slowest returns the slowest link from a GPU to the GPUs of ranks, which are given by name's values for their PCI
// buses. Ranks may see different links, so they agree on the minimum.
func Slowest[K comparable](gpu cuda.DeviceInfo, ranks []K, name func(bus string) K) Kind {
	visible, err := cuda.Devices()
	if err != nil {
		visible = nil // all other GPUs are unknown
	}
	return slowest(gpu, visible, ranks, name)
}

func slowest[K comparable](gpu cuda.DeviceInfo, visible []cuda.DeviceInfo, ranks []K, name func(bus string) K) Kind {
	links := map[K]Kind{}
	for _, peer := range visible {
		links[name(peer.PCIBus)] = between(gpu, peer.Index)
	}
	links[name(gpu.PCIBus)] = SameGPU
	kind := SameGPU
	for _, rank := range ranks {
		kind = min(kind, links[rank])
	}
	return kind
}

// between returns the link from a GPU to the one with an index.
func between(gpu cuda.DeviceInfo, peer int) Kind {
	switch {
	case peer >= len(gpu.Peers) || peer >= len(gpu.PeerAtomics):
		return Unknown
	case !gpu.Peers[peer]:
		return Unknown
	case gpu.PeerAtomics[peer]:
		return NVLink
	}
	return PCIe
}
