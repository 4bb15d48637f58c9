package mpi

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// createShared makes memory for this process and those that open it.
// It has no name in any file system, so that nothing is left when they end, however.
func createShared(name string, bytes int) (fd int, memory []byte, err error) {
	fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return 0, nil, os.NewSyscallError("memfd_create", err)
	}
	if err = os.NewSyscallError("ftruncate", unix.Ftruncate(fd, int64(bytes))); err == nil {
		memory, err = mapShared(fd, bytes)
	}
	if err != nil {
		closeShared(fd)
	}
	return fd, memory, err
}

// openShared maps memory that another process of this host has made under that name,
// which is the proof that it is of this host. A process of another IPC namespace is not
// meant to share memory with this one: `tutti cluster` has one for each host.
func openShared(pid, fd int, name string, bytes int) ([]byte, error) {
	own, err := os.Readlink("/proc/self/ns/ipc")
	if err != nil {
		return nil, err
	}
	switch other, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/ipc", pid)); {
	case err != nil:
		return nil, err
	case other != own:
		return nil, fmt.Errorf("process %d is of another IPC namespace", pid)
	}
	path := fmt.Sprintf("/proc/%d/fd/%d", pid, fd)
	switch target, err := os.Readlink(path); {
	case err != nil:
		return nil, err
	case target != "/memfd:"+name+" (deleted)":
		return nil, fmt.Errorf("%s is %s", path, target)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return mapShared(int(f.Fd()), bytes)
}

func mapShared(fd, bytes int) ([]byte, error) {
	memory, err := unix.Mmap(fd, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return memory, os.NewSyscallError("mmap", err)
}

// closeShared lets go of how others find the memory, and unmapShared of the memory.
func closeShared(fd int) { _ = unix.Close(fd) }

func unmapShared(memory []byte) { _ = unix.Munmap(memory) }
