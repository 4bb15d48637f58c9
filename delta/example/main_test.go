package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestExample runs it, with a small network.
func TestExample(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		if c.Rank() == 0 {
			return train(ctx, rt, c, 64, 2, 1e-4)
		}
		return serve(ctx, rt, c, 64)
	}))
}

// ordinal is the place of a bf16 in the order of all.
func ordinal(b uint16) int {
	if b >= 1<<15 {
		return -int(b-1<<15) - 1
	}
	return int(b)
}

// entropy returns the bits of positions and differences by their frequencies, and how many have changed.
func entropy(old, new []byte) (bits float64, changed int) {
	counts := map[int]int{}
	for i := 0; i < len(old); i += 2 {
		if d := ordinal(binary.LittleEndian.Uint16(new[i:])) - ordinal(binary.LittleEndian.Uint16(old[i:])); d != 0 {
			counts[d]++
			changed++
		}
	}
	m, n := float64(changed), float64(len(old)/2)
	bits = n*math.Log2(n) - m*math.Log2(m) - (n-m)*math.Log2(n-m)
	for _, k := range counts {
		bits += float64(k) * math.Log2(m/float64(k))
	}
	return bits, changed
}

// zstd returns the length of what zstd -3 makes of data.
func zstd(t *testing.T, data []byte) int {
	cmd := exec.Command("zstd", "-3", "-c")
	cmd.Stdin = bytes.NewReader(data)
	out, err := cmd.Output()
	require.NoError(t, err)
	return len(out)
}

// TestMeasure trains at several learning rates, and compares the deltas of versions with the entropy of what has changed. With
// TUTTI_EXTENDED set it has 2.4 million weights, and compares with zstd; the figures are in lab/results/delta.
func TestMeasure(t *testing.T) {
	extended := os.Getenv("TUTTI_EXTENDED") != ""
	hidden, least, limit := 1024, 0.02, 1.06 // in short deltas, some tens of bytes are much
	if extended {
		hidden, least, limit = 32768, 0.001, 1.03
	}
	first, err := newNetwork(hidden)
	require.NoError(t, err)
	first.train(100, 1e-3)
	for _, rate := range []float64{1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3} {
		n := *first
		n.weights, n.mean, n.square = slices.Clone(n.weights), slices.Clone(n.mean), slices.Clone(n.square)
		n.train(8, rate) // and no longer at the rate before
		for _, steps := range []int{4, 12} {
			old := n.bf16()
			n.train(steps, rate)
			new := n.bf16()
			tensor := func(b []byte) []delta.Tensor {
				return []delta.Tensor{{Name: "network", DType: dtype.BF16, Shape: []int{len(b) / 2}, Memory: delta.Host(b)}}
			}
			p := delta.NewPublisher(nil, nil)
			require.NoError(t, p.Commit(t.Context(), 1, tensor(old)))
			require.NoError(t, p.Commit(t.Context(), 2, tensor(new)))
			d, err := delta.Diff(t.Context(), tensor(old), tensor(new), nil)
			require.NoError(t, err)
			s, small := p.Stat(), d.Stat()
			bits, changed := entropy(old, new)
			require.Equal(t, uint64(changed), s.Changed)
			line := fmt.Sprintf("rate %.0e, %2d steps: %6.2f %% changed, %.3f bytes, %.3f of the entropy; Diff: %.3f and %.3f", rate, steps,
				100*float64(changed)/float64(len(old)/2), float64(s.Bytes)/float64(changed), 8*float64(s.Bytes)/bits, float64(small.Bytes)/float64(changed), 8*float64(small.Bytes)/bits)
			assert.LessOrEqual(t, small.Bytes, s.Bytes, line)
			if share := float64(changed) / float64(len(old)/2); share > least {
				assert.Less(t, 8*float64(s.Bytes)/bits, limit, line)
			}
			if extended {
				xor, indices, values := make([]byte, len(old)), []byte(nil), []byte(nil)
				for i := range old {
					xor[i] = old[i] ^ new[i]
					if i%2 == 0 && !bytes.Equal(old[i:i+2], new[i:i+2]) {
						indices, values = binary.LittleEndian.AppendUint32(indices, uint32(i/2)), append(values, new[i:i+2]...)
					}
				}
				x, v := zstd(t, xor), zstd(t, append(indices, values...))
				line += fmt.Sprintf("; zstd -3 of XOR %.3f bytes, of index and value %.3f", float64(x)/float64(changed), float64(v)/float64(changed))
				assert.Less(t, s.Bytes, uint64(min(x, v)), line)
			}
			got := make(delta.Host, len(new))
			require.NoError(t, d.Apply(t.Context(), tensor(old), func(delta.Tensor) (delta.Memory, error) { return got, nil }, nil))
			require.True(t, bytes.Equal(new, got), line)
			t.Log(line)
		}
	}
}
