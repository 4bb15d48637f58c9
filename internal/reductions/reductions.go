// Package reductions has the element-wise reductions, shared by the host's kernels and package comm. Programs call
// them comm.ReduceOp, comm.Sum and so on.
package reductions

import (
	"fmt"
	"strings"

	"github.com/tutti-go/tutti/dtype"
)

// Op is an element-wise reduction.
type Op uint8

// The reductions. All are commutative. Every backend of this module that reduces on the host combines ranks in rank
// order, so results are reproducible.
const (
	Sum Op = iota
	Prod
	Min
	Max
	// Avg is the sum divided once by the number of ranks; floating point only.
	Avg
	numOps
	// FixedPoint is a sum whose terms travel as integers, see package fixedpoint. Programs do not name it.
	FixedPoint Op = 0xff
)

var names = [numOps]string{"sum", "prod", "min", "max", "avg"}

// Valid reports whether op is one of the five reductions.
func (op Op) Valid() bool { return op < numOps }

// String returns the lower-case name that [Parse] reads.
func (op Op) String() string {
	if op == FixedPoint {
		return "sum in fixed point"
	}
	if !op.Valid() {
		return fmt.Sprintf("ReduceOp(%d)", uint8(op))
	}
	return names[op]
}

// All returns the five reductions.
func All() []Op {
	return []Op{Sum, Prod, Min, Max, Avg}
}

// Defined reports whether the reduction is defined on elements of type d.
//
// Everything is defined on floats and integers except Avg on integers (it would have to round). For Bool, an element
// is true if its byte is not zero, and results are 0 or 1; Sum and Max are "or", Prod and Min are "and".
func (op Op) Defined(d dtype.DType) bool {
	if !op.Valid() || !d.Valid() {
		return false
	}
	return op != Avg || d.IsFloat()
}

// Parse reads a name as String writes it, in any case.
func Parse(s string) (Op, error) {
	for i, name := range names {
		if strings.EqualFold(s, name) {
			return Op(i), nil
		}
	}
	return 0, fmt.Errorf("unknown reduction %q (want sum, prod, min, max or avg)", s)
}
