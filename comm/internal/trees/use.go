package trees

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
)

// operations is the number of operations in a use: a sum, a message, and a collective that moves data.
const operations = 3

// usage is a rank's use of one communicator in a step.
type usage struct {
	node  *node                      // of the communicator
	comm  comm.Communicator          // of this rank
	calls []func(base uintptr) error // to be made, with the address of the memory
}

// submit starts the operations in memory from base on.
func (u *usage) submit(base uintptr) error {
	for _, call := range u.calls {
		if err := call(base); err != nil {
			return err
		}
	}
	return nil
}

// String names a rank of the communicator, for errors.
func (u *usage) String() string {
	return fmt.Sprintf("%s of ranks %v, rank %d", u.node.name, u.node.ranks, u.comm.Rank())
}

func (u *usage) add(call func(base uintptr) error) {
	u.calls = append(u.calls, call)
}

// planner plans the operations of one communicator in a step. All its ranks choose the same.
type planner struct {
	*worker
	*usage
	image  *image     // memory that is planned
	random *rand.Rand // the same on all ranks
	keys   []int      // distinguish this use from all others
}

// plan plans operations of a communicator, in their own order.
func (w *worker) plan(m *image, n *node, c comm.Communicator, serial int) *usage {
	random := rand.New(rand.NewPCG(w.Seed, uint64(w.number)<<48|uint64(serial)))
	p := planner{
		w,
		&usage{node: n, comm: c},
		m,
		random,
		[]int{int(w.Seed), w.number, serial},
	}
	moves := []func(){p.broadcast, p.allGather, p.allToAll}
	all := []func(){p.sum, p.message, moves[random.IntN(len(moves))]}
	random.Shuffle(len(all), func(i, k int) {
		all[i], all[k] = all[k], all[i]
	})
	for _, add := range all {
		add()
	}
	return p.usage
}

// lengths are the lengths of data in bytes.
var lengths = []int{0, 1, 8, 100, 100, 1000, 1000, 3000, 9000, 40_000}

// length chooses one, rarely a long one.
func (p planner) length() int {
	n := lengths[p.random.IntN(len(lengths))]
	if n > 3000 && p.random.IntN(4) > 0 {
		n /= 100
	}
	return n
}

// data is the data of one rank for another one, or for all. Ranks are those of the communicator.
func (p planner) data(n, from, to int) []byte {
	source := p.node.ranks[from]
	return reference.Payload(n, append(slices.Clone(p.keys), source, to)...)
}

// allRanks stands for the ranks of a communicator.
const allRanks = -1

// input adds a part that does not change, output one that gets its content.
func (p planner) input(call string, content []byte) int {
	return p.image.add(p.usage, "input of "+call, content, content)
}

func (p planner) output(call string, content []byte) int {
	return p.image.add(p.usage, call, nil, content)
}

// sum adds an allreduce.
func (p planner) sum() {
	const highest = 15
	n := p.length() / 4
	dt := p.Sum
	total := make([]float64, n)
	send := make([]float64, n)
	for rank := range p.node.ranks {
		for i, b := range p.data(n, rank, allRanks) {
			v := float64(b & highest)
			total[i] += v
			if rank == p.comm.Rank() {
				send[i] = v
			}
		}
	}
	from := p.input("allreduce", reference.Encode(dt, send...))
	to := p.output("allreduce", reference.Encode(dt, total...))
	p.add(func(base uintptr) error {
		return p.comm.AllReduce(
			base+uintptr(from),
			base+uintptr(to),
			n,
			dt,
			comm.Sum,
		)
	})
}

// message adds messages around the ring, with tags that other communicators have as well.
func (p planner) message() {
	size := len(p.node.ranks)
	rank := p.comm.Rank()
	distance := p.random.IntN(size)
	n := p.length()
	tag := []uint32{0, 1, 7, math.MaxUint32}[p.random.IntN(4)]
	dest := (rank + distance) % size
	source := (rank + size - distance) % size
	from := p.input("send", p.data(n, rank, dest))
	to := p.output("recv", p.data(n, source, rank))
	p.add(func(base uintptr) error {
		return p.comm.Group(comm.SendCall(base+uintptr(from), n, dtype.U8, dest, tag),
			comm.RecvCall(base+uintptr(to), n, dtype.U8, source, tag))
	})
}

func (p planner) broadcast() {
	n := p.length()
	root := p.random.IntN(len(p.node.ranks))
	content := p.data(n, root, allRanks)
	before := content
	if p.comm.Rank() != root {
		before = nil
	}
	buf := p.image.add(p.usage, "broadcast", before, content)
	p.add(func(base uintptr) error {
		return p.comm.Broadcast(base+uintptr(buf), n, dtype.U8, root)
	})
}

func (p planner) allGather() {
	n := p.length()
	var all []byte
	for rank := range p.node.ranks {
		all = append(all, p.data(n, rank, allRanks)...)
	}
	from := p.input("allgather", p.data(n, p.comm.Rank(), allRanks))
	to := p.output("allgather", all)
	p.add(func(base uintptr) error {
		return p.comm.AllGather(base+uintptr(from), base+uintptr(to), n, dtype.U8)
	})
}

func (p planner) allToAll() {
	n := p.length()
	var send, recv []byte
	for rank := range p.node.ranks {
		send = append(send, p.data(n, p.comm.Rank(), rank)...)
		recv = append(recv, p.data(n, rank, p.comm.Rank())...)
	}
	from := p.input("alltoall", send)
	to := p.output("alltoall", recv)
	p.add(func(base uintptr) error {
		return p.comm.AllToAll(base+uintptr(from), base+uintptr(to), n, dtype.U8)
	})
}
