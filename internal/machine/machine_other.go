//go:build !linux && !darwin && !windows

package machine

// Memory is not known here.
func Memory() (total, free uint64) { return 0, 0 }

func online() int { return 0 }
