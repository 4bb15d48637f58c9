package p2p

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/runtime/cuda"
)

// fdServer sends the file descriptor of a rank's memory to peers that know the secret. Its socket is in the abstract
// namespace: it needs no file, and processes in other containers that share the network can connect.
type fdServer struct {
	listener *net.UnixListener // closed to end accept
	fd       int               // closed by close
	secret   [16]byte          // which a peer sends first
	running  sync.WaitGroup    // goroutines
	open     sync.Map          // connections, also ended ones
}

func serveMemory(h hello, memory *cuda.SharedMemory) (*fdServer, error) {
	fd, err := memory.Export()
	if err != nil {
		return nil, err
	}
	return serveFD(h, fd)
}

// serveFD serves a descriptor, and takes ownership of it.
func serveFD(h hello, fd int) (*fdServer, error) {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: h.socketName(), Net: "unix"})
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	s := &fdServer{
		listener: listener,
		fd:       fd,
		secret:   h.secret,
	}
	s.running.Go(s.serve)
	return s, nil
}

func (s *fdServer) serve() {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			return // closed
		}
		s.running.Go(func() { s.answer(conn) })
	}
}

// answer sends the descriptor to a peer that knows the secret.
func (s *fdServer) answer(conn *net.UnixConn) {
	defer conn.Close() //nolint:errcheck
	_ = conn.SetDeadline(time.Now().Add(visitTime))
	s.open.Store(conn, nil)
	var secret [16]byte
	if _, err := io.ReadFull(conn, secret[:]); err != nil {
		return
	}
	if subtle.ConstantTimeCompare(secret[:], s.secret[:]) == 0 {
		return
	}
	_, _, _ = conn.WriteMsgUnix([]byte{0}, unix.UnixRights(s.fd), nil)
}

func (s *fdServer) close() error {
	err := s.listener.Close()
	s.open.Range(func(conn, _ any) bool {
		_ = conn.(*net.UnixConn).SetDeadline(time.Now()) // do not wait for a peer that sends nothing
		return true
	})
	s.running.Wait()
	return errors.Join(err, unix.Close(s.fd))
}

var errNoDescriptor = errors.New("the peer sent no file descriptor")

// fetch receives the file descriptor of a peer's memory.
func fetch(ctx context.Context, h hello, use func(fd int) error) error {
	var dialer net.Dialer
	dialed, err := dialer.DialContext(ctx, "unix", h.socketName())
	if err != nil {
		return err
	}
	defer dialed.Close() //nolint:errcheck
	conn := dialed.(*net.UnixConn)
	deadline := time.Now().Add(visitTime)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = conn.SetDeadline(deadline)
	if _, err := conn.Write(h.secret[:]); err != nil {
		return err
	}
	fd, err := receiveFD(conn)
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck
	return use(fd)
}

// receiveFD reads a message with one descriptor, which the caller closes.
func receiveFD(conn *net.UnixConn) (fd int, err error) {
	var data [1]byte
	control := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(data[:], control)
	if err != nil {
		return 0, err
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) != 1 {
		return 0, errors.Join(errNoDescriptor, err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return 0, errors.Join(errNoDescriptor, err)
	}
	return fds[0], nil
}

// hostIdentity identifies this machine and, by the boot id and the device of /dev/shm, the set of containers that
// share memory on it.
func hostIdentity() ([16]byte, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return [16]byte{}, err
	}
	var shm unix.Stat_t
	if err := unix.Stat("/dev/shm", &shm); err != nil {
		return [16]byte{}, err
	}
	return identity(strings.TrimSpace(string(boot)), fmt.Sprint(shm.Dev)), nil
}
