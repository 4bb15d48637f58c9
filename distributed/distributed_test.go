package distributed_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	_ "github.com/tutti-go/tutti/internal/heaptest"
)

// extended: the tests are to take longer, and leave nothing out.
var extended = os.Getenv("TUTTI_EXTENDED") != ""

// TestLocal runs the suite; with TUTTI_EXTENDED set, also with 2 and 8 ranks, and all of it in a world of 3 and in
// one of 6. With 5 ranks, large tensors and codecs are left to the
// patterns whose exchange has rounds or partitions, with 8 also small ones, and what auto chooses to 5. With -short there
// are three ranks.
func TestLocal(t *testing.T) {
	sizes := []int{1, 3, 5}
	opts := []distributedtest.Option{distributedtest.Cases(func(ranks int, name string) bool {
		pattern, kind, _ := strings.Cut(name, "/")
		long := kind == "Large" || kind == "Values" || kind == "Conservation" && ranks == 8
		rounds := slices.Contains([]string{sparse.Dense, sparse.Gtopk, sparse.TopkSA, sparse.Oktopk}, pattern)
		return ranks <= 3 || ranks == 6 || (rounds || !long) && (ranks < 8 || name != sparse.Auto)
	})}
	if testing.Short() {
		sizes = []int{3}
	}
	if extended {
		distributedtest.Run(t, standin.Backend(t, 2, 8), opts...)
		sizes = []int{3, 6}
		opts = append(opts, distributedtest.Extended())
	}
	distributedtest.Run(t, standin.Backend(t, sizes...), opts...)
}
