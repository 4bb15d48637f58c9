package schedule_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
)

// restless is a wire on which something always moves.
type restless struct{ *wire }

func (restless) Looks(bool) bool { return true }
func (restless) Moved() bool     { return true }

// A wait hears that a rank is gone while other messages of its communicator move.
func TestLostRankBesideTraffic(t *testing.T) {
	n := newNetwork(2)
	c := n.joinBy(0, restless{n.wires[0]})
	n.lose(1, errors.New("cable cut"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := c.Barrier(ctx)
	assert.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.ErrorContains(t, err, "rank 1 is gone: cable cut")
	assert.NoError(t, ctx.Err())
	assert.NoError(t, c.Close())
}
