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

// Server does not exist on this system.
type Server struct{}

// Serve returns an error.
func Serve(int) (*Server, []byte, error) {
	return nil, nil, errNotLinux
}

// Offer returns the zero Offer.
func (*Server) Offer() (o Offer) { return o }

// Close does nothing.
func (*Server) Close() {}

// Join returns an error.
func Join(context.Context, Offer, int) ([]byte, error) {
	return nil, errNotLinux
}

// Unmap does nothing.
func Unmap([]byte) {}

func (Bell) sleep() {}
func (Bell) wake()  {}
