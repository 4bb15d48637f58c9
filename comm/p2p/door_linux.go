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

// door hands a rank's memory out, as a file descriptor, to who knows the secret.
// It is a socket of the abstract namespace: it needs no file, and processes of
// other containers that share the network reach it.
type door struct {
	listener *net.UnixListener
	fd       int
	secret   [16]byte
	wg       sync.WaitGroup
	open     sync.Map // connections
}

// visitTime bounds one exchange at the door.
const visitTime = 10 * time.Second

func openDoor(h hello, memory *cuda.SharedMemory) (*door, error) {
	fd, err := memory.Export()
	if err != nil {
		return nil, err
	}
	return openDoorOf(h, fd)
}

// openDoorOf takes the descriptor over.
func openDoorOf(h hello, fd int) (*door, error) {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: h.socketName(), Net: "unix"})
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	d := &door{listener: listener, fd: fd, secret: h.secret}
	d.wg.Go(d.serve)
	return d, nil
}

func (d *door) serve() {
	for {
		conn, err := d.listener.AcceptUnix()
		if err != nil {
			return // closed
		}
		d.wg.Go(func() {
			defer conn.Close() //nolint:errcheck
			var said [16]byte
			_ = conn.SetDeadline(time.Now().Add(visitTime))
			d.open.Store(conn, nil)
			if _, err := io.ReadFull(conn, said[:]); err != nil || subtle.ConstantTimeCompare(said[:], d.secret[:]) == 0 {
				return
			}
			_, _, _ = conn.WriteMsgUnix([]byte{0}, unix.UnixRights(d.fd), nil)
		})
	}
}

func (d *door) close() error {
	err := d.listener.Close()
	d.open.Range(func(conn, _ any) bool {
		_ = conn.(*net.UnixConn).SetDeadline(time.Now()) // who is silent is not waited for
		return true
	})
	d.wg.Wait()
	return errors.Join(err, unix.Close(d.fd))
}

var errNoDescriptor = errors.New("no file descriptor came")

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

// hostIdentity identifies this machine among others, and this container among
// those that share no memory with it: the boot and the device of /dev/shm.
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
