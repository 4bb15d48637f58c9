package ddp

import (
	"cmp"
	"context"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
)

// The size of a gradient bucket unless set. With streams it is the size that PyTorch's
// DistributedDataParallel has: a bucket is one call, which has to be large to be fast.
// Without, the calls of a bucket are one group, which gains nothing by being
// large, and a small one begins earlier.
const (
	bucketBytes      = 25 << 20
	hostBucketBytes  = 1 << 20
	firstBucketBytes = 1 << 20 // as PyTorch's
	denseUpTo        = 1 << 16 // elements of a gradient of one dimension that is reduced densely
)

// smallBytes is the size up to which a gradient is put together with others on the
// host as well: copying it takes less than another call, some microseconds
// over MPI.
const smallBytes = 16 << 10

// Config says how a [Gradients] works. All ranks use the same.
//
// Buckets are plain where the embedded Config is the zero one, or any other that is dense in F32 without Momentum,
// clipping and a NonFinite policy, and neither Reducer nor Mesh is set. A step of plain buckets is no transaction.
type Config struct {
	// BucketBytes is how many bytes of gradients are reduced together,
	// 25 MiB unless set, or 1 MiB where the communicator has no streams. A larger tensor
	// is a separate bucket. The first bucket of each type has at most 1 MiB, so that
	// its reduction begins early.
	BucketBytes int
	// Sum adds gradients up instead of averaging them, for programs that divide
	// the loss by the world size: a backend may add faster than it averages. It needs
	// plain buckets, or Reproducible, and excludes Weighted.
	Sum bool
	// Config is how a bucket is reduced, dense unless set. ClipNorm bounds the norm
	// of the whole gradient, which is known when the last one is ready: so all
	// communication is in Wait then. NonFinite applies to all buckets.
	sparse.Config
	// DenseUpTo: where Config is sparse, gradients of one dimension with at most this
	// many elements, such as biases and the parameters of norms, have separate dense
	// buckets: 65536 unless set, a negative number for none. A slice that was wrapped without its shape is one, too. Where
	// all are vectors and DenseUpTo is not set, New returns [comm.ErrArgument]: a sparse Config would do nothing.
	DenseUpTo int
	// Wire is the type as which dense F32 gradients travel, BF16 or F16: half the
	// bytes. They are rounded before the reduction, which adds up in F32 where the
	// backend does, and once after it. Beyond 65504 an F16 is infinite; BF16 has the
	// range of F32. Unset, they travel as they are. It needs plain buckets, and excludes BucketViews and Shard.
	Wire dtype.DType
	// BucketViews has the gradients live in the buckets: a backward pass computes them
	// in the tensors that [Gradients.Views] hands out, and nothing is copied
	// (gradient_as_bucket_view in PyTorch). Any other tensor passed to Ready is
	// copied as usual. It excludes Wire. Where a gradient is left out of a step, or passed as
	// another tensor, its view is overwritten: by the average, and in a step that is rolled back by zeros, or by the
	// values of that tensor.
	BucketViews bool
	// Reducer, if set, returns what reduces a bucket instead of Config: a compression of the
	// program. nil leaves a bucket to Config. It excludes Sum, Wire and Shard.
	Reducer func(b Bucket) (Reducer, error)
	// Shard leaves each rank a shard of each bucket's averages ([Gradients.Shards]), by a
	// reduce-scatter: a rank updates its part of the parameters, and keeps the optimizer's state for that
	// part alone (ZeRO-1, Rajbhandari et al., SC 2020). Then [Shards.Gather] puts the parameters
	// together. The gradients that Ready was given are not written, but for those of BucketViews, which are the
	// bucket that is reduced in place: after Wait they hold the rank's shard of the averages, and the rest is undefined.
	// It needs plain buckets, and excludes Wire.
	Shard bool
	// Mesh, if set, arranges the ranks of a communicator: along the inner dimensions, those within a host,
	// buckets are reduced densely, by a reduce-scatter and an allgather, and along the first one, between
	// hosts, this rank's share of them is reduced as Config and Reducer say. A step is one
	// transaction of all ranks. After an error that not all ranks have, [comm.CloseAll] of the communicator
	// ends the waits of the others, also those along the mesh. New calls Mesh, and [Gradients.Rebind] does,
	// which needs the same share: hosts may be lost or added as a whole. The mesh is closed with the
	// Gradients. Restore takes the states of ranks with that share, in their order along the first dimension. It
	// excludes Sum, Wire and Shard.
	Mesh func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error)
	// Weighted has a rank's gradients count with the number of samples that they stand for, which it passes to
	// [Gradients.Weigh]: results are means over the samples of all ranks. It costs an allgather of two numbers in each
	// step, for which the host waits before the first bucket is reduced. What is clipped, selected, or added to a velocity
	// or a residual is a gradient times the rank's weight, divided by the mean weight of the ranks; so is what a Reducer
	// and a Mesh reduce, where an F16 may leave its range. It excludes Sum, and gradients other than F32, F16 and BF16.
	Weighted bool
	// Reproducible, if not 0, makes results the same to the last bit for any number of ranks, whichever rank computes
	// what (batch-invariant). They depend on the contributions alone, the gradients of a step's microbatches, of which
	// [Gradients.Accumulate], Ready and ReduceAll take one each. It is the number of contributions to a gradient in a
	// step, over all ranks, and the divisor of the averages. Missing contributions count as zeros; more are
	// [comm.ErrArgument] on all ranks, and roll the step back. A rank may have any number of them, or none.
	//
	// Each contribution is rounded once, to integers of ReproducibleBits below the largest magnitude that a block of 64
	// elements has in any contribution. The ranks find that first, so a rank keeps its contributions until the last
	// one: it needs memory for all of them but one, and an I32 for each element. The integers have one sum in any
	// order, so communicators without a fixed order ([comm.FixedOrder]) serve as well. With NoUndo, or if ranks share
	// memory, results are written early, which saves a pass over memory; ranks that share memory then keep a copy of
	// the gradients instead of the I32. A block with an element that is not finite is NaN, which NonFinite judges; a
	// result beyond the largest number of its type is that number. ClipNorm bounds the norm of the results, whatever
	// Clip says.
	//
	// A step that is rolled back keeps its contributions: the same calls of Ready, ReduceAll or Wait repeat it. The next
	// step leaves them out if it begins with [Gradients.Weigh] or Accumulate, of any gradient, or follows a
	// [Gradients.Rebind], which all ranks call, also with the same communicator.
	//
	// Weighted multiplies each contribution by its weight, as F32, before it is rounded to integers; weights are whole
	// numbers of at most 2^24, which add up exactly. Along a Mesh, integers are summed hierarchically. Shard leaves a rank
	// the results of its part; where something looks at the norm of all of them, its ranks sum all integers.
	//
	// It is for F32, F16 and BF16, reduced densely, and excludes Momentum, Values, Wire and Reducer, and Shard with
	// BucketViews: what a rank selects, or rounds at random, depends on what it has. So does a batch norm over the samples
	// of a rank: a contribution is to be a function of its microbatch alone.
	Reproducible int
	// ReproducibleBits is the precision of a contribution, 8 to 30: with n bits, 2^(31-n) - 1 contributions
	// are possible, 127 with 24 bits. 0 is as many as Reproducible allows: 27 for 12 contributions.
	ReproducibleBits int
	// Uneven lets ranks that run out of data sooner than others call
	// [Gradients.Join]. It costs an allgather of two numbers in each step.
	Uneven bool
}

// Stats tells what the last step of a [Gradients] did on this rank.
type Stats struct {
	Step    int // number of the step, from 0
	Buckets int
	// Patterns has the pattern of each bucket, in the order of [Gradients.Buckets]: the configured one, or
	// the choice of [sparse.Auto]. It is not to be changed.
	Patterns []string
	// Skipped: a gradient was not finite, and by [sparse.SkipNonFinite] the step was rolled back
	// in all buckets, on all ranks.
	Skipped bool
	// Weight is the sum of the ranks' weights, with [Config].Weighted.
	Weight float64
	// SentElements and SentBytes count as in [sparse.Stats], with a Mesh along its first dimension.
	SentElements, SentBytes int64
	// LaunchTime is the host's time in Ready, WaitTime that in Wait: the
	// communication that the backward pass did not hide.
	LaunchTime, WaitTime time.Duration
	// ExchangeTime is what the exchanges of the buckets took on the communication worker, and HiddenTime the part of it in
	// which the backward pass went on: 0 where there is no worker, as with plain buckets.
	ExchangeTime, HiddenTime time.Duration
}

// withDefaults returns c with the defaults of what is not set, or the error of a field that is out of range. streams:
// the communicator has some.
func (c Config) withDefaults(streams bool) (Config, error) {
	whole := hostBucketBytes
	if streams {
		whole = bucketBytes
	}
	c.BucketBytes = cmp.Or(c.BucketBytes, whole)
	c.DenseUpTo = cmp.Or(c.DenseUpTo, denseUpTo)
	switch {
	case c.BucketBytes < 0:
		return c, base.ConfigError("BucketBytes is %d, want at least 1", c.BucketBytes)
	case c.Wire != dtype.Invalid && c.Wire != dtype.F16 && c.Wire != dtype.BF16:
		return c, base.ConfigError("Wire is %v, want bf16, f16 or none", c.Wire)
	case c.Weighted && c.Sum:
		return c, base.ConfigError("Weighted with Sum, and weights are those of averages")
	case c.BucketViews && c.Wire != dtype.Invalid:
		return c, base.ConfigError("BucketViews with Wire %v, whose gradients are copied", c.Wire)
	}
	return c, nil
}

// checkShard refuses what needs more than a shard of the averages.
func (c *Config) checkShard(transactional bool) error {
	if c.Shard && (transactional || c.Wire != dtype.Invalid) {
		return base.ConfigError("Shard with Wire, or buckets that are sparse, clipped or judged")
	}
	return nil
}
