package jobtest

import (
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// ignoringVariable marks a test binary that ignores signals.
const ignoringVariable = "TUTTI_TEST_IGNORING"

// Processes of tests that nohup has started, or a shell in the background, get signals as usual.
func TestDefaultSignals(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("has no such signals")
	}
	for _, name := range []string{"HUP", "INT"} {
		if os.Getenv(ignoringVariable) == "" {
			cmd := exec.CommandContext(t.Context(), "sh", "-c", `trap "" HUP INT; exec "$0" -test.run '^TestDefaultSignals$'`, os.Args[0])
			cmd.Env = append(os.Environ(), ignoringVariable+"="+name)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			continue
		}
		signalled := func() string {
			out, _ := exec.Command("sh", "-c", "kill -"+name+" $$; echo survived").Output()
			return string(out)
		}
		if name == os.Getenv(ignoringVariable) {
			require.Equal(t, "survived\n", signalled(), name)
			DefaultSignals()
			assert.Empty(t, signalled(), name)
		}
	}
}
