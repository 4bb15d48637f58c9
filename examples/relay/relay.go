package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
)

// joined is the relay's message to both sides of a connection when both have arrived.
const joined = "\n"

// longestLine bounds a request, in bytes.
const longestLine = 200

// serve is the relay.
func serve(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	fmt.Println("relay at", l.Addr())
	return relayOn(l)
}

// relayOn is serve with a listener.
func relayOn(l net.Listener) error {
	r := relay{accepting: map[string][]net.Conn{}}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go r.answer(conn)
	}
}

// relay joins the connections that dial an address with those that accept there.
type relay struct {
	mu        sync.Mutex            // guards accepting
	accepting map[string][]net.Conn // by address; guarded by mu
}

// answer serves a connection. It closes a connection that dials where nobody accepts, and the client dials again.
func (r *relay) answer(conn net.Conn) {
	line, _ := bufio.NewReader(io.LimitReader(conn, longestLine)).ReadString('\n')
	verb, address, _ := strings.Cut(strings.TrimSpace(line), " ")
	if verb == "accept" {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.accepting[address] = append(r.accepting[address], conn)
		return
	}
	defer conn.Close() //nolint:errcheck // both sides have ended
	peer := r.take(address)
	if peer == nil {
		return
	}
	defer peer.Close() //nolint:errcheck // both sides have ended
	for _, side := range []net.Conn{peer, conn} {
		if _, err := io.WriteString(side, joined); err != nil {
			return
		}
	}
	ended := make(chan struct{}, 2)
	for _, sides := range [][2]net.Conn{{conn, peer}, {peer, conn}} {
		go func() {
			_, _ = io.Copy(sides[0], sides[1])
			ended <- struct{}{}
		}()
	}
	<-ended
}

// take returns a connection that waits to be accepted at an address, nil if there is none.
func (r *relay) take(address string) net.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	waiting := r.accepting[address]
	if len(waiting) == 0 {
		return nil
	}
	r.accepting[address] = waiting[1:]
	return waiting[0]
}
