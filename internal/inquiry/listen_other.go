//go:build !unix

package inquiry

// listen does nothing: the system has no such signal.
func listen() {}
