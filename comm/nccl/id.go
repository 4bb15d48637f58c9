package nccl

import (
	"context"
	"errors"
	goruntime "runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// uniqueID is an ncclUniqueId: what the ranks of a new communicator share.
type uniqueID [128]byte

// shareID broadcasts rank 0's id over base and counts the ranks that failed.
func shareID(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, id uniqueID, failed bool) (uniqueID, int, error) {
	mem := memory(base, rt)
	const flag = len(id) // an int32 behind the id
	buf, err := mem.Allocate(flag + dtype.I32.Size())
	if err != nil {
		return id, 0, err
	}
	id, count, err := exchangeID(ctx, base, mem, buf, id, failed)
	if err != nil {
		return id, 0, err // base may still write to buf: it is not given back
	}
	err = mem.Deallocate(buf)
	if host, ok := mem.(*cpu.Runtime); ok {
		err = errors.Join(err, host.Close())
	}
	return id, count, err
}

// exchangeID is shareID on given memory.
func exchangeID(ctx context.Context, base comm.Communicator, mem runtime.Runtime, buf uintptr, id uniqueID, failed bool) (uniqueID, int, error) {
	const flag = len(id)
	message := append(id[:], 0, 0, 0, 0)
	if failed {
		message[flag] = 1
	}
	if err := mem.CopyIn(buf, message); err != nil {
		return id, 0, err
	}
	if err := mem.Synchronize(ctx); err != nil {
		return id, 0, err
	}
	if err := base.AllReduce(buf+uintptr(flag), buf+uintptr(flag), 1, dtype.I32, comm.Sum); err != nil {
		return id, 0, err
	}
	if err := base.Broadcast(buf, len(id), dtype.U8, 0); err != nil {
		return id, 0, err
	}
	if err := base.Sync(ctx); err != nil {
		return id, 0, err
	}
	if err := mem.CopyOut(message, buf); err != nil {
		return id, 0, err
	}
	copy(id[:], message)
	return id, int(message[flag]) | int(message[flag+1])<<8, nil
}

// newID asks NCCL for a unique id.
func (l *library) newID() (uniqueID, error) {
	id := new(uniqueID)
	result := l.sym.GetUniqueID.Call(hostmem.Addr(id[:]))
	goruntime.KeepAlive(id)
	if s := Status(int32(result)); s != statusSuccess {
		return *id, l.newError(l.sym.GetUniqueID, s, 0)
	}
	return *id, nil
}

// memory chooses a runtime whose memory base can carry: the host's, unless
// base says that it cannot reach that.
func memory(base comm.Communicator, rt *cuda.Runtime) runtime.Runtime {
	if r, ok := comm.As[comm.Reacher](base); ok && r.CheckDevice(runtime.Device{Kind: runtime.CPU}) != nil {
		return rt
	}
	return cpu.New()
}
