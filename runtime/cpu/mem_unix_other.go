//go:build unix && !linux

package cpu

// adviseHugePages does nothing: only Linux takes advice on page sizes.
func adviseHugePages(uintptr, int) {}
