//go:build unix

package main

import (
	"context"
	"fmt"
	"os"

	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/tcp"
)

// roleVariable has the test binary be a rank: one that waits for the others again and again.
const roleVariable = "TUTTI_TEST_ROLE"

// work is what such a rank does.
func work() error {
	ctx := context.Background()
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return err
	}
	c, err := tcp.FromEnv(ctx)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // the error of the barrier is what counts
	for step := 0; ; step++ {
		if err := c.Barrier(ctx); err != nil {
			if _, ended := os.Stat("end"); ended == nil { // others have seen it
				return nil
			}
			return err
		}
		if step == 0 { // files say who is who, and that all are connected
			name := fmt.Sprintf("rank%d", job.Rank)
			if err := os.WriteFile(name, fmt.Append(nil, os.Getpid()), 0o600); err != nil {
				return err
			}
		}
		for _, name := range []string{"end", fmt.Sprintf("end%d", job.Rank)} {
			if _, err := os.Stat(name); err == nil {
				return nil
			}
		}
	}
}
