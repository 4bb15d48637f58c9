package tailnet_test

import (
	"context"
	"log"
	"os"

	"tailscale.com/tsnet"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/adapters/tailnet"
)

// A rank joins a tailnet under its own name, with a key from its environment.
func Example() {
	ctx := context.Background()
	server := &tsnet.Server{
		Hostname:  "rank" + os.Getenv("RANK"),
		Ephemeral: true,
	}
	network, err := tailnet.Up(ctx, server)
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	err = tutti.Config{Network: network}.Run(ctx, func(ctx context.Context, r tutti.Rank) error {
		return r.Comm.Barrier(ctx) // the training
	})
	if err != nil {
		log.Fatal(err)
	}
}
