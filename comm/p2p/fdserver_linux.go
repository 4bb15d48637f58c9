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
	listener *net.UnixListener
	fd       int
	secret   [16]byte
	wg       sync.WaitGroup
	open     sync.Map // connections
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
	s := &fdServer{listener: listener, fd: fd, secret: h.secret}
	s.wg.Go(s.serve)
	return s, nil
}

func (s *fdServer) serve() {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			return // closed
		}
		s.wg.Go(func() {
			defer conn.Close() //nolint:errcheck
			var said [16]byte
			_ = conn.SetDeadline(time.Now().Add(visitTime))
			s.open.Store(conn, nil)
			if _, err := io.ReadFull(conn, said[:]); err != nil || subtle.ConstantTimeCompare(said[:], s.secret[:]) == 0 {
				return
			}
			_, _, _ = conn.WriteMsgUnix([]byte{0}, unix.UnixRights(s.fd), nil)
		})
	}
}

func (s *fdServer) close() error {
	err := s.listener.Close()
	s.open.Range(func(conn, _ any) bool {
		_ = conn.(*net.UnixConn).SetDeadline(time.Now()) // a silent peer is not waited for
		return true
	})
	s.wg.Wait()
	return errors.Join(err, unix.Close(s.fd))
}

var errNoDescriptor = errors.New("the peer sent no file descriptor")

// fetch gets the file descriptor of a peer's memory.
func fetch(ctx context.Context, h hello, use func(fd int) error) error {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", h.socketName())
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck
	conn := c.(*net.UnixConn)
	deadline := time.Now().Add(visitTime)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = conn.SetDeadline(deadline)
	if _, err := conn.Write(h.secret[:]); err != nil {
		return err
	}
	var data [1]byte
	control := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(data[:], control)
	if err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) != 1 {
		return errors.Join(errNoDescriptor, err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return errors.Join(errNoDescriptor, err)
	}
	defer unix.Close(fds[0]) //nolint:errcheck
	return use(fds[0])
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
