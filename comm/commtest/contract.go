package commtest

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/reference"
)

// The order contract of [comm.Communicator]: an element of a reduction is one number, wherever it stands, however
// calls are cut and grouped, and whenever ranks come. The cases of each reduction try all types, counts and
// placements; those here try what these leave out.
var contractCases = []testCase{
	{name: "order: declared", body: orderDeclared},
	{name: "order: numbers of any size", body: roughNumbers, needs: fixedOrder},
	{name: "order: in parts and in groups", body: partsOfSums, needs: fixedOrder},
	{name: "order: ranks come at any time", body: sumsAtAnyTime, needs: fixedOrder, minRanks: 2},
}

// fixedOrder is needed by cases that compare bits with those of the order contract.
var fixedOrder = need{
	lacks:  func(b Backend) bool { return b.NoFixedOrder },
	reason: "declares that it adds in another order",
}

// inputs are the inputs of reductions, with what comes of them.
type inputs struct {
	period  func(dt dtype.DType, op comm.ReduceOp, rank, size int) []byte
	results sync.Map // *reference.Ordered by result
}

// result is the key of what comes of inputs.
type result struct {
	dt   dtype.DType
	op   comm.ReduceOp
	size int
}

var (
	ordinary = &inputs{period: reference.Input}
	rough    = &inputs{period: reference.Rough}
)

// result returns what a reduction of all ranks' inputs gives by the order contract. The ranks of a process share it.
func (in *inputs) result(dt dtype.DType, op comm.ReduceOp, size int) *reference.Ordered {
	key := result{dt, op, size}
	if known, ok := in.results.Load(key); ok {
		return known.(*reference.Ordered)
	}
	ranks := make([][]byte, size)
	for r := range ranks {
		ranks[r] = in.period(dt, op, r, size)
	}
	known, _ := in.results.LoadOrStore(key, reference.NewOrdered(dt, op, ranks...))
	return known.(*reference.Ordered)
}

// orderDeclared checks that the communicator, and a sub-communicator, say whether they keep the contract.
func orderDeclared(p *probe) {
	child := p.split(0, p.rank)
	for _, c := range []comm.Communicator{p.c, child} {
		if got := comm.FixedOrder(c); got == p.NoFixedOrder {
			p.errorf("FixedOrder is %v, and Backend.NoFixedOrder %v", got, p.NoFixedOrder)
		}
	}
	p.must(child.Close())
}

// roughNumbers reduces infinities, subnormal numbers, and numbers so far apart that each order gives another sum.
func roughNumbers(p *probe) {
	for _, r := range allReductions {
		for _, dt := range dtype.All() {
			b := p.batch(p.c)
			for i, op := range reductions.All() {
				if !p.reduces(dt, op) {
					continue
				}
				l := label{
					call:  r.name,
					dt:    dt,
					op:    op,
					root:  noRoot,
					count: reference.Period,
				}
				if r.rooted {
					l.root = (i + int(dt)) % p.size
				}
				r.exchange(b, l, p.reductionData(dt, op, rough))
			}
			b.run()
		}
	}
}

// orderTypes are those of sums that are cut and repeated.
var orderTypes = []dtype.DType{dtype.F32, dtype.F64, dtype.F16, dtype.BF16}

// contractSeed seeds cuts and delays.
const contractSeed = 11

// partsOfSums has an allreduce of many elements made in parts that begin anywhere, one by one and as a group.
func partsOfSums(p *probe) {
	const count = 20000
	random := rand.New(rand.NewPCG(contractSeed, 0)) // the same on all ranks
	for _, dt := range orderTypes {
		if !p.reduces(dt, comm.Sum) {
			continue
		}
		in := p.reductionData(dt, comm.Sum, rough)
		for _, variant := range []string{"in parts", "in parts, as a group"} {
			l := label{
				call:    "allreduce",
				dt:      dt,
				op:      comm.Sum,
				root:    noRoot,
				count:   count,
				variant: variant,
			}
			b := p.batch(p.c)
			send := b.input(l, in.elements(count))
			recv := b.buffer(l, nil, count*dt.Size(), in.check(0), true)
			calls := make([]comm.Call, 0, 8)
			for begin := 0; begin < count; {
				n := min(1+random.IntN(6000), count-begin)
				offset := uintptr(begin * dt.Size())
				calls = append(calls, comm.AllReduceCall(send+offset, recv+offset, n, dt, comm.Sum))
				begin += n
			}
			if variant == "in parts" {
				for _, call := range calls {
					b.call(l, call)
				}
			} else {
				b.call(l, slices.Clone(calls)...)
			}
			b.run()
		}
	}
}

// sumsAtAnyTime has ranks yield the processor many times before they call, another number on each rank.
func sumsAtAnyTime(p *probe) {
	const rounds = 12
	delays := rand.New(rand.NewPCG(contractSeed, uint64(p.rank)+1))
	for round := range rounds {
		b := p.batch(p.c)
		for _, r := range allReductions {
			dt := orderTypes[round%len(orderTypes)]
			if !p.reduces(dt, comm.Sum) {
				continue
			}
			l := label{
				call:  r.name,
				dt:    dt,
				op:    comm.Sum,
				root:  noRoot,
				count: []int{1, 64, 5000}[round%3],
			}
			if r.rooted {
				l.root = round % p.size
			}
			r.exchange(b, l, p.reductionData(dt, comm.Sum, rough))
		}
		b.p.awaitCopies()
		for _, s := range b.steps {
			for range delays.IntN(300) {
				runtime.Gosched()
			}
			p.must(s.submit(p.c))
		}
		b.steps = nil
		p.must(p.c.Sync(p.ctx))
		b.verify()
	}
}
