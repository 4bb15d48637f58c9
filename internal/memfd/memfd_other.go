//go:build !linux

package memfd

import "errors"

var errNotLinux = errors.New("memory is shared by file descriptors on Linux only")

// Create returns an error.
func Create(string, int) (int, error) { return 0, errNotLinux }

// Map returns an error.
func Map(int, int) ([]byte, error) { return nil, errNotLinux }

// Close does nothing.
func Close(int) {}

// Unmap does nothing.
func Unmap([]byte) {}
