package delta

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// far is memory that the host is told not to reach.
type far struct{ *cpu.Runtime }

func (far) Device() runtime.Device { return runtime.Device{Kind: runtime.CUDA} }

// upload returns tensors of a runtime with what a model has.
func (m model) upload(t testing.TB, rt runtime.Runtime) (tensors []Tensor) {
	for _, w := range m {
		x, err := runtime.New(rt, w.DType, w.Shape...)
		require.NoError(t, err)
		of, err := Of(w.Name, x)
		require.NoError(t, err)
		_, err = of.Memory.WriteAt(w.Memory.(Host), 0)
		require.True(t, err == nil || x.Bytes() == 0, err)
		tensors = append(tensors, of)
	}
	return tensors
}

// TestDevice publishes from memory of devices to memory of devices: in order, folded, in full, and after attempts
// that fail.
func TestDevice(t *testing.T) {
	devices := map[string]func() (runtime.Runtime, error){"far": func() (runtime.Runtime, error) { return far{cpu.New()}, nil }}
	if n, err := cuda.Count(); err == nil && n > 0 {
		devices["GPU"] = func() (runtime.Runtime, error) { return cuda.Open(0) }
	}
	for name, open := range devices {
		t.Run(name, func(t *testing.T) {
			const seed = 11
			r, ctx := rand.New(rand.NewPCG(seed, 0)), context.Background()
			rt, err := open()
			require.NoError(t, err)
			p := NewPublisher(rt, nil)
			subscriber := func() *Subscriber {
				s, err := NewSubscriber(ctx, rt, nil, Config{})
				require.NoError(t, err)
				return s
			}
			steady, behind, hosted := subscriber(), subscriber(), subscriber()
			hosted.rt = nil
			m := newModel(r, "m")
			if !race.Enabled {
				m = append(m, newTensor(r, "long", dtype.BF16, blockLen+100))
			}
			for v := uint64(1); v <= 6; v++ {
				if share := []float64{0, 0.01, 0.02, 0.5, 0.01, 0.02}[v-1]; v == 5 {
					m = append(newModel(r, "m"), newTensor(r, "other", dtype.F32, 3000))
				} else {
					m = m.train(r, share)
				}
				tensors := m.upload(t, rt)
				require.NoError(t, p.Commit(ctx, v, tensors), "seed %d", seed)
				for _, x := range tensors {
					require.NoError(t, x.Runtime().Free())
				}
				all := []*Subscriber{steady, hosted}
				if v == 1 || v == 3 || v == 4 || v == 6 {
					all = append(all, behind)
				}
				for _, s := range all {
					var b bytes.Buffer
					require.NoError(t, p.WriteSince(ctx, &b, s.parts[0].version))
					message := b.Bytes()
					for at := int64(1); ; at += 1 + r.Int64N(2*at) {
						k := &kill{}
						k.at.Store(at)
						s.parts[0].hook = k.step
						_, err := s.Read(ctx, bytes.NewReader(message))
						s.parts[0].hook = nil
						if err == nil {
							break
						}
						require.ErrorIs(t, err, errKilled, "seed %d", seed)
						require.Less(t, s.parts[0].version, v)
					}
					shows(t, s, v, m)
				}
			}
			for _, s := range []*Subscriber{steady, behind, hosted} {
				s.Close()
			}
			p.Close()
			require.NoError(t, rt.Close()) // which finds leaks
		})
	}
}

// BenchmarkDevice publishes and applies versions of 1 GiB of bf16 on a GPU, of which 1 % changes.
func BenchmarkDevice(b *testing.B) {
	const n, piece, tensors, seed = 1 << 25, 1 << 20, 16, 12
	if n, err := cuda.Count(); err != nil || n == 0 {
		b.Skip("needs a GPU")
	}
	rt, err := cuda.Open(0)
	require.NoError(b, err)
	defer rt.Close() //nolint:errcheck // leaks are this function's
	r, ctx := rand.New(rand.NewPCG(seed, 0)), context.Background()
	old, new := moved(r, piece, 0.01, lastPlace(r))
	var versions [2][]Tensor
	for v, data := range [][]byte{old, new} {
		for i := range tensors {
			x, err := runtime.New(rt, dtype.BF16, n)
			require.NoError(b, err)
			at, err := x.Ptr()
			require.NoError(b, err)
			for range n / piece {
				require.NoError(b, rt.CopyIn(at, data))
				at += uintptr(len(hostmem.Bytes(data)))
			}
			of, err := Of(fmt.Sprint(i), x)
			require.NoError(b, err)
			versions[v] = append(versions[v], of)
		}
	}
	p := NewPublisher(rt, nil)
	s, err := NewSubscriber(ctx, rt, nil, Config{})
	require.NoError(b, err)
	v := uint64(0)
	var commit, read time.Duration
	update := func() {
		v++
		start := time.Now()
		require.NoError(b, p.Commit(ctx, v, versions[v%2]))
		commit += time.Since(start)
		message, w := io.Pipe()
		go func() {
			_, err := p.log[len(p.log)-1].WriteTo(w)
			w.CloseWithError(err)
		}()
		start = time.Now()
		_, err := s.Read(ctx, message)
		require.NoError(b, err)
		read += time.Since(start)
	}
	update()
	update()
	commit, read = 0, 0
	for b.Loop() {
		update()
	}
	b.ReportMetric(float64(commit.Milliseconds())/float64(b.N), "commit-ms")
	b.ReportMetric(float64(read.Milliseconds())/float64(b.N), "read-ms")
	s.Close()
	p.Close()
}
