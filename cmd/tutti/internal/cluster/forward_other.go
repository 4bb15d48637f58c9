//go:build !linux

package cluster

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

type forwarder struct{}

func newForwarder(Config) (*forwarder, error) {
	return nil, fmt.Errorf("%w: it is Linux that has network namespaces", comm.ErrUnavailable)
}

func (*forwarder) run()           {}
func (*forwarder) report() string { return "" }
