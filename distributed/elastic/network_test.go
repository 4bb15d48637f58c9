package elastic

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/internal/networktest"
)

// TestNetwork: members whose store and communicators are over a network of the program's lose all their connections
// several times. They dial again, and end with the values of the members that made each step.
func TestNetwork(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var mu sync.Mutex
	var conns []net.Conn
	network := &networktest.Pipes{Conn: func(conn net.Conn) net.Conn {
		mu.Lock()
		defer mu.Unlock()
		conns = append(conns, conn)
		return conn
	}}
	lose := func() {
		mu.Lock()
		defer mu.Unlock()
		for _, conn := range conns {
			_ = conn.Close()
		}
		conns = nil
	}
	l, err := network.Listen("tcp", ":1")
	require.NoError(t, err)
	server := store.NewServer(store.Options{Silence: time.Minute})
	server.Serve(l, conf)
	defer func() { assert.NoError(t, server.Close()) }()

	const members, steps, losses = 2, 40, 3
	log := newReplay()
	var all sync.WaitGroup
	list := make([]*trainee, members)
	lost := map[uint64]bool{}
	for i := range list {
		dialer := store.Dialer{Addresses: []string{"store:1"}, TLS: conf, Name: name(i), Network: network}
		list[i] = newTrainee(t, log, Config{
			Name: name(i),
			Min:  members,
			Dial: func(ctx context.Context) (store.Store, error) {
				kv, err := dialer.Dial(ctx)
				if err != nil {
					return nil, err
				}
				return kv, nil
			},
			Form: func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
				return tcp.New(ctx, kv, tcp.Config{
					Rank:      p.Rank,
					WorldSize: p.Size,
					World:     p.World,
					TLS:       conf,
					Silence:   silence,
					Network:   network,
				})
			},
		})
		all.Go(func() {
			err := list[i].run(ctx, t, func(e *Epoch, made int) bool {
				if i == 0 && made == 5 && len(lost) < losses && !lost[e.Number] {
					lost[e.Number] = true
					lose()
				}
				return list[i].Steps() >= steps
			})
			assert.NoError(t, err, fmt.Sprint("member ", i))
		})
	}
	all.Wait()
	require.Len(t, lost, losses)
	log.repeat(t, list[0].steps, list)
	for _, a := range list {
		assert.NoError(t, a.Close())
	}
}
