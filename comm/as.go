package comm

// As finds the first communicator in c's chain of decorators that is a T, as errors.As does
// for errors. A decorator has a method Unwrap() Communicator ([Wrapped]).
func As[T any](c Communicator) (T, bool) {
	for c != nil {
		if t, ok := c.(T); ok {
			return t, true
		}
		u, ok := c.(interface{ Unwrap() Communicator })
		if !ok {
			break
		}
		c = u.Unwrap()
	}
	var zero T
	return zero, false
}

// FixedOrder reports whether the reductions of c follow the order contract of [Communicator]: those of a
// communicator that has no method FixedOrder() bool do. Of nccl.Comm and of native collectives of comm/mpi it
// is false, and of comm/p2p unless all reductions go over peer memory.
func FixedOrder(c Communicator) bool {
	o, ok := As[interface{ FixedOrder() bool }](c)
	return !ok || o.FixedOrder()
}
