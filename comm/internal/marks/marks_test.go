package marks

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A mark has half the digits of each number.
func TestAt(t *testing.T) {
	const most = math.MaxUint32
	for _, e := range []struct{ submitted, marked Extent }{
		{Extent{}, Extent{}},
		{Extent{20, 7}, Extent{16, 0}},
		{Extent{most + 5, 3<<32 + 1}, Extent{most - 3, 3<<32 - 2}},
		{Extent{7 << 40, 1}, Extent{7 << 40, 1}},
	} {
		mark := e.marked.Collectives<<32 | e.marked.Messages&most
		assert.Equal(t, e.marked, e.submitted.at(mark), "%+v", e)
	}
	assert.Equal(t, Extent{5, 0}, Extent{5, 0}.at(6<<32|1), "a mark that is further")
}
