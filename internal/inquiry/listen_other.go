//go:build !unix

package inquiry

// listen does nothing: there is no such signal.
func listen() {}
