package segment

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// code authenticates a process that requests a segment, or the answer.
func (o *Offer) code(role string) []byte {
	key := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, o.Key[0]), o.Key[1])
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(role))
	return mac.Sum(nil)
}

// Roles of a code.
const (
	toName  = "name"
	toJoin  = "join"
	toServe = "serve"
)

// address returns the name of the server's socket, which does not reveal the key.
func (o *Offer) address() *net.UnixAddr {
	return &net.UnixAddr{Net: "unix", Name: "@tutti-" + hex.EncodeToString(o.code(toName)[:16])}
}

// Server hands a segment over to processes that have its offer.
type Server struct {
	offer    Offer             // its segment is fd
	listener *net.UnixListener // where processes ask for it

	mu sync.Mutex // guards fd
	fd int        // of the segment; -1 when closed; guarded by mu
}

// Serve makes a segment, all zero, and hands it over until the server is closed. Processes that have the segment keep
// it.
func Serve(bytes int) (*Server, []byte, error) {
	s := &Server{}
	var err error
	if s.offer.Machine, err = Machine(); err != nil {
		return nil, nil, err
	}
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails
	s.offer.Key[0] = binary.LittleEndian.Uint64(random[:])
	s.offer.Key[1] = binary.LittleEndian.Uint64(random[8:])
	if s.fd, err = create(bytes); err != nil {
		return nil, nil, err
	}
	memory, err := mapMemory(s.fd, bytes)
	if err == nil {
		s.listener, err = net.ListenUnix("unix", s.offer.address())
	}
	if err != nil {
		_ = unix.Close(s.fd)
		if memory != nil {
			Unmap(memory)
		}
		return nil, nil, err
	}
	go s.serve()
	return s, memory, nil
}

// Offer returns the information for Join.
func (s *Server) Offer() Offer { return s.offer }

// Close ends the server.
func (s *Server) Close() {
	_ = s.listener.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = unix.Close(s.fd)
	s.fd = -1
}

func (s *Server) serve() {
	for {
		conn, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no file descriptors are left for now
			time.Sleep(acceptTime)
			continue
		}
		go s.answer(conn)
	}
}

// answer serves a connection. A process that is not authorized gets nothing.
func (s *Server) answer(conn *net.UnixConn) {
	defer conn.Close() //nolint:errcheck // nothing is lost
	_ = conn.SetDeadline(time.Now().Add(handoverTime))
	if checkUser(conn) != nil {
		return
	}
	var request [sha256.Size]byte
	if _, err := io.ReadFull(conn, request[:]); err != nil || !hmac.Equal(request[:], s.offer.code(toJoin)) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd >= 0 {
		_, _, _ = conn.WriteMsgUnix(s.offer.code(toServe), unix.UnixRights(s.fd), nil)
	}
}

// checkUser returns an error if the process at the other end of a connection belongs to another user.
func checkUser(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if failed != nil {
		return os.NewSyscallError("getsockopt", failed)
	}
	if int64(peer.Uid) != int64(os.Geteuid()) {
		return fmt.Errorf("a process of user %d", peer.Uid)
	}
	return nil
}

// Join returns the segment of an offer, which must have this many bytes.
func Join(ctx context.Context, o Offer, bytes int) ([]byte, error) {
	if o == (Offer{}) {
		return nil, errNone
	}
	machine, err := Machine()
	if err != nil {
		return nil, err
	}
	if machine != o.Machine {
		return nil, errAlien
	}
	ctx, cancel := context.WithTimeout(ctx, handoverTime)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "unix", o.address().Name)
	if err != nil {
		return nil, err
	}
	conn := c.(*net.UnixConn)
	defer conn.Close() //nolint:errcheck // nothing is lost
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if err := checkUser(conn); err != nil {
		return nil, err
	}
	if _, err := conn.Write(o.code(toJoin)); err != nil {
		return nil, err
	}
	fd, err := receive(conn, o.code(toServe))
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd) //nolint:errcheck // the mapping outlives it
	return mapMemory(fd, bytes)
}

// receive returns the file descriptor in an answer.
func receive(conn *net.UnixConn, want []byte) (fd int, err error) {
	var answer [sha256.Size]byte
	control := make([]byte, unix.CmsgSpace(4))
	n, controlBytes, _, _, err := conn.ReadMsgUnix(answer[:], control)
	if err != nil {
		return -1, err
	}
	fds := rights(control[:controlBytes])
	if len(fds) == 1 && n == len(answer) && hmac.Equal(answer[:], want) {
		return fds[0], nil
	}
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	return -1, errors.New("the process that made the segment does not offer it")
}

// rights returns the file descriptors of a control message.
func rights(control []byte) (fds []int) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	for i := range messages {
		rights, _ := unix.ParseUnixRights(&messages[i])
		fds = append(fds, rights...)
	}
	return fds
}
