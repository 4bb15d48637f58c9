// Package attempt makes calls that each need the ones before. The caller checks for an error once, after the last
// call.
package attempt

// Calls are made one after the other until one fails.
type Calls struct{ Err error }

// Do makes a call unless an earlier one has failed.
func (c *Calls) Do(call func() error) {
	if c.Err == nil {
		c.Err = call()
	}
}

// Get is [Calls.Do] for a call with a result. The result is the zero value if the call was not made.
func Get[T any](c *Calls, call func() (T, error)) (v T) {
	if c.Err == nil {
		v, c.Err = call()
	}
	return v
}
