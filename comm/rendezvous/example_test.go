package rendezvous_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
)

// The launcher of a job describes this process: the environment of the second of two processes of torchrun stands for
// os.Getenv here.
func ExampleFromEnv() {
	environment := map[string]string{
		"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
		"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
		"TUTTI_SECRET": "known to these two",
	}
	job, err := rendezvous.FromEnv(func(name string) string { return environment[name] })
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s: rank %d of %d, the GPU with number %d\n", job.Launcher, job.Rank, job.WorldSize, job.LocalRank)
	// Output: torchrun: rank 1 of 2, the GPU with number 1
}

// The ranks meet, and rank 0 tells the others something when all have come, such as the identifier that they start
// NCCL with. A process without a launcher is a job of one.
func ExampleJob_Round() {
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	kv, err := job.Shared(ctx)
	if err != nil {
		log.Fatal(err)
	}
	err = job.Round(ctx, kv, "greetings", func(ctx context.Context, number string) error {
		key := "greeting/" + number
		if job.Rank == 0 {
			for _, arrival := range job.Arrivals("greetings", number) {
				if _, err := kv.Get(ctx, arrival); err != nil {
					return err
				}
			}
			if err := kv.Set(ctx, key, []byte("hello")); err != nil {
				return err
			}
		}
		greeting, err := kv.Get(ctx, key)
		fmt.Printf("%s, round %s\n", greeting, number)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: hello, round 1
}

// A job's ranks share keys for their own purposes.
func ExampleJob_Shared() {
	ctx := context.Background()
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		log.Fatal(err)
	}
	kv, err := job.Shared(ctx) // one connection per process, as long as the process lives
	if err != nil {
		log.Fatal(err)
	}
	err = kv.Set(ctx, fmt.Sprint("mine/ready/", job.Rank), []byte("yes"), store.Lease) // gone when this process is
	if err != nil {
		log.Fatal(err)
	}
	value, err := kv.Get(ctx, "mine/ready/0") // waits until rank 0 has set it, or ctx ends
	fmt.Printf("%s %v\n", value, err)
	// Output: yes <nil>
}

// A secret of the user's keeps other users of the machines out. It is made once, and copied to the other machines.
func ExampleReadSecret() {
	dir, err := os.MkdirTemp("", "secret")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "secret")
	created, err := rendezvous.ReadSecret(path, true)
	if err != nil {
		log.Fatal(err)
	}
	read, err := rendezvous.ReadSecret(path, false)
	fmt.Println(read == created, err)

	job := rendezvous.Job{WorldSize: 2, Address: "127.0.0.1:29400", Secret: []byte(read)}
	fmt.Println("all ranks on this host:", job.OneHost())

	if path, err = rendezvous.UserSecretFile(); err == nil {
		_ = path // where tutti launch keeps this user's secret
	}
	// Output:
	// true <nil>
	// all ranks on this host: true
}
