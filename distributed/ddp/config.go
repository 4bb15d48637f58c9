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

// Config configures a [Gradients]. All ranks use the same configuration.
//
// Buckets are plain if neither Reducer nor Mesh is set and the embedded Config is zero, or dense in F32 without
// Momentum, clipping and a NonFinite policy. A step of plain buckets is not a transaction.
type Config struct {
	// BucketBytes is the number of bytes of gradients that are reduced together. The default is 25 MiB, or 1 MiB if the
	// communicator has no streams. A larger tensor is a separate bucket. The first bucket of each type has at most 1 MiB,
	// so that its reduction begins early.
	BucketBytes int
	// Sum adds gradients up instead of averaging them, for programs that divide
	// the loss by the world size: a backend may add faster than it averages. It needs
	// plain buckets, or Reproducible, and excludes Weighted.
	Sum bool
	// Config is the reduction of a bucket, dense by default. ClipNorm bounds the norm of the whole gradient, which is
	// known only when the last gradient is ready: all communication is then in Wait. NonFinite applies to all buckets.
	sparse.Config
	// DenseUpTo, if Config is sparse, is the length up to which one-dimensional gradients, such as biases and the
	// parameters of norms, have separate dense buckets: 65536 by default; with a negative number there are none. A slice
	// that was wrapped without its shape counts as one-dimensional. If all gradients are vectors and DenseUpTo is not set,
	// New returns [comm.ErrArgument], because a sparse Config would have no effect.
	DenseUpTo int
	// Wire is the type in which dense F32 gradients are sent, BF16 or F16, which halves the bytes. Gradients are rounded
	// before the reduction and once after it; the reduction adds in F32 if the backend does. F16 is infinite beyond 65504;
	// BF16 has the range of F32. By default, gradients are sent as they are. Wire needs plain buckets, and excludes
	// BucketViews and Shard.
	Wire dtype.DType
	// BucketViews stores the gradients in the buckets: a backward pass computes them in the tensors that [Gradients.Views]
	// returns, and nothing is copied (gradient_as_bucket_view in PyTorch). Any other tensor passed to Ready is copied as
	// usual. It excludes Wire. If a gradient is left out of a step, or passed as another tensor, its view is overwritten
	// by the average or, in a step that is rolled back, by zeros or the values of that tensor.
	BucketViews bool
	// Reducer, if set, returns the program's [Reducer] of a bucket, such as its own compression. If it returns nil, the
	// bucket is reduced by Config. It excludes Sum, Wire and Shard.
	Reducer func(b Bucket) (Reducer, error)
	// Shard leaves each rank a shard of each bucket's averages ([Gradients.Shards]), by a reduce-scatter. A rank updates
	// its part of the parameters, and keeps the optimizer's state for that part alone (ZeRO-1, Rajbhandari et al., SC
	// 2020). [Shards.Gather] then gathers the parameters. Gradients passed to Ready are not written, except with
	// BucketViews, whose buckets are reduced in place: after Wait they hold the rank's shard of the averages, and all else
	// in them is undefined. Shard needs plain buckets, and excludes Wire.
	Shard bool
	// Mesh, if set, arranges the ranks of a communicator for a hierarchical reduction. Along the inner dimensions, within
	// a host, buckets are reduced densely, by a reduce-scatter and an allgather. Along the first dimension, between hosts,
	// this rank's share of them is reduced as Config and Reducer say. A step is one transaction of all ranks. After an
	// error on some ranks only, [comm.CloseAll] of the communicator ends the waits of the others, also those along the
	// mesh. New and [Gradients.Rebind] call Mesh. Rebind needs the same share, so hosts may only be lost or added as a
	// whole. The mesh is closed with the Gradients. Restore takes the states of ranks with that share, in their order
	// along the first dimension. Mesh excludes Sum, Wire and Shard.
	Mesh func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error)
	// Weighted weights a rank's gradients by their number of samples, which the rank passes to [Gradients.Weigh]: results
	// are means over the samples of all ranks. It costs an allgather of two numbers in each step, for which the host waits
	// before the first bucket is reduced. Clipping, selection, velocities and residuals use the gradient times the rank's
	// weight, divided by the mean weight of the ranks. So do a Reducer and a Mesh, with which an F16 may leave its range.
	// It excludes Sum, and gradients other than F32, F16 and BF16.
	Weighted bool
	// Reproducible, if not 0, makes results bit-identical for any number of ranks and any assignment of microbatches to
	// them (batch-invariant). Results depend on the contributions alone, the gradients of a step's microbatches. Each call
	// of [Gradients.Accumulate], Ready or ReduceAll takes one. Reproducible is the number of contributions to a gradient
	// in a step, over all ranks, and the divisor of the averages. Missing contributions count as zeros. Excess
	// contributions are [comm.ErrArgument] on all ranks, and roll the step back. A rank may have any number of
	// contributions, or none.
	//
	// Each contribution is rounded once, to integers of ReproducibleBits below the largest magnitude that a block of 64
	// elements has in any contribution. The ranks determine that magnitude first, so a rank keeps its contributions until
	// the last one. It needs memory for all of them but one, and an I32 for each element. The sum of integers does not
	// depend on their order, so communicators without a fixed order ([comm.FixedOrder]) work as well. With NoUndo, or if
	// ranks share memory, results are written early, which saves a pass over memory; ranks that share memory then keep a
	// copy of the gradients instead of the I32. A block with a non-finite element becomes NaN, to which NonFinite applies.
	// A result beyond the largest number of its type becomes that number. ClipNorm bounds the norm of the results,
	// whatever ClipGlobal says.
	//
	// A step that is rolled back keeps its contributions: the same calls of Ready, ReduceAll or Wait repeat it. The next
	// step discards them if it begins with [Gradients.Weigh] or Accumulate, of any gradient, or follows a
	// [Gradients.Rebind]. All ranks call Rebind, which accepts the same communicator.
	//
	// Weighted multiplies each contribution by its weight, as F32, before it is rounded to integers; weights are whole
	// numbers of at most 2^24, which add up exactly. Along a Mesh, integers are summed hierarchically. Shard leaves a rank
	// the results of its part; where something looks at the norm of all of them, its ranks sum all integers.
	//
	// It is for F32, F16 and BF16, reduced densely, and excludes Momentum, Values, Wire and Reducer, and Shard with
	// BucketViews. A rank's selection or random rounding would depend on its own data. So would batch normalization over
	// the samples of a rank: a contribution must be a function of its microbatch alone.
	Reproducible int
	// ReproducibleBits is the precision of a contribution, 8 to 30: with n bits, 2^(31-n) - 1 contributions
	// are possible, 127 with 24 bits. 0 is as many as Reproducible allows: 27 for 12 contributions.
	ReproducibleBits int
	// Uneven lets ranks that run out of data sooner than others call
	// [Gradients.Join]. It costs an allgather of two numbers in each step.
	Uneven bool
}

// Stats describes the last step of a [Gradients] on this rank.
type Stats struct {
	Step    int // number of the step, from 0
	Buckets int // number of buckets
	// Patterns has the pattern of each bucket, in the order of [Gradients.Buckets]: the configured one, or the choice of
	// [sparse.Auto]. Do not modify it.
	Patterns []string
	// Skipped reports that a gradient was not finite and [sparse.SkipNonFinite] rolled the step back, in all buckets and
	// on all ranks.
	Skipped bool
	// Weight is the sum of the ranks' weights, with [Config].Weighted.
	Weight float64
	// SentElements and SentBytes count as in [sparse.Stats], with a Mesh along its first dimension.
	SentElements, SentBytes int64
	// LaunchTime is the host's time in Ready. WaitTime is its time in Wait: communication that the backward pass did not
	// hide.
	LaunchTime, WaitTime time.Duration
	// ExchangeTime is the time of the buckets' exchanges on the communication worker. HiddenTime is the part of it that
	// overlapped with the backward pass. Both are 0 without a worker, as with plain buckets.
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
