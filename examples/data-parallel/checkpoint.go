package main

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
)

// checkpoint is what is needed to go on as if nothing had been, on as many ranks, or
// on others. The parameters are the same on all ranks; what a rank has not sent yet,
// and its momentum, are its own.
type checkpoint struct {
	Epoch      int
	Parameters []float32
	Ranks      [][]byte // of each rank, the state of its exchange
}

// save gathers the states of the ranks on rank 0, which writes the file.
func save(ctx context.Context, rt runtime.Runtime, c comm.Communicator, s settings, epoch int, parameters []float32, exchange *sparse.Reducer) error {
	if s.checkpoint == "" {
		return nil
	}
	state, err := exchange.State(ctx)
	if err != nil {
		return err
	}
	states, err := distributed.GatherBytes(ctx, rt, c, state, 0)
	if err != nil || c.Rank() != 0 {
		return err
	}
	var file bytes.Buffer
	if err := gob.NewEncoder(&file).Encode(checkpoint{epoch, parameters, states}); err != nil {
		return err
	}
	// A file that is there is complete.
	if err := os.WriteFile(s.checkpoint+".new", file.Bytes(), 0o666); err != nil {
		return err
	}
	return os.Rename(s.checkpoint+".new", s.checkpoint)
}

// resume reads the file on rank 0, gives all ranks what is theirs, and returns the
// epoch to go on with: 0 if there is no file.
func resume(ctx context.Context, rt runtime.Runtime, c comm.Communicator, s settings, parameters []float32, exchange *sparse.Reducer) (int, error) {
	if s.checkpoint == "" {
		return 0, nil
	}
	var file []byte
	if c.Rank() == 0 {
		var err error
		if file, err = os.ReadFile(s.checkpoint); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
	}
	file, err := distributed.BroadcastBytes(ctx, rt, c, file, 0)
	if err != nil || len(file) == 0 {
		return 0, err
	}
	var all checkpoint
	if err := gob.NewDecoder(bytes.NewReader(file)).Decode(&all); err != nil {
		return 0, fmt.Errorf("%s: %w", s.checkpoint, err)
	}
	copy(parameters, all.Parameters)
	var mine [][]byte
	for _, rank := range sparse.RestoreRanks(len(all.Ranks), c.WorldSize(), c.Rank()) {
		mine = append(mine, all.Ranks[rank])
	}
	return all.Epoch, exchange.Restore(ctx, mine...)
}
