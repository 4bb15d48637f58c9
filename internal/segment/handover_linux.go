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
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// handoverTime bounds a handover: both processes are on one machine, which may be busy.
const handoverTime = 10 * time.Second

// A request is the number of the offer and a code of authentication. The answer is another code, with the memory's file
// descriptor beside it.
const (
	requestBytes = 8 + sha256.Size
	answerBytes  = sha256.Size
)

// code authenticates who asks for an offer, or answers.
func (k Key) code(role string, number uint64) []byte {
	mac := hmac.New(sha256.New, k.bytes())
	fmt.Fprintf(mac, "%s %d", role, number)
	return mac.Sum(nil)
}

func (k Key) bytes() []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, k[0]), k[1])
}

// address is the name of the server's socket, which does not tell the key.
func (k Key) address() *net.UnixAddr {
	return &net.UnixAddr{Net: "unix", Name: "@tutti-" + hex.EncodeToString(k.code("name", 0)[:16])}
}

// Server hands segments over to processes that have its key.
type Server struct {
	key      Key
	listener *net.UnixListener

	mu     sync.Mutex
	offers map[uint64]int // file descriptors by number; guarded by mu
}

// NewServer returns a server that offers nothing yet.
func NewServer() (*Server, error) {
	s := &Server{offers: map[uint64]int{}}
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never fails
	s.key = Key{binary.LittleEndian.Uint64(random[:]), binary.LittleEndian.Uint64(random[8:])}
	var err error
	if s.listener, err = net.ListenUnix("unix", s.key.address()); err != nil {
		return nil, err
	}
	go s.serve()
	return s, nil
}

// Key returns what others need to join.
func (s *Server) Key() Key { return s.key }

// Offer makes a segment, all zero, and offers it under a number until it is withdrawn.
func (s *Server) Offer(number uint64, bytes int) ([]byte, error) {
	fd, err := create(bytes)
	if err != nil {
		return nil, err
	}
	memory, err := mapMemory(fd, bytes)
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offers[number] = fd
	return memory, nil
}

// Withdraw ends an offer, if there is one. Those who have the segment keep it.
func (s *Server) Withdraw(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if fd, ok := s.offers[number]; ok {
		_ = unix.Close(fd)
		delete(s.offers, number)
	}
}

// Close ends the server and all offers.
func (s *Server) Close() {
	_ = s.listener.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	for number, fd := range s.offers {
		_ = unix.Close(fd)
		delete(s.offers, number)
	}
}

func (s *Server) serve() {
	for {
		conn, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no file descriptor is left: whoever asks takes that for a refusal
			time.Sleep(10 * time.Millisecond)
			continue
		}
		go s.answer(conn)
	}
}

// answer serves a connection. Who may not have what it asks for gets nothing.
func (s *Server) answer(conn *net.UnixConn) {
	defer conn.Close() //nolint:errcheck // nothing is lost
	_ = conn.SetDeadline(time.Now().Add(handoverTime))
	if checkUser(conn) != nil {
		return
	}
	var request [requestBytes]byte
	if n, err := readFull(conn, request[:]); err != nil || n < len(request) {
		return
	}
	number := binary.LittleEndian.Uint64(request[:])
	if !hmac.Equal(request[8:], s.key.code("join", number)) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if fd, ok := s.offers[number]; ok {
		_, _, _ = conn.WriteMsgUnix(s.key.code("offer", number), unix.UnixRights(fd), nil)
	}
}

func readFull(conn *net.UnixConn, b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var more int
		more, err = conn.Read(b[n:])
		n += more
	}
	return n, err
}

// checkUser returns an error if the process at the other end of a connection is another user's.
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

// Join returns the segment of that many bytes that a server offers under a number.
func Join(ctx context.Context, key Key, number uint64, bytes int) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, handoverTime)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "unix", key.address().Name)
	if err != nil {
		return nil, err
	}
	conn := c.(*net.UnixConn)
	defer conn.Close() //nolint:errcheck // nothing is lost
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if err := checkUser(conn); err != nil {
		return nil, err
	}
	request := append(binary.LittleEndian.AppendUint64(nil, number), key.code("join", number)...)
	if _, err := conn.Write(request); err != nil {
		return nil, err
	}
	fd, err := receive(conn, key.code("offer", number))
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd) //nolint:errcheck // the mapping outlives it
	return mapMemory(fd, bytes)
}

// receive returns the file descriptor that comes with an answer.
func receive(conn *net.UnixConn, want []byte) (fd int, err error) {
	var answer [answerBytes]byte
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
		more, _ := unix.ParseUnixRights(&messages[i])
		fds = append(fds, more...)
	}
	return fds
}
