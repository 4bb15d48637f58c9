package ddp

import (
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/caller"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/internal/stages"
	"github.com/tutti-go/tutti/runtime"
)

// step is the step that a [Gradients] makes, from the first Ready until it is committed or rolled back.
// The next one begins with nothing of it.
type step struct {
	begun   bool              // Ready, or another call of a step, has been made
	observe stages.Observer   // of the context of the call that began it, nil: none
	tensors []*runtime.Tensor // nil: not ready
	absent  []bool            // given are zeros instead of what was left out
	folded  []bool            // what was accumulated is in what was given
	next    int               // first bucket that is not launched
	factor  uintptr           // what clips the gradients, and weighs them
	summand uintptr           // factor divided by the number of ranks; 0: gradients are not weighed
	shares  shares            // with Weighted, what is known of the ranks' weights
	weight  float64           // this rank's, as it was announced
	share   float64           // it, divided by those of all ranks
	total   float64           // those of all ranks
	fault   error             // for which Wait rolls it back
	started time.Time         // when it began, the zero time before
	launch  time.Duration     // time in Ready
	before  metered.Traffic   // traffic before the step
}

// bucketStep is a bucket's part of a step.
type bucketStep struct {
	missing int             // gradients that are not ready
	result  resultPhase     // how far it is
	zeros   *runtime.Tensor // instead of a gradient of weight 0; nil: it counts
	failed  error           // of its asynchronous exchange
	took    time.Duration   // it
}

// resultPhase is how far the result of a bucket is.
type resultPhase uint8

const (
	pending resultPhase = iota
	complete
	committed
)

// gradient is what outlives steps of one gradient.
type gradient struct {
	n      int             // elements
	dt     dtype.DType     // their type
	shape  []int           // of the parameter
	vector bool            // it goes to a dense bucket of such
	spare  *runtime.Tensor // zeros in its place; nil: never yet
	sum    sum             // what was accumulated
	held   held            // with Reproducible
}

// sum is what was accumulated of a gradient.
type sum struct {
	tensor      *runtime.Tensor // F32; nil: never
	accumulated bool            // since the last step
	// whole: in the step that was rolled back, the sum was added to the gradient, which stands for all passes.
	whole bool
}

// bucket is a group of gradients that are reduced together.
type bucket struct {
	dt       dtype.DType     // type of its gradients
	wire     dtype.DType     // of what travels
	first    bool            // of its type
	params   []int           // numbers of its gradients, in the order of the bucket
	bytes    int             // of its gradients
	vectors  bool            // of small gradients of one dimension only
	joined   []int           // gradients that are put together
	separate []int           // and those that are reduced where they are
	memory   *comm.Buffer    // of those that are joined, if it is this bucket's
	views    base.Buffer     // of gradients that live here and survive the communicator
	flat     *runtime.Tensor // those that are joined; nil: none are
	cfg      engine.Settings // with its defaults, and what was chosen for Auto
	reducer  reducer         // does its steps
	ready    uintptr         // the event of its gradients, with a side stream
	step     bucketStep      // its part of the step in flight
	asked    caller.Stack    // where the program has handed over the last gradient, if calls are recorded
}

// arrangement is the buckets, and what works on them.
type arrangement struct {
	buckets     []*bucket         // in the order in which they are launched
	bucketOf    []int             // of each gradient: its bucket
	patterns    []string          // of each bucket, as its cfg says
	transaction *transaction      // of all buckets
	async       *worker           // nil: what buckets exchange is exchanged when they are complete
	views       []*runtime.Tensor // with BucketViews: the gradients in the buckets
	shards      *Shards           // nil: without Shard
}

// len returns how many elements a bucket has.
func (b *bucket) len() int { return b.bytes / b.dt.Size() }

// shares reports whether gradients are put together in memory that other buckets
// use as well.
func (b *bucket) shares() bool {
	return b.cfg.Pattern != sparsity.Dense && b.views.Ptr == 0
}

// Shard is this rank's part of a bucket, with [Config].Shard. A bucket is cut into as many equal parts as
// there are ranks, with padding at its end if necessary.
type Shard struct {
	// Tensor holds the averages from Wait until the next Ready. It has the same length on all ranks; padding is 0.
	Tensor *runtime.Tensor
	Parts  []ShardPart
}

// ShardPart is the part of a gradient that a [Shard] holds.
type ShardPart struct {
	Param    int // its number
	From, To int // which of its elements: [From, To)
	Offset   int // of the first one in the shard
}
