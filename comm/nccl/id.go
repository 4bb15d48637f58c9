package nccl

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/machine"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// uniqueID is an ncclUniqueId, the same on all ranks of a new communicator.
type uniqueID [128]byte

// run names the ranks with the id in flight records. Other ranks that read the records cannot join with the name.
func (id *uniqueID) run() string {
	sum := sha256.Sum256(id[:])
	return hex.EncodeToString(sum[:16])
}

// idMessage is the message of shareID.
type idMessage []byte

// The parts of an idMessage, in bytes: the id and the invitation to the store, their length, an int32 for the number
// of ranks that failed, and two pairs of int64 that are equal if all ranks are on one host and in one process.
const (
	lengthOffset  = len(uniqueID{}) + maxInvitation
	failedOffset  = lengthOffset + 4
	hostOffset    = lengthOffset + 8
	processOffset = hostOffset + 16
	idMessageSize = processOffset + 16
)

// putPair puts a number and its negative. Their maxima over all ranks tell whether the number is the same everywhere.
func (m idMessage) putPair(offset int, number int64) {
	binary.LittleEndian.PutUint64(m[offset:], uint64(number))
	binary.LittleEndian.PutUint64(m[offset+8:], uint64(-number))
}

// equal reports whether a number was the same on all ranks.
func (m idMessage) equal(offset int) bool {
	highest := binary.LittleEndian.Uint64(m[offset:])
	lowest := -binary.LittleEndian.Uint64(m[offset+8:])
	return highest == lowest
}

// putPayload puts rank 0's broadcast payload.
func (m idMessage) putPayload(payload []byte) {
	length := copy(m[:lengthOffset], payload)
	binary.LittleEndian.PutUint32(m[lengthOffset:], uint32(length))
}

// payload returns rank 0's payload, at least an id.
func (m idMessage) payload() []byte {
	length := min(int(binary.LittleEndian.Uint32(m[lengthOffset:])), lengthOffset)
	return m[:max(length, len(uniqueID{}))]
}

// failed returns the number of ranks that failed.
func (m idMessage) failed() int {
	return int(binary.LittleEndian.Uint32(m[failedOffset:]))
}

// shared is the result of shareID.
type shared struct {
	payload    []byte // from rank 0, an id first
	failed     int    // number of ranks
	oneProcess bool   // all ranks are in one process
}

// shareID counts the ranks that failed, and broadcasts rank 0's payload over base, an id first. The callback payload
// returns it; its argument oneHost is true if all ranks are on one host.
func shareID(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, failed bool,
	payload func(oneHost bool) []byte) (shared, error) {
	mem := memory(base, rt)
	buf, err := mem.Allocate(idMessageSize)
	if err != nil {
		return shared{}, err
	}
	all, err := exchangeID(ctx, base, mem, buf, failed, payload)
	if err != nil {
		return shared{}, err // base may still write to buf: it is not freed
	}
	err = mem.Deallocate(buf)
	if host, ok := mem.(*cpu.Runtime); ok {
		err = errors.Join(err, host.Close())
	}
	return all, err
}

// exchangeID is shareID in memory that base can access.
func exchangeID(ctx context.Context, base comm.Communicator, mem runtime.Runtime, buf uintptr, failed bool,
	payload func(oneHost bool) []byte) (shared, error) {
	m := make(idMessage, idMessageSize)
	if failed {
		m[failedOffset] = 1
	}
	pids, _ := os.Readlink("/proc/self/ns/pid")
	m.putPair(hostOffset, hostNumber(""))
	m.putPair(processOffset, hostNumber(fmt.Sprint(pids, os.Getpid())))

	// exchange makes calls on the message.
	exchange := func(calls ...comm.Call) error {
		if err := errors.Join(mem.CopyIn(buf, m), mem.Synchronize(ctx)); err != nil {
			return err
		}
		for _, x := range calls {
			if err := x.Make(base); err != nil {
				return err
			}
		}
		if err := base.Sync(ctx); err != nil {
			return err
		}
		return mem.CopyOut(m, buf)
	}
	failures := buf + uintptr(failedOffset)
	numbers := buf + uintptr(hostOffset)
	err := exchange(
		comm.AllReduceCall(failures, failures, 1, dtype.I32, comm.Sum),
		comm.AllReduceCall(numbers, numbers, 4, dtype.I64, comm.Max))
	if err != nil {
		return shared{}, err
	}
	if base.Rank() == 0 {
		m.putPayload(payload(m.equal(hostOffset)))
	}
	if err := exchange(comm.BroadcastCall(buf, failedOffset, dtype.U8, 0)); err != nil {
		return shared{}, err
	}
	return shared{
		payload:    m.payload(),
		failed:     m.failed(),
		oneProcess: m.equal(processOffset),
	}, nil
}

// hostNumber is a hash of a host and its network, and of a process if that is not "".
func hostNumber(process string) int64 {
	sum := sha256.Sum256([]byte(machine.Network() + " " + process))
	return int64(binary.LittleEndian.Uint64(sum[:]) >> 1)
}

// newID requests a unique id from NCCL.
func (l *library) newID() (uniqueID, error) {
	id := new(uniqueID)
	result := l.sym.GetUniqueID.Call(hostmem.Addr(id[:]))
	goruntime.KeepAlive(id)
	if s := ncclResult(int32(result)); s != statusSuccess {
		return *id, l.newError(l.sym.GetUniqueID, s, 0)
	}
	return *id, nil
}

// memory returns a runtime whose memory base can access: host memory, unless base rejects it.
func memory(base comm.Communicator, rt *cuda.Runtime) runtime.Runtime {
	if r, ok := comm.As[backend.MemoryChecker](base); ok && r.CheckDevice(runtime.Device{Kind: runtime.CPU}) != nil {
		return rt
	}
	return cpu.New()
}
