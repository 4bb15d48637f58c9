package memfd

import (
	"os"

	"golang.org/x/sys/unix"
)

// Create makes memory of that many bytes, all zero. The name is for /proc alone.
func Create(name string, bytes int) (fd int, err error) {
	fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return 0, os.NewSyscallError("memfd_create", err)
	}
	if err = unix.Ftruncate(fd, int64(bytes)); err != nil {
		Close(fd)
	}
	return fd, os.NewSyscallError("ftruncate", err)
}

// Map maps the memory that a descriptor stands for.
func Map(fd, bytes int) ([]byte, error) {
	memory, err := unix.Mmap(fd, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return memory, os.NewSyscallError("mmap", err)
}

// Close closes a descriptor, which the mappings outlive.
func Close(fd int) { _ = unix.Close(fd) }

// Unmap gives a mapping up.
func Unmap(memory []byte) { _ = unix.Munmap(memory) }
