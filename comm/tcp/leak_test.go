package tcp

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// collect has the garbage collector look, and call what it calls of others.
func collect() {
	collected := make(chan bool)
	runtime.AddCleanup(new([64]byte), func(c chan bool) { close(c) }, collected)
	runtime.GC()
	<-collected
}

// forgetEarlierTests has the garbage collector find what earlier tests have lost, and what only that refers to.
func forgetEarlierTests() {
	for range 5 {
		collect()
	}
}

// A communicator that nobody closes is found when it is garbage, one that is closed is not.
func TestForgottenClose(t *testing.T) {
	forgetEarlierTests()
	log := logtest.Capture(t)
	found := func() bool {
		runtime.GC()
		return len(log.Lines("communicators were never closed")) > 0
	}
	create := func(closes bool) {
		c, err := New(context.Background(), nil, Config{WorldSize: 1})
		require.NoError(t, err)
		require.NoError(t, c.Barrier(t.Context()))
		if closes {
			require.NoError(t, c.Close())
		}
	}
	create(true)
	for range 3 {
		require.False(t, found())
	}
	create(false)
	require.Eventually(t, found, time.Minute, 10*time.Millisecond)
}

// A communicator that is being closed is not forgotten, though its handle is garbage while Close drains.
func TestCloseIsNotForgotten(t *testing.T) {
	forgetEarlierTests()
	log := logtest.Capture(t)
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	defer func() { require.NoError(t, server.Close()) }()
	comms := make([]comm.Communicator, 2)
	errs := make([]error, 2)
	var all sync.WaitGroup
	for rank := range comms {
		all.Go(func() {
			c := Config{Rank: rank, WorldSize: 2, TLS: conf, Listen: "localhost"}
			comms[rank], errs[rank] = New(t.Context(), server.Local("test"), c)
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	memory, err := rt.Allocate(16)
	require.NoError(t, err)
	peer := comms[1]
	require.NoError(t, comms[0].Recv(memory, 8, dtype.U8, 1, 0))
	began := make(chan bool)
	closed := make(chan error)
	go func(c comm.Communicator) {
		close(began)
		closed <- c.Close()
	}(comms[0])
	comms[0], comms[1] = nil, nil
	<-began
	for range 2 { // what lies on a stack that is being left is found by the second
		collect()
	}
	require.NoError(t, peer.Send(memory+8, 8, dtype.U8, 0, 0))
	require.NoError(t, <-closed)
	require.NoError(t, peer.Close())
	require.NoError(t, rt.Deallocate(memory))
	require.Empty(t, log.Lines("never closed"))
}
