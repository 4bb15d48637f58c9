package distributed_test

import (
	"os"
	"testing"

	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/distributed/internal/standin"
)

// extended: the tests are to take longer, and leave nothing out.
var extended = os.Getenv("TUTTI_EXTENDED") != ""

// TestLocal runs the suite; with TUTTI_EXTENDED set, more of it, in more worlds, and
// in fewer with -short.
func TestLocal(t *testing.T) {
	sizes := []int{1, 2, 3, 5, 8}
	if testing.Short() {
		sizes = []int{1, 2, 3, 5}
	}
	var opts []distributedtest.Option
	if extended {
		sizes = []int{1, 2, 3, 4, 5, 6, 7, 8}
		opts = append(opts, distributedtest.Extended())
	}
	distributedtest.Run(t, standin.Backend(t, sizes...), opts...)
}
