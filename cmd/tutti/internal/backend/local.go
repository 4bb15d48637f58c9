package backend

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// localBackend runs all ranks as goroutines of this process (comm/local).
var localBackend = Backend{
	Name:    "local",
	Summary: "goroutines of this process, shared memory",
	Probe:   probeLocal,
	Run:     runLocal,
}

// defaultLocalRanks is the world size if the user names none.
const defaultLocalRanks = 4

// MaxLocalRanks exceeds the number of processors of any machine. A world of 1024 ranks starts and reduces a buffer in
// a fraction of a second; one of 4096 takes ten seconds.
const MaxLocalRanks = 1024

func probeLocal(context.Context) (string, error) {
	return fmt.Sprintf("up to %d ranks (%d unless --ranks says otherwise)", MaxLocalRanks, defaultLocalRanks), nil
}

func runLocal(ctx context.Context, opts Options, body func(context.Context, Rank) error) error {
	ranks := opts.Ranks
	if ranks == 0 {
		ranks = defaultLocalRanks
	}
	if ranks > MaxLocalRanks {
		return &OptionError{
			Backend: "local",
			Reason:  fmt.Sprintf("--ranks %d, at most %d work in one process", ranks, MaxLocalRanks),
		}
	}
	if err := opts.prepare(); err != nil {
		return err
	}
	rt := cpu.New()
	err := local.Run(ctx, ranks, func(ctx context.Context, c comm.Communicator) error {
		return body(ctx, Rank{
			Comm:      bound(c, opts.Timeout),
			Runtime:   rt,
			HostRanks: ranks,
			limit:     opts.Timeout,
		})
	})
	return errors.Join(err, rt.Close())
}
