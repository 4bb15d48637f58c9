package nccl_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/internal/cc"
)

// The library is opened once a process, so each one that does not serve is
// looked at by its own process: this test again, with these variables.
const (
	libraryVariable = "TUTTI_NCCL_LIB"
	wantedVariable  = "TUTTI_TEST_WANTED" // what the error says
)

func TestALibraryThatDoesNotServe(t *testing.T) {
	if wanted := os.Getenv(wantedVariable); wanted != "" {
		checkUnavailable(t, wanted)
		return
	}
	self, err := os.Executable()
	require.NoError(t, err)
	const version = "int ncclGetVersion(int *v) { return *v = %d, 0; }\n"
	for name, c := range map[string]struct{ source, wanted string }{
		"too old":                             {fmt.Sprintf(version, 21703), "2.17.3|2.18"},
		"before the version numbers of today": {fmt.Sprintf(version, 2708), "2.18"},
		"functions missing": {fmt.Sprintf(version, 22803) + "int ncclAllReduce(void) { return 0; }\n",
			"ncclGetUniqueId|more|version 2.28.3, 2.18 or newer"},
		"another library": {"int nccl;\n", "ncclGetVersion|more|unknown"},
		"no library":      {"", "no library|install NCCL|" + libraryVariable},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			library, source := filepath.Join(dir, "absent.so"), filepath.Join(dir, "stub.c")
			if c.source != "" {
				require.NoError(t, os.WriteFile(source, []byte(c.source), 0o600))
				library, err = cc.Build(t, "cc", source, "", "-shared", "-fPIC")
				require.NoError(t, err)
			}
			cmd := exec.Command(self, "-test.run=^TestALibraryThatDoesNotServe$", "-test.v", "-test.timeout=1m")
			cmd.Env = append(os.Environ(), libraryVariable+"="+library, wantedVariable+"="+c.wanted+"|"+filepath.Base(library))
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Contains(t, string(out), "--- PASS")
		})
	}
}

// checkUnavailable checks that the error says what is wrong with the library.
func checkUnavailable(t *testing.T, wanted string) {
	_, _, err := nccl.Version()
	require.ErrorIs(t, err, comm.ErrUnavailable)
	for text := range strings.SplitSeq(wanted, "|") {
		assert.ErrorContains(t, err, text)
	}
}
