package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func TestGPUSection(t *testing.T) {
	device := func(index int, peers, atomics []bool) cuda.DeviceInfo {
		return cuda.DeviceInfo{Index: index, Name: "NVIDIA H200", MemoryBytes: 140 << 30, Major: 9, Multiprocessors: 132,
			PCIBus: "0000:07:00.0", Peers: peers, PeerAtomics: atomics}
	}
	no, yes := false, true
	g := backend.GPUs{Driver: "580.95.05", CUDA: "13.0", NCCL: "2.28.3", NCCLLibrary: "libnccl.so.2", Devices: []cuda.DeviceInfo{
		device(0, []bool{no, yes, yes}, []bool{no, yes, no}),
		device(1, []bool{yes, no, no}, []bool{yes, no, no}),
		device(2, []bool{yes, no, no}, []bool{no, no, no}),
	}}
	g.NoPeerMemory = "GPU 1 does not reach the memory of GPU 2"
	var out bytes.Buffer
	printGPUs(&out, g)
	var rows [][]string
	for line := range strings.Lines(out.String()) {
		rows = append(rows, strings.Fields(line))
	}
	for _, want := range []string{
		"GPU driver 580.95.05", "CUDA up to 13.0", "NCCL 2.28.3, libnccl.so.2",
		"1 NVIDIA H200 140.0 GiB 9.0 132 0000:07:00.0",
		"link 0 1 2", "0 - NVLink peer", "1 NVLink - host", "2 peer host -",
		"NVLink: direct access with native atomics", "--p2p: GPU 1 does not reach the memory of GPU 2",
	} {
		assert.Contains(t, rows, strings.Fields(want), out.String())
	}

	out.Reset()
	printGPUs(&out, backend.GPUs{Devices: g.Devices[:1], NoNCCL: "nccl: no library"})
	assert.Contains(t, out.String(), "NCCL        none: nccl: no library")
	assert.Contains(t, out.String(), "unknown", "the version of the driver")
	assert.NotContains(t, out.String(), "link", "of one GPU to none")

	out.Reset()
	reason := strings.Repeat("unavailable ", 20)
	printGPUs(&out, backend.GPUs{NoGPU: reason, NCCL: "2.28.3", NCCLLibrary: "libnccl.so.2"})
	assert.Contains(t, out.String(), "NCCL  2.28.3, libnccl.so.2\n", "also without a GPU")
	words := strings.Fields(out.String())
	assert.Equal(t, 20, strings.Count(strings.Join(words, " "), "unavailable"), "wrapped between words")
	for line := range strings.Lines(out.String()) {
		assert.LessOrEqual(t, len(line), 8+console.ProseWidth+1)
	}
}

func TestLongTextsArePrintedOnce(t *testing.T) {
	info := information{GPUs: backend.GPUs{NoGPU: "the driver is not there", NoNCCL: "the library is not there"}}
	assert.Equal(t, "no GPU, see above", info.detail(backendInfo{Detail: "nccl: not available: the driver is not there"}))
	assert.Equal(t, "no NCCL, see above", info.detail(backendInfo{Detail: "nccl: the library is not there"}))
	assert.Equal(t, "no MPI", info.detail(backendInfo{Detail: "no MPI"}))
	assert.Equal(t, "all is well", information{}.detail(backendInfo{Available: true, Detail: "all is well"}))
}

func TestHeaderSaysWhatItRanOn(t *testing.T) {
	result := bench.Result{Collective: "allreduce", Backend: "nccl", Ranks: 2, Place: bench.InPlace, Graph: true, Symmetric: true, Locations: []string{"cuda:0 H200", "cuda:1 H200"}}
	var out bytes.Buffer
	printHeader(&out, []bench.Result{result}, true)
	assert.True(t, strings.HasPrefix(out.String(), `# allreduce over 2 ranks, backend nccl
# rank 0: cuda:0 H200
# rank 1: cuda:1 H200
# time: of the device, calls captured in graphs of 20
# buffers: symmetric, of the communicator
#
`), out.String())

	for most, want := range map[int]string{65536: "up to 65536 bytes, beyond that nccl is faster", -1: "for none of these sizes, over which nccl is faster"} {
		out.Reset()
		result.HandOver = &most
		printHeader(&out, []bench.Result{result}, true)
		assert.Contains(t, out.String(), "# peer memory: "+want+"\n")
	}
	result.HandOver = nil

	out.Reset()
	result.Graph, result.Symmetric, result.Locations = false, false, nil
	printHeader(&out, []bench.Result{result}, true)
	assert.True(t, strings.HasPrefix(out.String(), "# allreduce over 2 ranks, backend nccl\n#\n#  "), out.String())
}
