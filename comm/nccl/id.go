package nccl

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// uniqueID is an ncclUniqueId, the same on all ranks of a new communicator.
type uniqueID [128]byte

// The message of shareID, in bytes: the id and the invitation to the reports, their length, an
// int32 for the number of ranks that failed, and two pairs of int64 that are equal if all ranks
// are on one host and in one process.
const (
	lengthAt   = len(uniqueID{}) + maxInvitation
	failedAt   = lengthAt + 4
	hostAt     = lengthAt + 8
	processAt  = hostAt + 16
	sharedSize = processAt + 16
)

// shared is the result of shareID.
type shared struct {
	payload    []byte // from rank 0, an id first
	failed     int    // number of ranks
	oneProcess bool   // all ranks are in one
}

// shareID counts the ranks that failed, and broadcasts rank 0's payload over base, an id
// first. own returns the payload, given whether all ranks are on one host.
func shareID(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, failed bool, own func(oneHost bool) []byte) (shared, error) {
	mem := memory(base, rt)
	buf, err := mem.Allocate(sharedSize)
	if err != nil {
		return shared{}, err
	}
	all, err := exchangeID(ctx, base, mem, buf, failed, own)
	if err != nil {
		return shared{}, err // base may still write to buf: it is not freed
	}
	err = mem.Deallocate(buf)
	if host, ok := mem.(*cpu.Runtime); ok {
		err = errors.Join(err, host.Close())
	}
	return all, err
}

// exchangeID is shareID on given memory.
func exchangeID(ctx context.Context, base comm.Communicator, mem runtime.Runtime, buf uintptr, failed bool, own func(oneHost bool) []byte) (shared, error) {
	message := make([]byte, sharedSize)
	if failed {
		message[failedAt] = 1
	}
	put := func(at int, number int64) {
		binary.LittleEndian.PutUint64(message[at:], uint64(number))
		binary.LittleEndian.PutUint64(message[at+8:], uint64(-number))
	}
	same := func(at int) bool {
		highest, lowest := binary.LittleEndian.Uint64(message[at:]), -binary.LittleEndian.Uint64(message[at+8:])
		return highest == lowest
	}
	pids, _ := os.Readlink("/proc/self/ns/pid")
	put(hostAt, hostNumber(""))
	put(processAt, hostNumber(fmt.Sprint(pids, os.Getpid())))
	move := func(call ...comm.Call) error {
		if err := errors.Join(mem.CopyIn(buf, message), mem.Synchronize(ctx)); err != nil {
			return err
		}
		for _, x := range call {
			if err := x.Make(base); err != nil {
				return err
			}
		}
		if err := base.Sync(ctx); err != nil {
			return err
		}
		return mem.CopyOut(message, buf)
	}
	at := func(offset int) uintptr { return buf + uintptr(offset) }
	if err := move(comm.AllReduceCall(at(failedAt), at(failedAt), 1, dtype.I32, comm.Sum),
		comm.AllReduceCall(at(hostAt), at(hostAt), 4, dtype.I64, comm.Max)); err != nil {
		return shared{}, err
	}
	if base.Rank() == 0 {
		binary.LittleEndian.PutUint32(message[lengthAt:], uint32(copy(message[:lengthAt], own(same(hostAt)))))
	}
	if err := move(comm.BroadcastCall(buf, failedAt, dtype.U8, 0)); err != nil {
		return shared{}, err
	}
	length := min(int(binary.LittleEndian.Uint32(message[lengthAt:])), lengthAt)
	return shared{message[:max(length, len(uniqueID{}))], int(binary.LittleEndian.Uint16(message[failedAt:])), same(processAt)}, nil
}

// hostNumber is a hash of a host and its network, and of a process if that is not "".
func hostNumber(process string) int64 {
	sum := sha256.Sum256([]byte(rendezvous.HostName() + " " + process))
	return int64(binary.LittleEndian.Uint64(sum[:]) >> 1)
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

// memory returns a runtime whose memory base reaches: the host's, unless base says that it
// does not reach that.
func memory(base comm.Communicator, rt *cuda.Runtime) runtime.Runtime {
	if r, ok := comm.As[comm.MemoryChecker](base); ok && r.CheckDevice(runtime.Device{Kind: runtime.CPU}) != nil {
		return rt
	}
	return cpu.New()
}
