package segment

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// create makes sealed memory, all zero.
func create(bytes int) (fd int, err error) {
	// Beyond this limit the kernel not only refuses, but also sends a signal that ends the process.
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err == nil && limit.Cur < uint64(bytes) {
		return -1, fmt.Errorf("files are limited to %d bytes (ulimit -f), of %d", limit.Cur, bytes)
	}
	fd, err = unix.MemfdCreate("tutti", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, os.NewSyscallError("memfd_create", err)
	}
	err = os.NewSyscallError("ftruncate", unix.Ftruncate(fd, int64(bytes)))
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals|unix.F_SEAL_SEAL)
		err = os.NewSyscallError("fcntl", err)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// mapMemory maps memory, if it has the right size and cannot shrink.
func mapMemory(fd, bytes int) ([]byte, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	have, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || have&seals != seals || stat.Size != int64(bytes) {
		return nil, errSize
	}
	memory, err := unix.Mmap(fd, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return memory, os.NewSyscallError("mmap", err)
}

// Unmap unmaps this process's view of a segment. Nobody may use it afterwards.
func Unmap(memory []byte) {
	_ = unix.Munmap(memory)
}
