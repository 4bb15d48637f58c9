package marks

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm/backend"
)

// A mark has half the digits of each number.
func TestAt(t *testing.T) {
	const most = math.MaxUint32
	for _, e := range []struct{ submitted, marked backend.Extent }{
		{backend.Extent{}, backend.Extent{}},
		{backend.Extent{Collectives: 20, Messages: 7}, backend.Extent{Collectives: 16, Messages: 0}},
		{backend.Extent{Collectives: most + 5, Messages: 3<<32 + 1}, backend.Extent{Collectives: most - 3, Messages: 3<<32 - 2}},
		{backend.Extent{Collectives: 7 << 40, Messages: 1}, backend.Extent{Collectives: 7 << 40, Messages: 1}},
	} {
		mark := e.marked.Collectives<<32 | e.marked.Messages&most
		assert.Equal(t, e.marked, extent(e.submitted, mark), "%+v", e)
	}
	assert.Equal(t, backend.Extent{Collectives: 5}, extent(backend.Extent{Collectives: 5}, 6<<32|1), "a mark that is further")
}
