package store_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// The processes of a job share keys: one keeps the store, the others dial it.
func ExampleServer() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	config, err := store.TLS([]byte("sixteen bytes or more, known to all"), "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	server := store.NewServer(store.Options{Size: 2})
	defer server.Close()
	server.Serve(l, config)

	first := server.Local("rank 0")
	defer first.Close()
	dialer := store.Dialer{Addresses: []string{l.Addr().String()}, TLS: config, Name: "rank 1", Size: 2}
	second, err := dialer.Dial(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer second.Close()

	first.Post("address/0", []byte("10.0.0.1:4000")) // without an answer
	address, err := second.Get(ctx, "address/0")     // waits for it
	fmt.Printf("%s %v\n", address, err)
	fmt.Println(first.LocalAddr() == nil, second.LocalAddr().Network(), second.LeaseTime())
	// Output:
	// 10.0.0.1:4000 <nil>
	// true tcp 0s
}

// Of several processes that want to do a thing, one does it: the key is set if nobody has set it. It vanishes with the
// session that leased it.
func ExampleClient_CompareAndSet() {
	ctx := context.Background()
	server := store.NewServer(store.Options{})
	var leader store.Store = server.Local("a")
	entry, ok, err := leader.CompareAndSet(ctx, "leader", 0, []byte("a"), store.Lease)
	fmt.Printf("%s %v %v\n", entry.Value, ok, err)

	follower := server.Owner("b") // closes the server with itself
	defer follower.Close()
	entry, ok, err = follower.CompareAndSet(ctx, "leader", 0, []byte("b"), store.Lease)
	fmt.Printf("%s %v %v\n", entry.Value, ok, err)

	gone := make(chan struct{})
	stop, err := follower.Watch(ctx, "leader", func(e store.Event) {
		if e.Deleted {
			close(gone)
		}
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	fmt.Println(leader.Close())
	<-gone
	// Output:
	// a true <nil>
	// a false <nil>
	// <nil>
}

// The keys under a prefix, and how to clear them.
func ExampleClient_List() {
	ctx := context.Background()
	client := store.NewServer(store.Options{}).Owner("a")
	defer client.Close()
	for _, name := range []string{"members/b", "members/a", "epoch"} {
		if err := client.Set(ctx, name, []byte("1")); err != nil {
			fmt.Println(err)
		}
	}
	client.Drop("members/b") // without an answer
	entries, err := client.List(ctx, "members/")
	fmt.Println(len(entries), entries[0].Key, err)
	fmt.Println(client.Delete(ctx, "members/a", entries[0].Version))
	// Output:
	// 1 members/a <nil>
	// <nil>
}

// keys is a session of a store of another kind. A real one, such as the one over etcd in adapters/etcd, asks its
// server.
type keys struct{ *store.Client }

// A job whose keys lie in a store of another kind, such as etcd, runs a proxy in front of it, which the ranks dial as
// they would dial a Server.
func ExampleProxy() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	shared := store.NewServer(store.Options{})
	defer shared.Close()
	proxy := store.NewProxy(time.Minute, func(_ context.Context, job string) (store.Backend, error) {
		return keys{shared.Local("proxy of " + job)}, nil
	})
	defer proxy.Close()
	config, err := store.TLS([]byte("sixteen bytes or more, known to all"), "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	proxy.Serve(l, config)

	dialer := store.Dialer{Addresses: []string{l.Addr().String()}, TLS: config, Name: "rank 0", Job: "digits"}
	client, err := dialer.Dial(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer client.Close()
	n, err := client.Add(ctx, "restarts", 1)
	fmt.Println(n, err)
	// Output: 1 <nil>
}

// relay is a network other than the system's TCP: here it only counts.
type relay struct {
	net.Dialer
	dialed atomic.Int32
}

// Dial implements [store.Network].
func (r *relay) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	r.dialed.Add(1)
	return r.DialContext(ctx, network, address)
}

// Listen implements [store.Network].
func (r *relay) Listen(network, address string) (net.Listener, error) {
	return net.Listen(network, address)
}

// A dialer says why a store does not want it. It goes over the program's own network, if it has one.
func ExampleDialer_Occupied() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	config, err := store.TLS([]byte("sixteen bytes or more, known to all"), "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	network := &relay{}
	l, err := network.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	server := store.NewServer(store.Options{Size: 2})
	defer server.Close()
	server.Serve(l, config)

	dialer := store.Dialer{
		Addresses: []string{l.Addr().String()},
		TLS:       config,
		Name:      "rank 2",
		Size:      3, // the store's job has 2 ranks
		Network:   network,
	}
	_, err = dialer.Dial(ctx)
	fmt.Println(errors.Is(err, store.ErrRefused), errors.Is(err, comm.ErrTimeout), network.dialed.Load() > 0)
	if err := dialer.Occupied(ctx, l.Addr().String()); err == nil { // one glance, for a program that looks for a port
		return
	}
	// Output: true false true
}
