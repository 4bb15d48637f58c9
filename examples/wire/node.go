package main

import (
	"encoding/gob"
	"net"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// node is one rank of the world: what its communicators share.
type node struct {
	links  []link // by rank; that to itself is not used
	memory *cpu.Runtime
	closed chan struct{} // when the last communicator has left

	mu      sync.Mutex
	arrived sync.Cond // something was delivered
	boxes   map[string]*box
	lost    []error // why nothing comes from a rank any more
	open    int     // communicators
}

// box holds what came for a communicator, perhaps before this rank has made it.
type box struct {
	size   int // 0 until it is made
	frames map[int][]frame
	byes   map[int]*goodbye
}

// link is a connection that several goroutines write to.
type link struct {
	mu   sync.Mutex
	conn net.Conn
	enc  *gob.Encoder
}

// world returns the communicators of size ranks. connect makes a connection.
func world(size int, connect func() (net.Conn, net.Conn, error)) ([]comm.Communicator, error) {
	nodes, ranks := make([]*node, size), make([]int, size)
	for rank := range nodes {
		n := &node{links: make([]link, size), memory: cpu.New(), closed: make(chan struct{}),
			boxes: map[string]*box{}, lost: make([]error, size)}
		n.arrived.L = &n.mu
		nodes[rank], ranks[rank] = n, rank
		for peer, other := range nodes[:rank] {
			a, b, err := connect()
			if err != nil {
				return nil, err
			}
			n.links[peer].conn, n.links[peer].enc = a, gob.NewEncoder(a)
			other.links[rank].conn, other.links[rank].enc = b, gob.NewEncoder(b)
		}
	}
	comms := make([]comm.Communicator, size)
	for rank, n := range nodes {
		comms[rank] = (&worker{node: n, rank: rank, ranks: ranks}).communicator()
		for peer := range n.links {
			if peer != rank {
				go n.read(peer)
			}
		}
	}
	return comms, nil
}

// loopback connects by TCP.
func loopback() (net.Conn, net.Conn, error) {
	listener, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		return nil, nil, err
	}
	defer listener.Close()
	a, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		return nil, nil, err
	}
	b, err := listener.Accept()
	return a, b, err
}

// send gives a frame to a rank. A connection that does not take it is lost.
func (n *node) send(to int, f frame) {
	l := &n.links[to]
	if l.conn == nil {
		n.deliver(f)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn.SetWriteDeadline(time.Now().Add(10 * time.Second))
	if err := l.enc.Encode(f); err != nil {
		l.conn.Close() // read sees it
	}
}

// read delivers what comes from a rank.
func (n *node) read(peer int) {
	conn := n.links[peer].conn
	defer conn.Close()
	for dec := gob.NewDecoder(conn); ; {
		var f frame
		if err := dec.Decode(&f); err != nil {
			n.mu.Lock()
			n.lost[peer] = err
			n.arrived.Broadcast()
			n.mu.Unlock()
			<-n.closed
			return
		}
		n.deliver(f)
	}
}

func (n *node) deliver(f frame) {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.box(f.ID)
	if f.Bye == nil {
		b.frames[f.From] = append(b.frames[f.From], f)
	} else if b.byes[f.From] = f.Bye; len(b.byes) == b.size {
		delete(n.boxes, f.ID)
	}
	n.arrived.Broadcast()
}

func (n *node) box(id string) *box {
	if n.boxes[id] == nil {
		n.boxes[id] = &box{frames: map[int][]frame{}, byes: map[int]*goodbye{}}
	}
	return n.boxes[id]
}

// release closes the connections behind the last communicator.
func (n *node) release() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.open--; n.open > 0 {
		return
	}
	close(n.closed)
	for i := range n.links {
		if half, ok := n.links[i].conn.(interface{ CloseWrite() error }); ok {
			half.CloseWrite() // the peer reads what was sent, then closes
		} else if n.links[i].conn != nil {
			n.links[i].conn.Close()
		}
	}
	n.memory.Close()
}
