package tcp_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/tcp"
)

// The communicator of the job that a launcher started: without one, a world of one rank.
func ExampleFromEnv() {
	ctx := context.Background()
	c, err := tcp.FromEnv(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	fmt.Println(c.Rank(), c.WorldSize())
	// Output: 0 1
}

// Two machines without a launcher: each process knows its rank, the address of rank 0 and the secret. Two goroutines
// stand for the machines here.
func ExampleNew() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	address := freeAddress() // 192.168.1.5:29400 between machines
	ranks := make(chan error, 2)
	for rank := range 2 {
		go func() { ranks <- machine(ctx, rank, address) }()
	}
	for range 2 {
		if err := <-ranks; err != nil {
			fmt.Println(err)
		}
	}
	// Output: 2 ranks are connected
}

// machine is what each of the machines runs.
func machine(ctx context.Context, rank int, address string) error {
	job := rendezvous.Job{
		Rank:      rank,
		WorldSize: 2,
		Address:   address, // of rank 0
		Secret:    []byte("sixteen bytes or more, known to both"),
	}
	kv, err := job.Connect(ctx)
	if err != nil {
		return err
	}
	defer kv.Close()
	config, err := job.TLS("comm/tcp")
	if err != nil {
		return err
	}
	c, err := tcp.New(ctx, kv, tcp.Config{Rank: rank, WorldSize: 2, TLS: config})
	if err != nil {
		return err
	}
	return comm.Run(ctx, []comm.Communicator{c}, func(ctx context.Context, c comm.Communicator) error {
		if err := c.Barrier(ctx); err != nil {
			return err
		}
		if c.Rank() == 0 {
			fmt.Println(c.WorldSize(), "ranks are connected")
		}
		return nil
	})
}

// freeAddress is one where nobody listens.
func freeAddress() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// The network settings of a program that makes its own configuration come from the environment too.
func ExampleConfig_ReadEnv() {
	environment := map[string]string{"TUTTI_TCP_SILENCE": "30s", "TUTTI_TCP_CONNECTIONS": "2"}
	var config tcp.Config
	err := config.ReadEnv(func(name string) string { return environment[name] }, 0) // os.Getenv
	fmt.Println(config.Silence, config.Connections, err)
	// Output: 30s 2 <nil>
}
