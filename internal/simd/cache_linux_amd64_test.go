package simd

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCache asks the kernel, which may count otherwise where a hypervisor hides a part of
// what the processor tells.
func TestCache(t *testing.T) {
	files, err := filepath.Glob("/sys/devices/system/cpu/cpu0/cache/index*/size")
	require.NoError(t, err)
	if len(files) == 0 || Cache == 0 {
		t.Skip("kernel or processor tells of no caches")
	}
	largest := 0
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		kibibytes, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(string(text)), "K"))
		require.NoError(t, err, name)
		largest = max(largest, kibibytes<<10)
	}
	require.GreaterOrEqual(t, Cache, largest/16, "the kernel says %d", largest)
	require.LessOrEqual(t, Cache, largest*16, "the kernel says %d", largest)
}
