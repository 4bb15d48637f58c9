package comm

// Unwrapper is implemented by decorators: communicators that wrap another.
type Unwrapper interface {
	// Unwrap returns the wrapped communicator.
	Unwrap() Communicator
}

// As finds the first communicator in c's chain of decorators that is a T, as
// errors.As does for errors.
func As[T any](c Communicator) (T, bool) {
	for c != nil {
		if t, ok := c.(T); ok {
			return t, true
		}
		u, ok := c.(Unwrapper)
		if !ok {
			break
		}
		c = u.Unwrap()
	}
	var zero T
	return zero, false
}
