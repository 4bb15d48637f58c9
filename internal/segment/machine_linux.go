package segment

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
)

// Machine returns a number that is equal for processes that may share memory. It is a hash of the kernel's boot, the
// user, and the namespaces of users, processes, networks and IPC. It is not zero.
func Machine() (uint64, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return 0, err
	}
	hash := sha256.New()
	fmt.Fprintf(hash, "%s\n%d\n", boot, os.Geteuid())
	for _, kind := range []string{"user", "pid", "net", "ipc"} {
		namespace, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			return 0, err
		}
		fmt.Fprintln(hash, namespace)
	}
	return binary.LittleEndian.Uint64(hash.Sum(nil)) | 1, nil
}

// Probe returns the reason why this process cannot share memory with others of its machine, nil if it can.
func Probe() error {
	s, memory, err := Serve(os.Getpagesize())
	if err != nil {
		return err
	}
	s.Close()
	Unmap(memory)
	return nil
}
