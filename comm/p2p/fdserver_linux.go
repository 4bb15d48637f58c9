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

// fdServer gives peers that know the secret a file descriptor of a rank's memory. Its
// socket is in the abstract namespace: it needs no file, and processes of other
// containers that share the network reach it.
type fdServer struct {
	listener *net.UnixListener // closed to end accept
	fd       int               // closed in the end
	secret   [16]byte          // that a peer says first
	running  sync.WaitGroup    // goroutines
	open     sync.Map          // connections, all that there were
}

func serveMemory(h hello, memory *cuda.SharedMemory) (*fdServer, error) {
	fd, err := memory.Export()
	if err != nil {
		return nil, err
	}
	return serveFD(h, fd)
}

// serveFD serves a descriptor, and closes it in the end.
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
		_ = conn.(*net.UnixConn).SetDeadline(time.Now()) // a silent peer is not waited for
		return true
	})
	s.running.Wait()
	return errors.Join(err, unix.Close(s.fd))
}

var errNoDescriptor = errors.New("the peer sent no file descriptor")

// fetch gets the file descriptor of a peer's memory.
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

// receiveFD reads a message that carries one descriptor, which the caller closes.
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

// hostIdentity identifies this machine among others, and this container among those that
// share no memory with it, by the boot id and the device of /dev/shm.
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
