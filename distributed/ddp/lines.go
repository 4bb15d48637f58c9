package ddp

import (
	"context"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed"
)

// lines are the communicators of a mesh.
type lines struct {
	mesh  *distributed.Mesh       // nil: there is none
	outer *metered.Communicator   // of the first dimension, between hosts; without a mesh, of all ranks
	inner []*metered.Communicator // the fastest dimension first
	all   []*metered.Communicator // these, and the one of all ranks
	// shared: without a mesh, all ranks share memory, and a collective takes little beside its passes over memory.
	shared bool
}

// newLines makes the mesh of g's communicator, if it is configured; without, there is the communicator alone.
func (g *Gradients) newLines(ctx context.Context) (l lines, err error) {
	if g.cfg.Mesh == nil {
		sharer, ok := comm.As[interface{ SharesMemory() bool }](g.meter)
		return lines{
			outer:  g.meter,
			all:    []*metered.Communicator{g.meter},
			shared: ok && sharer.SharesMemory(),
		}, nil
	}
	if l.mesh, err = g.cfg.Mesh(ctx, g.meter); err != nil {
		return l, err
	}
	l.all = append(l.all, g.meter)
	ranks := 1
	for i, d := range slices.Backward(l.mesh.Dims()) {
		c, err := l.mesh.Comm(d.Name)
		if err != nil {
			return l, err
		}
		m := metered.New(c)
		ranks *= d.Size
		if i == 0 {
			l.outer = m
		} else {
			l.inner = append(l.inner, m)
		}
		l.all = append(l.all, m)
	}
	if ranks != g.meter.WorldSize() {
		return l, fmt.Errorf("%w: the mesh %v has world size %d, the communicator has %d",
			comm.ErrArgument, l.mesh.Dims(), ranks, g.meter.WorldSize())
	}
	return l, nil
}

// close closes what newLines made.
func (l *lines) close() error {
	if l.mesh == nil {
		return nil
	}
	return l.mesh.Close()
}

// share returns how many elements of a bucket this rank has between the hosts, padding included.
func (l *lines) share(n int) int {
	for _, c := range l.inner {
		n = (n + c.WorldSize() - 1) / c.WorldSize()
	}
	return n
}

// ranks is the number of ranks within a host.
func (l *lines) ranks() int {
	n := 1
	for _, c := range l.inner {
		n *= c.WorldSize()
	}
	return n
}
