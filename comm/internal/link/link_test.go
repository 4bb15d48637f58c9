package link

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/runtime/cuda"
)

// Three GPUs: 0 and 1 have NVLink, 1 and 2 reach each other over PCIe, 0 and 2 do not.
var machine = []cuda.DeviceInfo{
	{Index: 0, PCIBus: "a", Peers: []bool{false, true, false}, PeerAtomics: []bool{false, true, false}},
	{Index: 1, PCIBus: "b", Peers: []bool{true, false, true}, PeerAtomics: []bool{true, false, false}},
	{Index: 2, PCIBus: "c", Peers: []bool{false, true, false}, PeerAtomics: []bool{false, false, false}},
}

func TestSlowest(t *testing.T) {
	for _, c := range []struct {
		gpu     int
		visible int // GPUs
		ranks   string
		want    Kind
	}{
		{0, 3, "A", SameGPU},
		{0, 3, "A A", SameGPU},
		{0, 3, "A B", NVLink},
		{0, 3, "A A B", NVLink},
		{1, 3, "A B C", PCIe},
		{1, 3, "B C", PCIe},
		{0, 3, "A B C", Unknown},
		{2, 3, "C A", Unknown},
		{0, 1, "A B", Unknown}, // which another process sees
		{0, 0, "A A", SameGPU}, // the driver does not list devices
		{0, 3, "A X", Unknown}, // of another host
	} {
		got := slowest(machine[c.gpu], machine[:c.visible], strings.Fields(c.ranks), strings.ToUpper)
		assert.Equal(t, c.want, got, "%+v", c)
	}
	// A list of devices that is longer than what the GPU was asked for.
	gpu := cuda.DeviceInfo{PCIBus: "a", Peers: []bool{false}, PeerAtomics: []bool{false}}
	assert.Equal(t, Unknown, slowest(gpu, machine, []string{"A", "B"}, strings.ToUpper))
}

func TestKindsHaveNames(t *testing.T) {
	names := map[string]bool{}
	for kind := Unknown; kind <= SameGPU; kind++ {
		names[kind.String()] = true
	}
	assert.Len(t, names, 4)
}
