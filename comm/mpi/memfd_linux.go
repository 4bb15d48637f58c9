package mpi

import (
	"fmt"
	"os"

	"github.com/tutti-go/tutti/internal/memfd"
)

// openShared maps memory that another process of this host has made under that name,
// which is the proof that it is of this host. A process of another IPC namespace is not
// meant to share memory with this one: `tutti cluster` has one for each host.
func openShared(pid, fd int, name string, bytes int) ([]byte, error) {
	namespace, err := os.Readlink("/proc/self/ns/ipc")
	if err != nil {
		return nil, err
	}
	switch foreign, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/ipc", pid)); {
	case err != nil:
		return nil, err
	case foreign != namespace:
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
	return memfd.Map(int(f.Fd()), bytes)
}
