// Package attempt makes calls of which each needs those before it: an error is looked at
// once, behind the last.
package attempt

// Calls are made one after the other until one fails.
type Calls struct{ Err error }

// Do makes a call, unless one before it has failed.
func (c *Calls) Do(call func() error) {
	if c.Err == nil {
		c.Err = call()
	}
}

// Get is [Calls.Do] for a call with a result, which is the zero value if none was made.
func Get[T any](c *Calls, call func() (T, error)) (v T) {
	if c.Err == nil {
		v, c.Err = call()
	}
	return v
}
