package distributed

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
)

// SamplerConfig says how a [Sampler] shares samples. All ranks use the same.
//
// If the samples cannot be shared equally, ranks that lack one repeat a sample from the beginning of the epoch's order,
// as with PyTorch's DistributedSampler. So all ranks have the same number, and every sample is used. Uneven turns this
// off.
type SamplerConfig struct {
	// Seed of the order, which differs in every epoch.
	Seed uint64
	// InOrder disables shuffling.
	InOrder bool
	// Uneven uses every sample once: the first ranks have one more than the others. It is for evaluation, and for
	// training with Join of package ddp.
	Uneven bool
}

// Sampler assigns the samples of a data set to ranks. A rank gets every WorldSize-th sample of an order that all ranks
// derive from the seed and the epoch. It does not communicate and keeps nothing between epochs, so a resumed run gets
// the same samples for the same epoch.
type Sampler struct {
	rank, size, n int           // this rank, their number, and the number of samples
	cfg           SamplerConfig // as it was passed
}

// NewSampler shares n samples among the ranks of c.
//
// A negative n is [comm.ErrArgument].
func NewSampler(c comm.Communicator, n int, cfg SamplerConfig) (*Sampler, error) {
	const op = "sampler"
	if err := base.CheckComm(c); err != nil {
		return nil, base.OpError(op, err)
	}
	if n < 0 {
		return nil, base.OpError(op, fmt.Errorf("%w: %d samples", comm.ErrArgument, n))
	}
	return &Sampler{
		rank: c.Rank(),
		size: c.WorldSize(),
		n:    n,
		cfg:  cfg,
	}, nil
}

// Len returns how many samples this rank has in an epoch.
func (s *Sampler) Len() int {
	if s.cfg.Uneven {
		return (s.n + s.size - 1 - s.rank) / s.size
	}
	return (s.n + s.size - 1) / s.size
}

// Epoch returns the numbers of this rank's samples in an epoch, in [0, n).
func (s *Sampler) Epoch(epoch int) []int {
	order := make([]int, s.n)
	for i := range order {
		order[i] = i
	}
	if !s.cfg.InOrder {
		rng := rand.New(rand.NewPCG(s.cfg.Seed, uint64(epoch)))
		rng.Shuffle(s.n, func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	samples := make([]int, s.Len())
	for i := range samples {
		samples[i] = order[(s.rank+i*s.size)%s.n]
	}
	return samples
}

// Batches returns the samples of [Sampler.Epoch] in batches of size samples, which
// is at least 1. The last batch may be shorter; leave it out if all batches
// must have one size.
//
// The batches of all ranks together are those of one rank with size*WorldSize samples a batch, so the same training on
// more ranks sees the same batches. The composition of a rank's batch depends on the number of ranks. For batches that
// do not depend on it (Reproducible of package ddp), all ranks make the Sampler with a communicator of one rank, such
// as package noop's, and each takes its share of these batches.
func (s *Sampler) Batches(epoch, size int) [][]int {
	return slices.Collect(slices.Chunk(s.Epoch(epoch), size))
}
