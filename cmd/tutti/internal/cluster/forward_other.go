//go:build !linux

package cluster

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

type forwarders []struct{}

func forward(Config) (forwarders, error) {
	return nil, fmt.Errorf("%w: network namespaces need Linux", comm.ErrUnavailable)
}

func (forwarders) report() string { return "" }
