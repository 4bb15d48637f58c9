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

// FixedOrder reports whether the reductions of c follow the order contract of [Communicator]. They
// do if c has no method FixedOrder() bool. The result is false for nccl.Comm, for native collectives of
// comm/mpi, and for comm/p2p unless all reductions go over peer memory.
func FixedOrder(c Communicator) bool {
	o, ok := As[interface{ FixedOrder() bool }](c)
	return !ok || o.FixedOrder()
}
