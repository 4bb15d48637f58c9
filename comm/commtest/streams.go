package commtest

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

var streamCases = []testCase{
	{name: "streams: ordered by events alone", body: orderedByEvents},
	{name: "streams: the host waits for the communicator", body: syncStream},
}

// streamSync returns the stream operations, if the communicator has them: on
// all ranks or on none.
func (p *probe) streamSync() (comm.StreamSyncOps, bool) {
	s, ok := comm.As[comm.StreamSyncOps](p.c)
	have := byte(0)
	if ok {
		have = 1
	}
	for r, got := range p.exchange(p.c, []byte{have}) {
		if got[0] != have {
			p.errorf("rank %d differs on whether there are streams", r)
			return nil, false
		}
	}
	if !ok {
		p.skipped = "the communicator has no stream"
	}
	return s, ok
}

// orderedByEvents goes through the life of an event as StreamSyncOps describes
// it: the runtime's stream produces, the communicator's reduces, the runtime's
// copies the result, and the host waits for nothing but the last copy.
func orderedByEvents(p *probe) {
	s, ok := p.streamSync()
	if !ok {
		return
	}
	const n = 1 << 18
	dt := p.sumType()
	bytes := n * dt.Size()
	source := [2]uintptr{
		p.alloc(numbers(dt, n, p.rank)),
		p.alloc(numbers(dt, n, p.rank+1)),
	}
	buf := p.alloc(make([]byte, bytes))
	result := p.alloc(make([]byte, bytes))
	ready, err := s.CreateEvent()
	p.must(err)
	reduced, err := s.CreateEvent()
	p.must(err)
	compute := p.rt.ComputeStream()
	for i := range p.rounds(10) {
		p.must(p.rt.Copy(buf, source[i%2], bytes))
		p.must(s.RecordOnStream(ready, compute))
		p.must(s.CommStreamWaitEvent(ready))
		p.must(p.c.AllReduce(buf, buf, n, dt, comm.Sum))
		p.must(s.RecordOnCommStream(reduced))
		p.must(s.StreamWaitEvent(compute, reduced))
		p.must(p.rt.Copy(result, buf, bytes))
		sum := p.ranksSum() + i%2*p.size
		if err := diff(p.read(result, bytes), numbers(dt, n, sum), dt); err != nil {
			p.errorf("round %d: %w", i, err)
		}
	}
	p.must(s.DestroyEvent(ready))
	p.must(s.DestroyEvent(reduced))
	p.must(p.c.Sync(p.ctx))
}

// syncStream waits with SyncCommStream instead of Sync.
func syncStream(p *probe) {
	s, ok := p.streamSync()
	if !ok {
		return
	}
	b := p.batch(p.c)
	addAllGather(b, plain("allgather", "before SyncCommStream", 20000, dtype.U8))
	b.submit()
	p.must(s.SyncCommStream())
	b.verify()
	p.must(p.c.Sync(p.ctx))
}
