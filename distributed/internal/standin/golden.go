package standin

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"hash"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/runtime"
)

var update = flag.Bool("update", false, "record the hashes of all steps anew")

// Extended makes tests take longer, and leave nothing out.
var Extended = os.Getenv("TUTTI_EXTENDED") != ""

// Golden compares lines of a name and a hash with the recorded ones in a file. Their inputs come from floating-point
// code whose operations other processors may fuse. An empty line is one of a case that was left out.
func Golden(t *testing.T, file string, got []string) {
	t.Helper()
	if *update {
		text := strings.Join(got, "\n") + "\n"
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	}
	recorded, err := os.ReadFile(file)
	require.NoError(t, err)
	want := strings.Split(strings.TrimSuffix(string(recorded), "\n"), "\n")
	assert.Equal(t, len(want), len(got), "lines")
	for i := range min(len(got), len(want)) {
		if got[i] != "" && got[i] != want[i] {
			assert.Equal(t, want[i], got[i])
		}
	}
}

// Sampled reports whether an ordinary run has case i of a recorded file: one in three, where -update and TUTTI_EXTENDED
// have all.
func Sampled(i int) bool { return *update || Extended || i%3 == 0 }

// hashes are the hashes of each rank's data after its steps.
type hashes []hash.Hash

// NewHashes returns empty hashes.
func NewHashes(ranks int) hashes {
	all := make(hashes, ranks)
	for r := range all {
		all[r] = sha256.New()
	}
	return all
}

// Line returns a line with the hashes of all ranks.
func (h hashes) Line(name string) string {
	all := sha256.New()
	for _, one := range h {
		all.Write(one.Sum(nil))
	}
	return fmt.Sprintf("%s %x", name, all.Sum(nil)[:8])
}

// AddTensor adds the bits of a tensor.
func AddTensor(h hash.Hash, rt runtime.Runtime, t *runtime.Tensor) error {
	raw := make([]byte, t.Bytes())
	err := rt.CopyOut(raw, Pointer(t))
	h.Write(raw)
	return err
}
