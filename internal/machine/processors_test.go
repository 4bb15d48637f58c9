package machine

import (
	"runtime"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
)

func TestReadQuota(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  float64
	}{
		"nothing":       {},
		"unlimited":     {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 0},
		"a container":   {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5},
		"a host's path": {map[string]string{"proc/self/cgroup": "0::/../a\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5},
		"the smallest of the groups": {map[string]string{
			"proc/self/cgroup":              "0::/a/b\n",
			"sys/fs/cgroup/a/b/cpu.max":     "800000 100000",
			"sys/fs/cgroup/a/cpu.max":       "400000 100000",
			"sys/fs/cgroup/cpu.max":         "max 100000",
			"sys/fs/cgroup/a/other/cpu.max": "100000 100000",
		}, 4},
		"version 1": {map[string]string{
			"proc/self/cgroup":                        "5:memory:/m\n4:cpu,cpuacct:/job\n1:name=systemd:/x\n",
			"sys/fs/cgroup/cpu/job/cpu.cfs_quota_us":  "300000\n",
			"sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
			"sys/fs/cgroup/cpu/cpu.cfs_quota_us":      "-1\n",
			"sys/fs/cgroup/cpu/cpu.cfs_period_us":     "100000\n",
		}, 3},
		"damaged": {map[string]string{"proc/self/cgroup": "x\n0::\n::::\n", "sys/fs/cgroup/cpu.max": "5 0"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			root := fstest.MapFS{}
			for path, text := range c.files {
				root[path] = &fstest.MapFile{Data: []byte(text)}
			}
			assert.InDelta(t, c.want, readQuota(root), 0)
		})
	}
}

func TestProcessors(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	assert.Equal(t, 1, Processors())
	runtime.GOMAXPROCS(1 << 10)
	assert.LessOrEqual(t, Processors(), runtime.NumCPU())
}
