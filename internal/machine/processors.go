package machine

import (
	"io/fs"
	"math"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"
	"sync"
)

// Processors returns the number of processors that this process can keep busy, at least 1: as many as GOMAXPROCS, the
// affinity mask and the quota of its control groups allow.
func Processors() int {
	n := min(runtime.GOMAXPROCS(0), runtime.NumCPU())
	if quota := Quota(); quota > 0 {
		n = min(n, int(math.Ceil(quota)))
	}
	return n
}

// Quota returns the number of processors that the control groups of this process grant to its container, if that is
// fewer than the affinity mask has, and 0 otherwise. It is read once.
func Quota() float64 { return ownQuota() }

var ownQuota = sync.OnceValue(func() float64 {
	quota := readQuota(os.DirFS("/"))
	if quota >= float64(runtime.NumCPU()) {
		return 0
	}
	return quota
})

// readQuota returns the smallest quota of a process's control groups, 0 if none has one.
func readQuota(root fs.FS) (quota float64) {
	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(groups)) {
		// The format is hierarchy:controllers:path. Version 2 has no controllers.
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		mount := "sys/fs/cgroup"
		read := unifiedQuota
		if fields[1] != "" {
			if !strings.Contains(","+fields[1]+",", ",cpu,") {
				continue
			}
			mount = "sys/fs/cgroup/cpu"
			read = divisionQuota
		}
		// A limit of a group applies to all groups below it. In a container the path may be the host's, while the
		// container's group is mounted as the root.
		for group := path.Clean("/" + fields[2]); ; group = path.Dir(group) {
			if granted := read(root, path.Join(mount, group)); granted > 0 && (quota == 0 || granted < quota) {
				quota = granted
			}
			if group == "/" {
				break
			}
		}
	}
	return quota
}

// unifiedQuota reads a group of version 2: microseconds in each period, or "max".
func unifiedQuota(root fs.FS, group string) float64 {
	text, err := fs.ReadFile(root, path.Join(group, "cpu.max"))
	if err != nil {
		return 0
	}
	limit, period, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	return ratio(limit, period)
}

// divisionQuota reads a group of version 1, where -1 is no limit.
func divisionQuota(root fs.FS, group string) float64 {
	limit, err := fs.ReadFile(root, path.Join(group, "cpu.cfs_quota_us"))
	if err != nil {
		return 0
	}
	period, err := fs.ReadFile(root, path.Join(group, "cpu.cfs_period_us"))
	if err != nil {
		return 0
	}
	return ratio(strings.TrimSpace(string(limit)), strings.TrimSpace(string(period)))
}

// ratio returns the quotient of two texts, and 0 if either is not a positive number.
func ratio(limit, period string) float64 {
	a, err := strconv.ParseUint(limit, 10, 63)
	if err != nil {
		return 0
	}
	b, err := strconv.ParseUint(period, 10, 63)
	if err != nil || b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}
