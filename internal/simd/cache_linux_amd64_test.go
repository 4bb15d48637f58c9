package simd

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCache compares with the kernel. On AMD processors the kernel uses another source if a hypervisor hides the
// leaf's extension, and the two may differ.
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
	info, err := os.ReadFile("/proc/cpuinfo")
	require.NoError(t, err)
	if text := string(info); strings.Contains(text, "AuthenticAMD") && !strings.Contains(text, " topoext ") {
		require.Positive(t, Cache)
		return
	}
	require.Equal(t, largest, Cache)
}
