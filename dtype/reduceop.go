package dtype

import (
	"fmt"
	"strings"
)

// ReduceOp is an element-wise reduction. It is declared here, beside the
// element types it is defined on, so that host kernels and communicators share
// one definition; package comm re-exports it as comm.ReduceOp.
type ReduceOp uint8

// The reductions. All of them are commutative; the order in which ranks are
// combined is rank order on every backend of this module that reduces on the
// host, so their results are reproducible.
const (
	Sum ReduceOp = iota
	Prod
	Min
	Max
	// Avg is the sum divided once by the number of ranks; floating point only.
	Avg
	numOps
)

var opNames = [numOps]string{"sum", "prod", "min", "max", "avg"}

// Valid reports whether op is one of the five reductions.
func (op ReduceOp) Valid() bool { return op < numOps }

// String returns the lower-case name that [ParseReduceOp] reads.
func (op ReduceOp) String() string {
	if !op.Valid() {
		return fmt.Sprintf("ReduceOp(%d)", uint8(op))
	}
	return opNames[op]
}

// ReduceOps returns the five reductions.
func ReduceOps() []ReduceOp {
	return []ReduceOp{Sum, Prod, Min, Max, Avg}
}

// Defined reports whether the reduction is defined on elements of type d.
//
// Everything is defined on floats and integers except Avg on integers (it
// would have to round). On Bool, an element counts as true when its byte is
// not zero, results are 0 or 1, Sum and Max are "or", Prod and Min are "and".
func (op ReduceOp) Defined(d DType) bool {
	if !op.Valid() || !d.Valid() {
		return false
	}
	return op != Avg || d.IsFloat()
}

// ParseReduceOp reads a name as String writes it, in any case.
func ParseReduceOp(s string) (ReduceOp, error) {
	for i, name := range opNames {
		if strings.EqualFold(s, name) {
			return ReduceOp(i), nil
		}
	}
	return 0, fmt.Errorf("dtype: unknown reduce op %q (want sum, prod, min, max or avg)", s)
}
