//go:build !linux

package p2p

import (
	"context"
	"fmt"
	"runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cuda"
)

type fdServer struct{}

func errNotLinux() error {
	return fmt.Errorf("%w: GPU memory is shared on Linux only, this is %s", comm.ErrUnsupported, runtime.GOOS)
}

func serveMemory(hello, *cuda.SharedMemory) (*fdServer, error) {
	return nil, errNotLinux()
}
func (s *fdServer) close() error { return nil }
func fetch(context.Context, hello, func(fd int) error) error {
	return errNotLinux()
}
func hostIdentity() ([16]byte, error) {
	return [16]byte{}, errNotLinux()
}
