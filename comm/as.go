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
