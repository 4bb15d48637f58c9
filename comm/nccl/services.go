package nccl

import (
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// Every native communicator has a service thread, which unmaps the rank's mappings when it ends. NCCL joins this
// thread only when the last rank of a process frees the memory of all ranks, after it has unmapped some of the same
// memory itself. /proc shows whether the thread has ended: NCCL names its threads if its environment says so.

// nameThreads makes NCCL name its threads, unless the environment says otherwise. It is called before the first
// communicator is made: NCCL reads the C library's environment once, and without cgo os.Setenv does not change that.
func nameThreads() {
	if setenv := libc().Setenv; setenv.Found() {
		name := []byte("NCCL_SET_THREAD_NAME\x00")
		value := []byte("1\x00")
		setenv.Call(hostmem.Addr(name), hostmem.Addr(value), 0)
		goruntime.KeepAlive(name)
		goruntime.KeepAlive(value)
	}
}

// services are the service threads of this process's native communicators.
var services serviceThreads

type serviceThreads struct {
	mu   sync.Mutex       // held while /proc is read
	live map[int]string   // names by thread number, of threads not known to have ended; guarded by mu
	kept map[*native]bool // the communicators with a service thread that are not being freed; guarded by mu
}

// find looks for the service thread of a communicator that was just made, and reports whether there is one. Two
// communicators made on a GPU at the same time may be assigned each other's thread, which is harmless: only their
// number matters.
func (s *serviceThreads) find(n *native) bool {
	name := fmt.Sprintf("NCCL Service %2d", n.rt.Device().Index)
	s.mu.Lock()
	defer s.mu.Unlock()
	newest := 0
	tasks, _ := os.ReadDir(taskDir)
	for _, t := range tasks {
		id, err := strconv.Atoi(t.Name())
		if err == nil && id > newest && s.live[id] == "" && threadName(id) == name {
			newest = id
		}
	}
	if newest == 0 {
		return false
	}
	if s.live == nil {
		s.live = map[int]string{}
		s.kept = map[*native]bool{}
	}
	s.live[newest] = name
	s.kept[n] = true
	return true
}

// leave records that a communicator is being freed.
func (s *serviceThreads) leave(n *native) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.kept, n)
}

// ended reports whether the threads of all communicators that are being freed have ended.
func (s *serviceThreads) ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, name := range s.live {
		if threadName(id) != name {
			delete(s.live, id)
		}
	}
	return len(s.live) <= len(s.kept)
}

// await waits until these threads have ended, or until the timeout.
func (s *serviceThreads) await(timeout time.Duration) {
	for deadline := time.Now().Add(timeout); !s.ended() && time.Now().Before(deadline); {
		time.Sleep(serviceEvery)
	}
}

// taskDir has a directory for each thread of this process, on Linux.
const taskDir = "/proc/self/task"

// threadName returns the name of a thread of this process, "" if it has ended.
func threadName(id int) string {
	name, _ := os.ReadFile(filepath.Join(taskDir, strconv.Itoa(id), "comm"))
	return strings.TrimSuffix(string(name), "\n")
}
