package local

import "sort"

const (
	// inlineTraffic is the number of bytes read and written up to which a
	// collective is done by the last rank to arrive: handing a part of it to
	// another core would take longer.
	inlineTraffic = 64 << 10
	// spinningInlineTraffic is that among ranks that spin. They take chunks at once, and the last one would wait
	// for lines from the caches of all others.
	spinningInlineTraffic = 16 << 10
	// leastChunkTraffic is what is worth taking by one of these.
	leastChunkTraffic = 8 << 10
	// chunkTraffic is the number of bytes read and written by one chunk: small
	// enough to balance the load and to stay in a core's cache, large enough
	// that claiming it costs nothing.
	chunkTraffic = 512 << 10
	// streamBytes is the size of the output, of all ranks together, from which
	// on stores bypass the caches: the size of a large last-level cache, which has
	// to hold the inputs as well.
	streamBytes = 24 << 20
	// maxChunks is what a claim can count.
	maxChunks = 1<<16 - 1
	// blockBytes is what chunks are a multiple of, so that their borders
	// fall on pairs of cache lines if the buffers do.
	blockBytes = 128
)

// Up to smallBytes allreduces go through cells. Two ranks take less for longer ones through the ring, where the result
// is copied by nobody, and so do up to eight ranks. More of them wait for each other at its counters.
const (
	pairSmallBytes = 128
	fewSmallBytes  = 8 << 10
	fewRanks       = 8
	manySmallBytes = 32 << 10
	// threadedSmallBytes is the same for ranks without a processor each: they make their results one after the other.
	threadedSmallBytes = 64
)

// smallBytes returns how long the allreduces are that go through cells, at most.
func smallBytes(ranks int, spins bool) int {
	switch {
	case !spins:
		return threadedSmallBytes
	case ranks <= 2:
		return pairSmallBytes
	case ranks <= fewRanks:
		return fewSmallBytes
	}
	return manySmallBytes
}

// wholeTraffic bounds the bytes that a rank reads in vain where each makes the whole result of a small collective:
// bytes·(P-2) more than where each makes a part. Beyond, handing parts over takes less; see small.go.
const wholeTraffic = 3 << 10

// partLooks is how often a rank looks for the others' parts of a result in all, before it makes those that are missing:
// once for each line that it would read if it made all of them.
func partLooks(ranks, bytes int) int { return (ranks - 1) * bytes / lineBytes }

// ownedBytes is how much of long data in a cell is fetched for the next small collective.
const ownedBytes = lineBytes

// partLength returns how many bytes of a small result each rank makes, 0 where each makes all of it.
func partLength(ranks, bytes int) int {
	if bytes*(ranks-2) <= wholeTraffic {
		return 0
	}
	lines := (bytes + lineBytes - 1) / lineBytes
	return (lines + ranks - 1) / ranks * lineBytes
}

// planBytes is the size of a plan.
const planBytes = 48 + sliceBytes

// plan is how the work of a collective is cut. Work is a sequence of rows, one
// after the other: elements that share their sources and destinations. Chunks
// cut the whole sequence into equal parts.
type plan struct {
	size      int   // bytes per element
	row       int   // elements per row, where all are equal
	total     int   // elements
	step      int   // elements per chunk
	chunks    int   // at most maxChunks
	uneven    bool  // rows have different lengths
	streaming bool  // stores bypass the caches
	ends      []int // ends of the rows, if these are uneven; of the world, which runs one collective at a time
}

// unevenRows starts a list of rows of different lengths, in memory for their ends.
func (p *plan) unevenRows(memory []int) {
	p.uneven = true
	p.total = 0
	p.ends = memory[:0]
}

func (p *plan) addRows(lengths []int) {
	for _, l := range lengths {
		p.total += l
		p.ends = append(p.ends, p.total)
	}
}

// inlineLimit returns the traffic up to which the last rank to arrive does a collective.
func inlineLimit(workers int, spins bool) int {
	switch {
	case workers == 1:
		return chunkTraffic
	case spins:
		return spinningInlineTraffic
	}
	return inlineTraffic
}

// cut chooses the chunks, of whole blocks of elements, for rows with that many sources and destinations. One rank does
// what is within the inline limit.
func (p *plan) cut(sources, destinations, block, workers, inline int) {
	bytes := p.total * p.size
	p.streaming = bytes*destinations >= streamBytes
	traffic := bytes * (sources + destinations)
	p.step = p.total
	p.chunks = 1
	if p.total == 0 {
		p.chunks = 0
	}
	if traffic <= inline {
		return
	}
	chunks := (traffic + chunkTraffic - 1) / chunkTraffic
	chunks = (chunks + workers - 1) / workers * workers // nobody waits for the last one
	chunks = min(chunks, maxChunks, traffic/leastChunkTraffic)
	p.step = (p.total + chunks - 1) / chunks
	p.step = (p.step + block - 1) / block * block
	p.chunks = (p.total + p.step - 1) / p.step
}

// locate returns the row that an element of the whole sequence lies in, and
// where that row starts and ends.
func (p *plan) locate(index int) (row, start, end int) {
	if !p.uneven {
		row = index / p.row
		return row, row * p.row, (row + 1) * p.row
	}
	row = sort.SearchInts(p.ends, index+1)
	if row > 0 {
		start = p.ends[row-1]
	}
	return row, start, p.ends[row]
}
