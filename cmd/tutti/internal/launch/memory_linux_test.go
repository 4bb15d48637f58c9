package launch

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/env"
)

// TestMemoryKills: the count comes from the rank's control group, of either version, or otherwise from the machine.
func TestMemoryKills(t *testing.T) {
	const vmstat = "pgfault 10\noom_kill 9\nother 3\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  int
	}{
		"the second version": {map[string]string{"proc/self/cgroup": "0::/job\n",
			"sys/fs/cgroup/job/memory.events": "low 0\noom 4\noom_kill 2\noom_group_kill 0\n"}, 2},
		"the second version, in a container": {map[string]string{"proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.events": "oom 4\noom_kill 3\n"}, 3},
		"the first version": {map[string]string{"proc/self/cgroup": "9:name=systemd:/\n4:memory:/a/b\n0::/\n",
			"sys/fs/cgroup/memory/a/b/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}, 5},
		"a group without a count": {map[string]string{"proc/self/cgroup": "0::/\n"}, 9},
		"damaged":                 {map[string]string{"proc/self/cgroup": "0:\n\n0::/x", "sys/fs/cgroup/x/memory.events": "oom_kill many\n"}, 9},
	} {
		root := t.TempDir()
		c.files["proc/vmstat"] = vmstat
		for file, text := range c.files {
			path := filepath.Join(root, file)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o777))
			require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		}
		assert.Equal(t, c.want, memoryKillsIn(root), name)
	}
	assert.Zero(t, memoryKillsIn(t.TempDir()), "of a system without these files")
}

// limitMemory makes a control group with a memory limit and no swap, and returns its folder. It skips the test if it
// may not.
func limitMemory(t *testing.T, bytes int) string {
	t.Helper()
	for parent, limits := range map[string][]string{
		"/sys/fs/cgroup":        {"memory.swap.max", "memory.max"},
		"/sys/fs/cgroup/memory": {"memory.swappiness", "memory.limit_in_bytes"},
	} {
		dir := filepath.Join(parent, fmt.Sprintf("tutti-test-%d", os.Getpid()))
		_, err := os.Stat(filepath.Join(parent, "cgroup.procs")) // otherwise it is a folder of groups
		if err != nil || os.Mkdir(dir, 0o700) != nil {
			continue
		}
		t.Cleanup(func() {
			assert.Eventually(t, func() bool { return os.Remove(dir) == nil }, time.Minute, time.Millisecond)
		})
		_ = os.WriteFile(filepath.Join(dir, limits[0]), []byte("0"), 0o600) // there may be no swap
		limit := filepath.Join(dir, limits[1])
		if _, err := os.Stat(limit); err == nil && os.WriteFile(limit, []byte(strconv.Itoa(bytes)), 0o600) == nil {
			return dir
		}
	}
	t.Skip("needs a control group of memory that may be made")
	return ""
}

// The error of a rank that the kernel kills for lack of memory says so.
func TestOutOfMemory(t *testing.T) {
	dir := limitMemory(t, 256<<20)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	launcher := exec.CommandContext(ctx, "sh", "-c", `echo $$ > "$1/cgroup.procs" && exec "$0"`, os.Args[0], dir)
	launcher.Env = append(os.Environ(), launcherVariable+"=exec tail /dev/zero", env.Secret+"=")
	out, err := launcher.CombinedOutput()
	require.Error(t, err)
	const want = `(?m)^rank 0 on \S+: signal: killed \(out of memory\? the kernel has killed \d+ process(es)? for that meanwhile: see dmesg\)$`
	assert.Regexp(t, want, string(out))
	require.Eventually(t, func() bool {
		left, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		return err == nil && len(left) == 0
	}, time.Minute, time.Millisecond)
}
