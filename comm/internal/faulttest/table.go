package faulttest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	goruntime "runtime"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Columns are the columns of the table. The last two are any backend within
// checked.Communicator, and the rendezvous before there is a communicator.
var Columns = []string{"noop", "local", "mpi", "tcp", "nccl", "p2p", Checked, "rendezvous"}

// Checked is the column of any backend within [checked.Communicator].
const Checked = "any, within `Checked`"

// atOnce and late are outcomes.
func atOnce(errs ...error) Outcome { return Outcome{Errors: errs} }
func late(errs ...error) Outcome   { return Outcome{Errors: errs, Late: true} }

// everywhere is a cell in which all ranks get the same outcome.
func everywhere(o Outcome) Cell { return Cell{Others: o, Self: o} }

func (c Cell) noting(note string) Cell {
	c.Note = note
	return c
}

// shown is a cell that a test of the backend covers.
func shown(note string, o Outcome) Cell {
	return Cell{Others: o, Elsewhere: true, Note: note}
}

var (
	ok       = atOnce(nil)
	mismatch = everywhere(atOnce(comm.ErrMismatch))
	// unnoticed is the outcome of calls on a GPU that do not match.
	unnoticed = everywhere(late(comm.ErrTimeout, comm.ErrPeerFailed, nil)).noting("not found: wrong numbers, or a wait")
	inVain    = late(comm.ErrTimeout, comm.ErrPeerFailed)
	silent    = late(comm.ErrPeerFailed)
)

// init gives tcp the cells of mpi, whose schedules it uses, in rows without tcp in which mpi's are shown here.
func init() {
	for _, f := range Table {
		if _, listed := f.Cells["tcp"]; !listed && f.play != nil {
			if c, ok := f.Cells["mpi"]; ok {
				f.Cells["tcp"] = c
			}
		}
	}
}

// rendezvous has the same cell for tcp, whose ranks meet in the same way.
func rendezvous(c Cell) map[string]Cell {
	return map[string]Cell{"rendezvous": c, "tcp": c}
}

// gpu has the same cell for both backends of GPUs.
func gpu(cells map[string]Cell, c Cell) map[string]Cell {
	cells["nccl"] = c
	cells["p2p"] = c
	return cells
}

// disagree is a fault in which the last rank makes another call than the others.
func disagree(name, description string, normal, last func(r Rank) comm.Call, says ...string) Fault {
	return Fault{
		Name: name,
		What: description,
		says: says,
		play: func(p *player) error {
			call := normal(p.Rank)
			if p.odd {
				call = last(p.Rank)
			}
			return p.do(call)
		},
		Cells: gpu(map[string]Cell{"local": mismatch, "mpi": mismatch, Checked: mismatch}, unnoticed),
	}
}

// Table is the fault matrix.
var Table = []Fault{
	disagree("count", "ranks pass other counts", allReduce(512, dtype.F32, comm.Sum), allReduce(1024, dtype.F32, comm.Sum),
		"allreduce of 512 f32", "allreduce of 1024 f32"),
	disagree(
		"dtype",
		"another type of the same size",
		allReduce(16, dtype.F32, comm.Sum),
		allReduce(16, dtype.I32, comm.Sum),
		"16 f32",
		"16 i32",
	),
	disagree("op", "another reduction", allReduce(16, dtype.F32, comm.Sum), allReduce(16, dtype.F32, comm.Max), "sum",
		"max"),
	disagree("root", "another root", broadcast(0), broadcast(1), "root 0", "root 1"),
	disagree("collective", "another collective", allReduce(16, dtype.F32, comm.Sum),
		func(r Rank) comm.Call {
			return comm.AllGatherCall(r.Send, r.Recv, 16, dtype.F32)
		}, "allreduce", "allgather"),
	{
		Name: "order",
		What: "two collectives in the other order",
		says: []string{"allreduce", "broadcast"},
		play: func(p *player) error {
			calls := []comm.Call{
				allReduce(16, dtype.F32, comm.Sum)(p.Rank),
				comm.BroadcastCall(p.Recv+32<<10, 16, dtype.F32, 0),
			}
			if p.odd {
				calls[0], calls[1] = calls[1], calls[0]
			}
			return p.do(calls...)
		},
		Cells: gpu(map[string]Cell{"local": mismatch, "mpi": mismatch, Checked: mismatch}, unnoticed),
	},
	{
		Name:  "length",
		What:  "a message of another length",
		play:  message(4, dtype.F32, 7),
		says:  []string{"4 f32", "5 f32"},
		Cells: messageCells(),
	},
	{
		Name:  "type of a message",
		What:  "the same length, another type",
		play:  message(5, dtype.I32, 7),
		says:  []string{"5 i32", "5 f32"},
		Cells: messageCells(),
	},
	{
		Name: "tag",
		What: "a message of another tag than is received",
		play: message(5, dtype.F32, 8),
		Cells: map[string]Cell{
			"noop":  everywhere(late(comm.ErrTimeout)),
			"local": everywhere(inVain),
			"mpi":   {Others: inVain, Self: late(comm.ErrTimeout, comm.ErrPeerFailed, nil)},
			"nccl":  everywhere(ok).noting("matches by order alone"),
			"p2p":   everywhere(ok).noting("as nccl"),
			Checked: everywhere(late(comm.ErrTimeout, comm.ErrPeerFailed, nil)).
				noting("messages are not compared: as the backend"),
		},
	},

	{
		Name: "missing",
		What: "it never makes the call",
		play: func(p *player) error {
			if p.odd {
				return nil
			}
			return p.do(allReduce(16, dtype.F32, comm.Sum)(p.Rank))
		},
		Cells: map[string]Cell{
			"local": {Others: inVain, Self: ok, Note: "names the call, its number and who has not made it"},
			"mpi":   {Others: inVain, Self: ok, Note: "names the call, its number and who has sent nothing"},
			Checked: {Others: inVain, Self: ok, Note: "after 30 s, or what `checked.New` is told"},
			"nccl": {
				Others: inVain,
				Self:   ok,
				Note:   "names the call, its number and what each other rank is doing",
				says:   "aborted: timed out: ",
			},
			"p2p": {Others: inVain, Self: ok, Note: "names the call and its number"},
		},
	},
	{
		Name: "straggler",
		What: "it makes the call when the others have aborted",
		play: func(p *player) error {
			if p.odd {
				if err := p.Comm.Barrier(p.ctx); err != nil {
					return err
				}
				return p.do(allReduce(16, dtype.F32, comm.Sum)(p.Rank))
			}
			err := p.do(allReduce(16, dtype.F32, comm.Sum)(p.Rank))
			return errors.Join(err, p.Comm.Barrier(p.ctx))
		},
		Cells: map[string]Cell{
			"local": lateComer,
			"nccl":  lateComer,
			"mpi": {
				Others: inVain,
				Self:   atOnce(comm.ErrPeerFailed, nil),
				Note:   "with who aborted, and why; success if what the others sent is all that it needs",
			},
			Checked: {Others: inVain, Self: late(comm.ErrTimeout, comm.ErrPeerFailed)},
			"p2p":   {Others: inVain, Self: late(comm.ErrTimeout, comm.ErrPeerFailed, nil)},
		},
	},
	{
		Name: "timed out",
		What: "its own wait passes a deadline",
		play: func(p *player) error {
			ctx, cancel := context.WithTimeout(p.ctx, deadline)
			defer cancel()
			if p.odd {
				return errors.Join(p.c.Barrier(ctx), p.Comm.Barrier(p.ctx))
			}
			if err := p.Comm.Barrier(p.ctx); err != nil {
				return err
			}
			ctx, cancel = context.WithTimeout(p.ctx, p.wait)
			defer cancel()
			return p.c.Barrier(ctx)
		},
		Cells: map[string]Cell{
			"local": {Others: atOnce(comm.ErrPeerFailed), Self: late(comm.ErrTimeout)},
			"mpi":   {Others: atOnce(comm.ErrPeerFailed), Self: late(comm.ErrTimeout)},
			"nccl":  {Others: atOnce(comm.ErrPeerFailed), Self: late(comm.ErrTimeout), says: "aborted: timed out"},
			"p2p": {
				Others: late(comm.ErrTimeout, comm.ErrPeerFailed, nil),
				Self:   late(comm.ErrTimeout),
				Note:   "success if what it sent before is all that the others need",
			},
			Checked: {Others: late(comm.ErrTimeout, comm.ErrPeerFailed, nil), Self: late(comm.ErrTimeout)},
		},
	},
	{
		Name: "canceled",
		What: "its context is canceled",
		play: func(p *player) error {
			if !p.odd {
				return p.do(allReduce(16, dtype.F32, comm.Sum)(p.Rank))
			}
			ctx, cancel := context.WithCancelCause(p.ctx)
			cancel(errCause)
			err := p.c.Recv(p.Recv, 4, dtype.F32, 0, 9) // rank 0 sends nothing
			if err == nil {
				err = p.c.Sync(ctx)
			}
			if !errors.Is(err, errCause) {
				return fmt.Errorf("%v does not have the cause", err)
			}
			return err
		},
		Cells: aborts(
			Cell{
				Others: atOnce(comm.ErrPeerFailed),
				Self:   atOnce(comm.ErrCanceled),
				Note:   "both with the context's cause",
				says:   errCause.Error(),
			},
			Cell{Others: late(comm.ErrTimeout, comm.ErrPeerFailed), Self: atOnce(comm.ErrCanceled)},
			atOnce(comm.ErrCanceled),
		),
	},
	{
		Name: "closed",
		What: "it closes its communicator",
		play: gives(func(p *player) error { return p.c.Close() }),
		Cells: leavesBut(
			Cell{
				Others: atOnce(comm.ErrPeerFailed),
				Self:   ok,
				Note:   "\"rank 2 closed its communicator\"",
				says:   "rank 2 closed its communicator",
			},
			Cell{Others: late(comm.ErrTimeout, comm.ErrPeerFailed), Self: ok},
			ok,
		),
	},
	{
		Name: "error",
		What: "its body in `comm.Run` returns one",
		play: gives(run(func() error { return errCause })),
		Cells: aborts(
			Cell{
				Others: atOnce(comm.ErrPeerFailed),
				Self:   ok,
				Note:   "with its text",
				says:   errCause.Error(),
			},
			Cell{
				Others: late(comm.ErrTimeout, comm.ErrPeerFailed),
				Self:   ok,
				Note:   "ranks of one process: `ErrCanceled` at once",
			},
			ok,
		),
	},
	{
		Name: "panic",
		What: "its body in `comm.Run` panics",
		play: gives(run(func() error { panic(errCause) })),
		Cells: aborts(
			Cell{
				Others: atOnce(comm.ErrPeerFailed),
				Self:   ok,
				Note:   "with its text; `Run` returns a `*PanicError` with the stack",
				says:   errCause.Error(),
			},
			Cell{
				Others: late(comm.ErrTimeout, comm.ErrPeerFailed),
				Self:   ok,
				Note:   "ranks of one process: `ErrCanceled` at once",
			},
			ok,
		),
	},
	{
		Name: "Goexit",
		What: "its body in `comm.Run` ends the goroutine",
		play: gives(run(func() error {
			goruntime.Goexit()
			return nil
		})),
		Cells: aborts(Cell{Others: atOnce(comm.ErrPeerFailed), Self: ok},
			Cell{
				Others: late(comm.ErrTimeout, comm.ErrPeerFailed),
				Self:   ok,
				Note:   "ranks of one process: `ErrCanceled` at once",
			}, ok),
	},
	{
		Name: "dead",
		What: "its process is killed",
		Cells: gpu(
			map[string]Cell{
				"mpi": shown(
					"unless the launcher ends the job first, as it normally does",
					late(comm.ErrTimeout, comm.ErrPeerFailed),
				),
				"tcp": shown("its connections are closed", atOnce(comm.ErrPeerFailed)),
			},
			lost,
		),
	},
	{
		Name: "exit",
		What: "its process ends without finalizing",
		Cells: gpu(
			map[string]Cell{
				"mpi": shown(
					"unless the launcher ends the job first",
					late(comm.ErrTimeout, comm.ErrPeerFailed),
				),
				"tcp": shown("its connections are closed", atOnce(comm.ErrPeerFailed)),
			},
			lost,
		),
	},
	{
		Name: "stopped",
		What: "its process gets `SIGSTOP`, and goes on later",
		Cells: gpu(
			map[string]Cell{
				"mpi": {Others: inVain, Self: atOnce(comm.ErrPeerFailed, nil), Elsewhere: true},
				"tcp": {
					Others:    silent,
					Self:      atOnce(comm.ErrPeerFailed),
					Elsewhere: true,
					Note:      "when it has been silent for `tcp.Config.Silence`",
				},
			},
			lost,
		),
	},
	{
		Name: "cut off",
		What: "the link to it carries nothing any more",
		Cells: map[string]Cell{"tcp": {
			Others:    silent,
			Self:      silent,
			Elsewhere: true,
			Note:      "when it has been silent for `tcp.Config.Silence`",
		}},
	},

	{
		Name: "two goroutines, two Splits",
		What: "each has its own communicator",
		play: func(p *player) error {
			second, err := p.c.Split(p.ctx, 0, p.Comm.Rank())
			if err != nil {
				return err
			}
			return errors.Join(p.twoGoroutines([]comm.Communicator{p.c, second}), second.Close())
		},
		Cells: gpu(
			map[string]Cell{
				"noop":  everywhere(ok),
				"local": everywhere(ok),
				"mpi":   everywhere(ok),
				Checked: everywhere(ok),
			},
			everywhere(ok),
		),
	},
	{
		Name: "NaN and Inf",
		What: "in what it contributes to a sum",
		play: notANumber,
		Cells: gpu(
			map[string]Cell{
				"noop":  everywhere(ok),
				"local": everywhere(ok),
				"mpi":   everywhere(ok),
				Checked: everywhere(ok),
			},
			everywhere(ok),
		),
	},
	{
		Name: "out of memory",
		What: "the runtime has no more, of the host or the GPU",
		play: func(p *player) error {
			buf, err := p.Runtime.Allocate(math.MaxInt >> 16)
			if err == nil {
				err = p.Runtime.Deallocate(buf)
			}
			return err
		},
		Cells: gpu(
			map[string]Cell{
				"noop":  exhausted,
				"local": exhausted,
				"mpi":   exhausted,
				Checked: exhausted,
			},
			exhausted,
		),
	},
	{
		Name:  "no library",
		What:  "it is not there, another one, too old, or lacks a function",
		Cells: map[string]Cell{"mpi": noLibrary, "nccl": noLibrary},
	},
	{
		Name:  "another launcher",
		What:  "an MPI program under the launcher of another MPI",
		Cells: map[string]Cell{"mpi": shown("", atOnce(comm.ErrUnavailable))},
	},

	{
		Name:  "stranger",
		What:  "someone without the job's secret connects",
		Cells: rendezvous(shown("refused and logged, and delays nobody", Outcome{})),
	},
	{
		Name:  "garbage",
		What:  "someone sends what is no greeting",
		Cells: rendezvous(shown("refused and logged, and delays nobody", Outcome{})),
	},
	{
		Name:  "silence",
		What:  "someone connects and says nothing",
		Cells: rendezvous(shown("delays nobody", Outcome{})),
	},
	{
		Name:  "slow sender",
		What:  "someone sends a greeting byte by byte",
		Cells: map[string]Cell{"tcp": shown("refused after 10 s, or when all ranks have come; delays nobody", Outcome{})},
	},
	{
		Name: "crowd",
		What: "10,000 connections at once",
		Cells: map[string]Cell{"tcp": shown(
			"one of the busiest address gives way: 256 and 96 for each rank stay; delays nobody",
			Outcome{},
		)},
	},
	{
		Name:  "replay",
		What:  "someone says again what a rank has said",
		Cells: map[string]Cell{"tcp": shown("refused and logged, and delays nobody", Outcome{})},
	},
	{
		Name:  "half-open",
		What:  "a rank vanishes while it connects, and its process is started again",
		Cells: map[string]Cell{"tcp": shown("the new one takes its place", Outcome{})},
	},
	{
		Name:  "another version",
		What:  "a rank of the job speaks another version",
		Cells: map[string]Cell{"tcp": shown("refused and logged", late(comm.ErrTimeout))},
	},
	{
		Name:  "missing at the rendezvous",
		What:  "a rank does not come",
		Cells: rendezvous(shown("names the ranks that did not come", late(comm.ErrTimeout))),
	},
}

var (
	lateComer = Cell{
		Others: inVain,
		Self:   atOnce(comm.ErrPeerFailed),
		Note:   "with who aborted, and why",
		says:   "aborted",
	}
	exhausted = everywhere(atOnce(runtime.ErrOutOfMemory)).noting("nothing is aborted")
	lost      = shown("the GPU's work is aborted", late(comm.ErrTimeout, comm.ErrPeerFailed))
	noLibrary = shown(
		"lists what was tried and why not, or what is missing; everything else works",
		atOnce(comm.ErrUnavailable),
	)
	errCause = errors.New("changed my mind")
	errAside = errors.New("has no part in the fault")
)

// leavesBut returns the cells of a rank that leaves: host backends tell the others.
func leavesBut(told, waited Cell, self Outcome) map[string]Cell {
	return gpu(
		map[string]Cell{
			"noop":  everywhere(self),
			"local": told,
			"mpi":   told,
			Checked: {Others: late(comm.ErrTimeout, comm.ErrPeerFailed), Self: self},
		},
		waited,
	)
}

// aborts returns the cells of a rank that aborts, which NCCL's ranks tell as well.
func aborts(told, waited Cell, self Outcome) map[string]Cell {
	cells := leavesBut(told, waited, self)
	cells["nccl"] = told
	return cells
}

// messageCells returns the cells of a message that differs from its receive.
func messageCells() map[string]Cell {
	return gpu(
		map[string]Cell{
			"noop":  mismatch,
			"local": {Others: atOnce(comm.ErrMismatch), Self: atOnce(comm.ErrMismatch, comm.ErrPeerFailed)},
			"mpi": {
				Others: atOnce(comm.ErrMismatch),
				Self:   atOnce(comm.ErrMismatch, nil),
				Note:   "the sender may be done before it can be told",
			},
			Checked: everywhere(late(comm.ErrMismatch, comm.ErrPeerFailed, comm.ErrTimeout, nil)).
				noting("messages are not compared: as the backend"),
		},
		unnoticed,
	)
}

func allReduce(n int, dt dtype.DType, op comm.ReduceOp) func(Rank) comm.Call {
	return func(r Rank) comm.Call {
		return comm.AllReduceCall(r.Send, r.Recv, n, dt, op)
	}
}

func broadcast(root int) func(Rank) comm.Call {
	return func(r Rank) comm.Call {
		return comm.BroadcastCall(r.Recv, 16, dtype.F32, root)
	}
}

// do makes calls and waits for them. A rank that completes before the others' disagreement is known learns of it from
// the barrier.
func (p *player) do(calls ...comm.Call) error {
	ctx, cancel := context.WithTimeout(p.ctx, p.wait)
	defer cancel()
	for _, c := range calls {
		if err := c.Make(p.c); err != nil {
			return err
		}
	}
	if err := p.c.Sync(ctx); err != nil || p.last == 0 {
		return err
	}
	if calls[0].Op.Message() {
		return nil
	}
	return p.c.Barrier(ctx)
}

// message makes the odd rank send to rank 0, which receives 5 f32 with tag 7.
func message(n int, dt dtype.DType, tag uint32) func(p *player) error {
	return func(p *player) error {
		send := comm.SendCall(p.Send, n, dt, 0, tag)
		recv := comm.RecvCall(p.Recv, 5, dtype.F32, p.last, 7)
		switch {
		case p.last == 0:
			return p.do(send, recv)
		case p.odd:
			return p.do(send)
		case p.Rank.Comm.Rank() == 0:
			return p.do(recv)
		}
		return errAside
	}
}

// gives makes the odd rank leave while the others wait for it.
func gives(leave func(p *player) error) func(p *player) error {
	return func(p *player) error {
		if p.odd {
			return leave(p)
		}
		return p.do(allReduce(16, dtype.F32, comm.Sum)(p.Rank))
	}
}

// run leaves in the ways of comm.Run's body.
func run(body func() error) func(p *player) error {
	return func(p *player) error {
		err := comm.Run(p.ctx, []comm.Communicator{p.c}, func(context.Context, comm.Communicator) error {
			return body()
		})
		if err == nil {
			return errors.New("Run returned no error")
		}
		return nil
	}
}

// twoGoroutines exchanges in rounds with the next rank, in a goroutine for each
// communicator.
func (p *player) twoGoroutines(comms []comm.Communicator) error {
	const rounds, bytes = 50, 256
	ctx, cancel := context.WithTimeout(p.ctx, p.wait)
	defer cancel()
	size := p.last + 1
	errs := make([]error, len(comms))
	var wg sync.WaitGroup
	for g, c := range comms {
		wg.Go(func() {
			offset := uintptr(g) * bytes
			for range rounds {
				err := c.Group(comm.SendCall(p.Send+offset, bytes, dtype.U8, (c.Rank()+1)%size, uint32(g)),
					comm.RecvCall(p.Recv+offset, bytes, dtype.U8, (c.Rank()+size-1)%size, uint32(g)))
				if err == nil {
					err = c.Sync(ctx)
				}
				if err != nil {
					errs[g] = err
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// notANumber sums values with a NaN and infinities in places.
func notANumber(p *player) error {
	values := []float32{1, 1, 1, 1}
	if p.odd {
		values = []float32{
			float32(math.NaN()),
			float32(math.Inf(1)),
			float32(math.Inf(-1)),
			1,
		}
	}
	var bytes []byte
	for _, v := range values {
		bytes = binary.LittleEndian.AppendUint32(bytes, math.Float32bits(v))
	}
	if err := errors.Join(p.Runtime.CopyIn(p.Send, bytes), p.Runtime.Synchronize(p.ctx)); err != nil {
		return err
	}
	if err := p.do(comm.AllReduceCall(p.Send, p.Recv, len(values), dtype.F32, comm.Sum)); err != nil {
		return err
	}
	if err := p.Runtime.CopyOut(bytes, p.Recv); err != nil {
		return err
	}
	var got [4]float64
	for i := range got {
		got[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*i:])))
	}
	kept := math.IsNaN(got[0]) && math.IsInf(got[1], 1) && math.IsInf(got[2], -1)
	if !kept || got[3] != float64(p.last+1) {
		return fmt.Errorf("the sum is %v", got)
	}
	return p.Runtime.CopyIn(p.Send, make([]byte, len(bytes)))
}
