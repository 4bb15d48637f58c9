//go:build !amd64 && !arm64

package goroutine

import (
	"bytes"
	"runtime"
	"strconv"
)

// ID identifies the calling goroutine by its number, which the first line of a
// stack trace tells ("goroutine 7 [running]:"). It is never zero.
func ID() uintptr {
	var buf [64]byte
	line := buf[:runtime.Stack(buf[:], false)]
	number, _, _ := bytes.Cut(bytes.TrimPrefix(line, []byte("goroutine ")), []byte(" "))
	n, err := strconv.ParseUint(string(number), 10, 64)
	if err != nil {
		panic("goroutine: unexpected stack trace: " + string(line))
	}
	return uintptr(n)
}
