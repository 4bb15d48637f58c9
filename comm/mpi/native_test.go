package mpi_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// TestRankNative is one rank of TestNative: every collective through the
// library's own function, out of place and in place.
func TestRankNative(t *testing.T) {
	t.Setenv(env.MPICollectives, "native")
	r := newRank(t)
	c, me, size := r.world, r.world.Rank(), r.world.WorldSize()
	const n = 5
	// Element i of rank q is 100*q + i.
	element := func(q, i int) float32 { return float32(100*q + i) }
	own := func(i int) float32 { return element(me, i) }
	sum := func(i int) float32 {
		total := float32(0)
		for q := range size {
			total += element(q, i)
		}
		return total
	}
	check := func(name string, got []float32, want func(i int) float32) {
		for i, x := range got {
			assert.Equal(t, want(i), x, "%s: element %d", name, i)
		}
	}
	none := func(int) float32 { return -1 }

	t.Run("allreduce", func(t *testing.T) {
		send, _ := r.floats(n, own)
		recv, got := r.floats(n, none)
		buf, inPlace := r.floats(n, own)
		require.NoError(t, c.AllReduce(send, recv, n, dtype.F32, comm.Sum))
		require.NoError(t, c.AllReduce(buf, buf, n, dtype.F32, comm.Max))
		r.sync()
		check("out of place", got, sum)
		check("in place", inPlace, func(i int) float32 { return element(size-1, i) })
	})
	t.Run("reduce", func(t *testing.T) {
		send, _ := r.floats(n, own)
		recv, got := r.floats(n, none)
		require.NoError(t, c.Reduce(send, recv, n, dtype.F32, comm.Sum, 1))
		require.NoError(t, c.Reduce(send, send, n, dtype.F32, comm.Sum, 0))
		r.sync()
		if me == 1 {
			check("root 1", got, sum)
		}
		if me == 0 {
			check("in place at root 0", hostmem.Slice[float32](send, n), sum)
		}
	})
	t.Run("reducescatter", func(t *testing.T) {
		send, _ := r.floats(n*size, own)
		recv, got := r.floats(n, none)
		require.NoError(t, c.ReduceScatter(send, recv, n, dtype.F32, comm.Sum))
		r.sync()
		check("share", got, func(i int) float32 { return sum(me*n + i) })
		err := c.ReduceScatter(send, send+uintptr(me*n*4), n, dtype.F32, comm.Sum)
		assert.ErrorIs(t, err, comm.ErrUnsupported)
	})
	t.Run("broadcast", func(t *testing.T) {
		buf, got := r.floats(n, own)
		require.NoError(t, c.Broadcast(buf, n, dtype.F32, 2))
		r.sync()
		check("root 2", got, func(i int) float32 { return element(2, i) })
	})
	gathered := func(i int) float32 { return element(i/n, i%n) }
	t.Run("allgather", func(t *testing.T) {
		send, _ := r.floats(n, own)
		recv, got := r.floats(n*size, none)
		all, inPlace := r.floats(n*size, func(i int) float32 { return own(i % n) })
		require.NoError(t, c.AllGather(send, recv, n, dtype.F32))
		require.NoError(t, c.AllGather(all+uintptr(me*n*4), all, n, dtype.F32))
		r.sync()
		check("out of place", got, gathered)
		check("in place", inPlace, gathered)
	})
	t.Run("allgatherv", func(t *testing.T) {
		counts, displs := []int{2, 0, 3}, []int{4, 0, 0}
		send, _ := r.floats(n, own)
		recv, got := r.floats(6, none)
		require.NoError(t, c.AllGatherV(send, recv, counts, displs, dtype.F32))
		r.sync()
		check("layout", got, func(i int) float32 {
			return []float32{element(2, 0), element(2, 1), element(2, 2), -1, element(0, 0), element(0, 1)}[i]
		})
	})
	t.Run("alltoall", func(t *testing.T) {
		send, _ := r.floats(n*size, own)
		recv, got := r.floats(n*size, none)
		require.NoError(t, c.AllToAll(send, recv, n, dtype.F32))
		r.sync()
		check("parts", got, func(i int) float32 { return element(i/n, me*n+i%n) })
	})
	t.Run("alltoallv", func(t *testing.T) {
		// Rank q sends q+1 elements to everybody.
		sendCounts, sendDispls := make([]int, size), make([]int, size)
		recvCounts, recvDispls := make([]int, size), make([]int, size)
		total := 0
		for q := range size {
			sendCounts[q], sendDispls[q] = me+1, q*(me+1)
			recvCounts[q], recvDispls[q] = q+1, total
			total += q + 1
		}
		send, _ := r.floats(size*(me+1), own)
		recv, got := r.floats(total, none)
		require.NoError(t, c.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dtype.F32))
		r.sync()
		for q := range size {
			check("parts", got[recvDispls[q]:recvDispls[q]+q+1], func(i int) float32 { return element(q, me*(q+1)+i) })
		}
	})
	t.Run("gather and scatter", func(t *testing.T) {
		send, _ := r.floats(n, own)
		recv, got := r.floats(n*size, none)
		all, parts := r.floats(n*size, gathered)
		back, part := r.floats(n, none)
		require.NoError(t, c.Gather(send, recv, n, dtype.F32, 1))
		require.NoError(t, c.Scatter(all, back, n, dtype.F32, 0))
		r.sync()
		if me == 1 {
			check("gather", got, gathered)
		}
		check("scatter", part, own)
		check("scatter's input", parts, gathered)
	})
	// MPICH 4.0 takes numbers with the highest bit set for negative ones.
	t.Run("unsigned", func(t *testing.T) {
		for _, dt := range []dtype.DType{dtype.U8, dtype.U16, dtype.U32, dtype.U64} {
			for _, reduce := range []comm.ReduceOp{comm.Max, comm.Min} {
				buf, err := r.rt.Allocate(dt.Size())
				require.NoError(t, err)
				highest := hostmem.Slice[byte](buf, dt.Size())
				highest[dt.Size()-1] = byte(50 * (me + 1)) // 50, 100, 150
				require.NoError(t, c.AllReduce(buf, buf, 1, dt, reduce))
				r.sync()
				want := map[comm.ReduceOp]byte{comm.Max: byte(50 * size), comm.Min: 50}[reduce]
				assert.Equal(t, want, highest[dt.Size()-1], "%v of %v", reduce, dt)
				require.NoError(t, r.rt.Deallocate(buf))
			}
		}
	})
	t.Run("bool", func(t *testing.T) {
		buf, err := r.rt.Allocate(2)
		require.NoError(t, err)
		got := hostmem.Slice[byte](buf, 2)
		got[0], got[1] = 0, 0
		if me == 1 {
			got[0] = 1
		}
		require.NoError(t, c.AllReduce(buf, buf, 2, dtype.Bool, comm.Sum))
		r.sync()
		assert.Equal(t, []byte{1, 0}, got)
	})
	t.Run("unsupported", func(t *testing.T) {
		buf, _ := r.floats(n, own)
		assert.ErrorIs(t, c.AllReduce(buf, buf, n, dtype.F32, comm.Avg), comm.ErrUnsupported)
		assert.ErrorIs(t, c.AllReduce(buf, buf, n, dtype.F16, comm.Sum), comm.ErrUnsupported)
	})
	require.NoError(t, c.Barrier(r.ctx))
}
