package local_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// TestMismatch lets the last rank call something else than the others.
func TestMismatch(t *testing.T) {
	type caller func(c comm.Communicator, buf uintptr) error
	P := func(c comm.Communicator) int { return c.WorldSize() }
	ones := func(n, v int) []int {
		s := make([]int, n)
		for i := range s {
			s[i] = v
		}
		return s
	}
	displs := func(n int) []int {
		s := make([]int, n)
		for i := range s {
			s[i] = 8 * i
		}
		return s
	}
	const far = 1 << 12
	allReduce := func(c comm.Communicator, b uintptr) error { return c.AllReduce(b, b, 4, dtype.I32, comm.Sum) }
	allGatherV := func(n int) caller {
		return func(c comm.Communicator, b uintptr) error {
			return c.AllGatherV(b, b+far, ones(P(c), n), displs(P(c)), dtype.I32)
		}
	}
	allToAllV := func(s, r int) caller {
		return func(c comm.Communicator, b uintptr) error {
			send, recv := ones(P(c), s), ones(P(c), r)
			send[c.Rank()], recv[c.Rank()] = 1, 1
			return c.AllToAllV(b, send, displs(P(c)), b+far, recv, displs(P(c)), dtype.I32)
		}
	}
	for name, tc := range map[string]struct {
		most, last caller
		says       []string
	}{
		"count": {allReduce, func(c comm.Communicator, b uintptr) error {
			return c.AllReduce(b, b, 5, dtype.I32, comm.Sum)
		}, []string{"allreduce of 4 i32, sum", "allreduce of 5 i32, sum"}},
		"type": {allReduce, func(c comm.Communicator, b uintptr) error {
			return c.AllReduce(b, b, 4, dtype.F32, comm.Sum)
		}, []string{"4 i32", "4 f32"}},
		"op": {allReduce, func(c comm.Communicator, b uintptr) error {
			return c.AllReduce(b, b, 4, dtype.I32, comm.Max)
		}, []string{"sum", "max"}},
		"collective": {allReduce, func(c comm.Communicator, b uintptr) error {
			return c.Broadcast(b, 4, dtype.I32, 0)
		}, []string{"allreduce", "broadcast"}},
		"barrier": {allReduce, func(c comm.Communicator, b uintptr) error {
			return c.Barrier(context.Background())
		}, []string{"allreduce", "barrier"}},
		"split": {func(c comm.Communicator, b uintptr) error {
			return c.Barrier(context.Background())
		}, func(c comm.Communicator, b uintptr) error {
			_, err := c.Split(context.Background(), 0, 0)
			return err
		}, []string{"barrier", "split"}},
		"root": {func(c comm.Communicator, b uintptr) error { return c.Broadcast(b, 4, dtype.I32, 0) },
			func(c comm.Communicator, b uintptr) error { return c.Broadcast(b, 4, dtype.I32, 1) },
			[]string{"root 0", "root 1"}},
		"counts of allgatherv": {allGatherV(3), allGatherV(4), []string{"counts[0] = 3", "passed 4"}},
		"matrix of alltoallv":  {allToAllV(3, 3), allToAllV(3, 2), []string{"sends 3 elements", "receives 2"}},
		"type of alltoallv": {allToAllV(3, 3), func(c comm.Communicator, b uintptr) error {
			z := ones(P(c), 0)
			return c.AllToAllV(b, z, z, b+far, z, z, dtype.F16)
		}, []string{"alltoallv of i32", "alltoallv of f16"}},
	} {
		for _, ranks := range []int{2, 3, 8} {
			t.Run(fmt.Sprintf("%s/ranks=%d", name, ranks), func(t *testing.T) {
				ctx := within(t)
				data, addr := perRank(newMemory(t), ranks, 2*far/4, rankPlusOne)
				comms := world(t, ranks)
				errs := onAll(comms, func(c comm.Communicator) error {
					call := tc.most
					if c.Rank() == ranks-1 {
						call = tc.last
					}
					if err := call(c, addr[c.Rank()]); err != nil {
						return err
					}
					return c.Sync(ctx)
				})
				for r, err := range errs {
					require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", r)
					var op *comm.OpError
					require.ErrorAs(t, err, &op)
					assert.Equal(t, r, op.Rank)
					assert.Contains(t, err.Error(), fmt.Sprintf("rank %d", ranks-1))
					assert.Contains(t, err.Error(), "(collective #1)")
					for _, text := range tc.says {
						assert.Contains(t, err.Error(), text)
					}
					for _, v := range data[r] {
						require.Equal(t, int32(r+1), v, "memory of rank %d was touched", r)
					}
				}
				requireBroken(t, comms, addr, comm.ErrMismatch)
			})
		}
	}
}

// requireBroken checks that every later call says so, with the cause.
func requireBroken(t *testing.T, comms []comm.Communicator, addr []uintptr, cause error) {
	t.Helper()
	for r, c := range comms {
		for _, err := range []error{
			c.AllReduce(addr[r], addr[r], 1, dtype.I32, comm.Sum),
			c.Send(addr[r], 1, dtype.I32, 0, 0),
			c.Sync(context.Background()),
			c.Barrier(context.Background()),
			c.Group(),
		} {
			require.ErrorIs(t, err, comm.ErrBroken, "rank %d", r)
			require.ErrorIs(t, err, cause, "rank %d", r)
		}
	}
}

// TestMessageMismatch sends another length or type than is received.
func TestMessageMismatch(t *testing.T) {
	for name, tc := range map[string]struct {
		n  int
		dt dtype.DType
	}{"shorter": {3, dtype.I32}, "longer": {5, dtype.I32}, "type": {4, dtype.F32}} {
		t.Run(name, func(t *testing.T) {
			ctx := within(t)
			data, addr := perRank(newMemory(t), 2, 5, rankPlusOne)
			comms := world(t, 2)
			errs := onAll(comms, func(c comm.Communicator) error {
				if c.Rank() == 0 {
					return errors.Join(c.Send(addr[0], tc.n, tc.dt, 1, 9), c.Sync(ctx))
				}
				return errors.Join(c.Recv(addr[1], 4, dtype.I32, 0, 9), c.Sync(ctx))
			})
			for _, err := range errs {
				require.ErrorIs(t, err, comm.ErrMismatch)
				assert.Contains(t, err.Error(), fmt.Sprintf("rank 0 called send of %d %v to rank 1, tag 9; rank 1 called recv of 4 i32 from rank 0, tag 9", tc.n, tc.dt))
			}
			require.Equal(t, []int32{2, 2, 2, 2, 2}, data[1])
			requireBroken(t, comms, addr, comm.ErrMismatch)
		})
	}
}
