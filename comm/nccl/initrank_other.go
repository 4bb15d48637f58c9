//go:build !amd64 && !arm64

package nccl

import "github.com/tutti-go/tutti/internal/dl"

// callInitRank: NCCL exists on amd64 and arm64 only.
func callInitRank(dl.Func, uintptr, int, *uniqueID, int, uintptr) uintptr {
	return uintptr(statusUsage)
}
