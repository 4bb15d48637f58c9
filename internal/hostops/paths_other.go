//go:build !amd64

package hostops

import "github.com/tutti-go/tutti/dtype"

func reduce(dsts, srcs []uintptr, n int, dt dtype.DType, op dtype.ReduceOp, _ bool) {
	reducePortable(dsts, srcs, n, dt, op)
}
