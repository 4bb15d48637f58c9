//go:build !amd64

package hostops

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

func reduce(dsts, srcs []uintptr, n int, dt dtype.DType, op reductions.Op, _ bool) {
	reducePortable(dsts, srcs, n, dt, op)
}
