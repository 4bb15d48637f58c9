package bench

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// Config describes a measurement of one collective.
type Config struct {
	Collective Collective // that is measured
	// Backend is the name that results carry.
	Backend string
	// Sizes to measure in bytes, as nccl-tests counts them, see [Sizes].
	Sizes []int
	DType dtype.DType
	Op    comm.ReduceOp
	// Places lists the forms to measure. The collective must have them.
	Places []Place

	Repeats
	// Verify compares every element of a result with a reference.
	Verify bool
	// Graph captures the calls in a graph and measures its replay.
	Graph bool
	// Symmetric says whether buffers are symmetric ([comm.SymmetricAllocator]).
	Symmetric Choice
}

// Choice says whether to use a feature that not all backends have.
type Choice uint8

// The choices. The zero value uses the feature if it is available.
const (
	IfThere Choice = iota
	Always         // fails if the feature is missing
	Never
)

// Place says where a collective puts its result.
type Place string

// The forms of a collective.
const (
	OutOfPlace Place = "out-of-place"
	InPlace    Place = "in-place"
)

// Validate returns an error that names the first invalid setting.
func (c Config) Validate() error {
	if err := c.Repeats.Validate(); err != nil {
		return err
	}
	if c.Collective.Reduces() && !c.Op.Defined(c.DType) {
		return fmt.Errorf("op %v is not defined on dtype %v", c.Op, c.DType)
	}
	return nil
}

// Sizes returns low, low·factor, low·factor², … below high, and high.
func Sizes(low, high, factor int) ([]int, error) {
	switch {
	case low < 1:
		return nil, fmt.Errorf("smallest size %d is not 1 byte or more", low)
	case high < low:
		return nil, fmt.Errorf("largest size %d is below the smallest, %d", high, low)
	case factor < 2:
		return nil, fmt.Errorf("step %d is not a factor of 2 or more", factor)
	}
	sizes := []int{low}
	for size := low; size <= high/factor; {
		size *= factor
		sizes = append(sizes, size)
	}
	if sizes[len(sizes)-1] < high {
		sizes = append(sizes, high)
	}
	return sizes, nil
}
