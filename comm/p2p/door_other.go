//go:build !linux

package p2p

import (
	"context"
	"fmt"
	"runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cuda"
)

type door struct{}

func errNoDoor() error {
	return fmt.Errorf("%w: GPU memory is shared on Linux only, this is %s", comm.ErrUnsupported, runtime.GOOS)
}

func openDoor(hello, *cuda.SharedMemory) (*door, error)      { return nil, errNoDoor() }
func (d *door) close() error                                 { return nil }
func fetch(context.Context, hello, func(fd int) error) error { return errNoDoor() }
func hostIdentity() ([16]byte, error)                        { return [16]byte{}, errNoDoor() }
