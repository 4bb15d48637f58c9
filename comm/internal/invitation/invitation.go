// Package invitation connects processes to a store if they have another way to exchange its address, such as a
// communicator that they share already.
package invitation

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/gate"
)

// Invitation describes a store for processes that can receive it in another way. It contains the secret, so no one
// else may see it.
type Invitation struct {
	Addresses []string `json:"addresses"`
	Secret    []byte   `json:"secret"`
}

// New keeps a store, on this host's loopback address or on all addresses, until its client is closed.
func New(thisHost bool) (*store.Client, Invitation, error) {
	in := Invitation{Secret: []byte(rand.Text() + rand.Text())}
	address := ":0"
	if thisHost {
		address = "127.0.0.1:0"
	}
	conf, err := store.TLS(in.Secret, "invitation")
	if err != nil {
		return nil, in, err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, in, err
	}
	in.Addresses = gate.Addresses(l)
	server := store.NewServer(store.Options{})
	server.Serve(l, conf)
	return server.Owner("rank 0"), in, nil
}

// Accept connects a rank to the store.
func (in Invitation) Accept(ctx context.Context, rank int) (*store.Client, error) {
	conf, err := store.TLS(in.Secret, "invitation")
	if err != nil {
		return nil, err
	}
	return store.Dialer{Addresses: in.Addresses, TLS: conf, Name: fmt.Sprint("rank ", rank)}.Dial(ctx)
}
