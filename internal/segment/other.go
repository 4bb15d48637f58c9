//go:build !linux

package segment

import (
	"context"
	"errors"
)

var errNotLinux = errors.New("memory is shared on Linux only")

// Machine returns an error.
func Machine() (uint64, error) { return 0, errNotLinux }

// Probe returns an error.
func Probe() error { return errNotLinux }

// Server is none.
type Server struct{}

// NewServer returns an error.
func NewServer() (*Server, error) { return nil, errNotLinux }

// Key returns nothing.
func (*Server) Key() (k Key) { return k }

// Offer returns an error.
func (*Server) Offer(uint64, int) ([]byte, error) { return nil, errNotLinux }

// Withdraw does nothing.
func (*Server) Withdraw(uint64) {}

// Close does nothing.
func (*Server) Close() {}

// Join returns an error.
func Join(context.Context, Key, uint64, int) ([]byte, error) { return nil, errNotLinux }

// Unmap does nothing.
func Unmap([]byte) {}

func (Bell) sleep() {}
func (Bell) wake()  {}
