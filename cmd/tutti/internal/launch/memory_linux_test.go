package launch

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestMemoryKills: the count is that of the rank's control group, of either version, and else the machine's.
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
