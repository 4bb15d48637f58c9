package comm_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestCheckedConformance(t *testing.T) {
	rt := newRuntime(t)
	commtest.Run(t, commtest.Backend{
		Name:  "checked",
		Sizes: []int{1, 3},
		// A collective waits for the others when it is called, with a timeout
		// of its own instead of Sync's context.
		Synchronous: true,
		Run: decorated(rt, func(c comm.Communicator) (comm.Communicator, error) {
			return comm.NewChecked(c, rt)
		}),
	})
}

// onCheckedRanks runs body on each rank of a checked world and returns what it
// returned, by rank. A rank that fails leaves the others alone.
func onCheckedRanks(t testing.TB, rt *cpu.Runtime, size int, body func(ctx context.Context, c *comm.Checked) error, opts ...comm.CheckedOption) []error {
	errs := make([]error, size)
	require.NoError(t, local.Run(t.Context(), size, func(ctx context.Context, c comm.Communicator) error {
		k, err := comm.NewChecked(c, rt, opts...)
		if err != nil {
			return err
		}
		errs[c.Rank()] = body(ctx, k)
		// Nobody closes before everybody is done.
		if err := c.Barrier(ctx); err != nil {
			return err
		}
		return k.Close()
	}))
	return errs
}

func TestCheckedSaysWhoCalledWhat(t *testing.T) {
	rt := newRuntime(t)
	buf := allocate(t, rt, 1024)
	errs := onCheckedRanks(t, rt, 4, func(ctx context.Context, c *comm.Checked) error {
		if c.Rank() == 2 {
			return c.Barrier(ctx)
		}
		return c.AllReduce(buf, buf, 10+c.Rank()/3, dtype.F32, comm.Sum)
	})
	for r, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", r)
		assert.ErrorContains(t, err, fmt.Sprintf("checked: %s on rank %d: ", []string{"allreduce", "barrier"}[r/2-r/3], r))
		assert.ErrorContains(t, err, "collective number 1: ranks disagree: ranks 0, 1 called allreduce of 10 f32, sum; "+
			"rank 2 called barrier; rank 3 called allreduce of 11 f32, sum")
	}
}

func TestCheckedNamesThePairOfAllToAllV(t *testing.T) {
	rt := newRuntime(t)
	send, recv := allocate(t, rt, 1024), allocate(t, rt, 1024)
	errs := onCheckedRanks(t, rt, 3, func(_ context.Context, c *comm.Checked) error {
		sendCounts, recvCounts, displs := []int{1, 1, 1}, []int{1, 1, 1}, []int{0, 2, 4}
		if c.Rank() == 1 {
			sendCounts[2] = 2
		}
		return c.AllToAllV(send, sendCounts, displs, recv, recvCounts, displs, dtype.I64)
	})
	for r, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", r)
		assert.ErrorContains(t, err, "rank 1 sends 2 elements to rank 2, which receives 1")
	}
}

func TestCheckedTimesOut(t *testing.T) {
	rt := newRuntime(t)
	buf := allocate(t, rt, 64)
	done := make(chan struct{})
	errs := onCheckedRanks(t, rt, 2, func(_ context.Context, c *comm.Checked) error {
		if c.Rank() == 1 {
			<-done // comes only after rank 0 has given up
			return nil
		}
		defer close(done)
		err := c.Broadcast(buf, 1, dtype.F32, 0)
		assert.ErrorIs(t, c.Broadcast(buf, 1, dtype.F32, 0), comm.ErrBroken)
		return err
	}, comm.CheckTimeout(20*time.Millisecond))
	assert.ErrorIs(t, errs[0], comm.ErrTimeout)
	assert.ErrorContains(t, errs[0], "waiting for the other ranks to call broadcast of 1 f32, root 0")
	assert.NoError(t, errs[1])
}

func TestCheckFromEnv(t *testing.T) {
	rt := newRuntime(t)
	bare := noop.New(rt)
	for _, text := range []string{"", "0"} {
		t.Setenv(comm.CheckVariable, text)
		c, err := comm.CheckFromEnv(bare, rt)
		require.NoError(t, err)
		assert.Same(t, bare, c)
	}
	for _, text := range []string{"yes", "-1s", "0s", "2"} {
		t.Setenv(comm.CheckVariable, text)
		_, err := comm.CheckFromEnv(bare, rt)
		assert.ErrorIs(t, err, comm.ErrArgument, text)
		assert.ErrorContains(t, err, text)
	}
	buf := allocate(t, rt, 64)
	for text, limit := range map[string]time.Duration{"1": 0, "20ms": 20 * time.Millisecond} {
		t.Setenv(comm.CheckVariable, text)
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			k, err := comm.CheckFromEnv(c, rt)
			if err != nil {
				return err
			}
			require.IsType(t, &comm.Checked{}, k)
			if limit == 0 {
				err := k.AllReduce(buf, buf, 1+c.Rank(), dtype.F32, comm.Sum)
				assert.ErrorIs(t, err, comm.ErrMismatch)
			} else if c.Rank() == 0 {
				assert.ErrorIs(t, k.AllReduce(buf, buf, 1, dtype.F32, comm.Sum), comm.ErrTimeout)
			}
			return errors.Join(c.Barrier(ctx), k.Close())
		}))
	}
}

// action is one collective, drawn from a few bytes.
type action struct {
	kind, count, root int
	dt                dtype.DType
	op                comm.ReduceOp
}

// normal returns an action without the arguments that its kind does not have,
// so that equal actions are those on which ranks agree.
func (a action) normal() action {
	switch a.kind {
	case 0: // allreduce
		a.root = 0
	case 1: // broadcast
		a.op = 0
	case 2: // allgather
		a.op, a.root = 0, 0
	case 3: // barrier
		a = action{kind: 3}
	}
	return a
}

func (a action) run(ctx context.Context, c comm.Communicator, send, recv uintptr) error {
	switch a.kind {
	case 0:
		return c.AllReduce(send, recv, a.count, a.dt, a.op)
	case 1:
		return c.Broadcast(recv, a.count, a.dt, a.root)
	case 2:
		return c.AllGather(send, recv, a.count, a.dt)
	}
	return c.Barrier(ctx)
}

// script reads what each rank calls: a byte gives the number of ranks, each
// further one an action, which the ranks share but for those that deviate.
func script(data []byte) [][]action {
	next := func() int {
		if len(data) == 0 {
			return 0
		}
		b := data[0]
		data = data[1:]
		return int(b)
	}
	size := 2 + next()%3
	ranks := make([][]action, size)
	draw := func() action {
		b, d := next(), next()
		return action{
			kind: b % 4, count: b / 4 % 5, root: b / 32 % size,
			dt: []dtype.DType{dtype.F32, dtype.I32, dtype.BF16, dtype.U8}[d%4],
			op: []comm.ReduceOp{comm.Sum, comm.Max}[d/4%2],
		}.normal()
	}
	for range 1 + next()%4 {
		common := draw()
		deviant := next()
		for r := range ranks {
			a := common
			if deviant%(2*size) == r {
				a = draw()
			}
			ranks[r] = append(ranks[r], a)
		}
	}
	return ranks
}

// FuzzChecked lets ranks disagree at random: never a hang, always ErrMismatch
// on every rank, at the call where they part, and no error before.
func FuzzChecked(f *testing.F) {
	f.Add([]byte{0})
	f.Add([]byte{1, 2, 4, 0, 9, 8, 4, 9})
	f.Add([]byte{2, 3, 5, 5, 200, 6, 6, 1, 3, 3})
	f.Add([]byte{0, 1, 3, 0, 0, 4, 0})
	f.Add([]byte{1, 0, 8, 1, 2, 8, 2})
	rt := newRuntime(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		ranks := script(data)
		part := 0 // the first call that is not the same everywhere
		for part < len(ranks[0]) && !slices.ContainsFunc(ranks, func(a []action) bool { return a[part] != ranks[0][part] }) {
			part++
		}
		send, recv := make([]uintptr, len(ranks)), make([]uintptr, len(ranks))
		for r := range ranks {
			send[r], recv[r] = allocate(t, rt, 256), allocate(t, rt, 256)
		}
		errs := onCheckedRanks(t, rt, len(ranks), func(ctx context.Context, c *comm.Checked) error {
			r := c.Rank()
			for i, a := range ranks[r] {
				if err := a.run(ctx, c, send[r], recv[r]); err != nil {
					if i != part {
						return fmt.Errorf("call %d instead of %d: %w", i, part, err)
					}
					return err
				}
			}
			return c.Sync(ctx)
		}, comm.CheckTimeout(10*time.Second))
		for r, err := range errs {
			if part == len(ranks[0]) {
				require.NoError(t, err, "rank %d of %v", r, ranks)
				continue
			}
			require.ErrorIs(t, err, comm.ErrMismatch, "rank %d of %v", r, ranks)
			require.NotContains(t, err.Error(), "instead of", "rank %d of %v", r, ranks)
		}
	})
}

// Run ends a Checked as Close does.
func TestRunGivesMemoryOfCheckedBack(t *testing.T) {
	for _, cause := range []error{nil, errors.New("gives up")} {
		rt := cpu.New()
		worlds, err := local.New(2)
		require.NoError(t, err)
		err = comm.Run(t.Context(), worlds, func(ctx context.Context, c comm.Communicator) error {
			k, err := comm.NewChecked(c, rt)
			if err != nil {
				return err
			}
			return comm.Run(ctx, []comm.Communicator{k}, func(context.Context, comm.Communicator) error { return cause })
		})
		assert.ErrorIs(t, err, cause)
		assert.NoError(t, rt.Close())
	}
}
