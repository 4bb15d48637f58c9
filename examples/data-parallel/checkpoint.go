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
	"github.com/tutti-go/tutti/runtime"
)

// checkpoint is what is needed to go on as if nothing had been. The parameters are
// the same on all ranks; what the others are to each rank is its own.
type checkpoint struct {
	Epoch      int
	Parameters []float32
	Ranks      [][]byte // of each rank, an ofRank
}

// ofRank is a rank's own part: what it has not sent yet.
type ofRank struct {
	Velocity []float32
	Exchange []byte // residual, thresholds, number of the step
}

// save gathers the ranks' parts on rank 0, which writes the file.
func save(ctx context.Context, rt runtime.Runtime, c comm.Communicator, s settings, epoch int, parameters, velocity []float32, exchange *distributed.Sparse) error {
	if s.checkpoint == "" {
		return nil
	}
	state, err := exchange.State(ctx)
	if err != nil {
		return err
	}
	var mine bytes.Buffer
	if err := gob.NewEncoder(&mine).Encode(ofRank{velocity, state}); err != nil {
		return err
	}
	ranks, err := distributed.GatherBytes(ctx, rt, c, mine.Bytes(), 0)
	if err != nil || c.Rank() != 0 {
		return err
	}
	var all bytes.Buffer
	if err := gob.NewEncoder(&all).Encode(checkpoint{epoch, parameters, ranks}); err != nil {
		return err
	}
	// A file that is there is complete.
	if err := os.WriteFile(s.checkpoint+".new", all.Bytes(), 0o666); err != nil {
		return err
	}
	return os.Rename(s.checkpoint+".new", s.checkpoint)
}

// resume reads the file on rank 0, gives all ranks what is theirs, and returns the
// epoch to go on with: 0 if there is no file.
func resume(ctx context.Context, rt runtime.Runtime, c comm.Communicator, s settings, parameters, velocity []float32, exchange *distributed.Sparse) (int, error) {
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
	if len(all.Ranks) != c.WorldSize() {
		return 0, fmt.Errorf("%s is of %d ranks, these are %d", s.checkpoint, len(all.Ranks), c.WorldSize())
	}
	var mine ofRank
	if err := gob.NewDecoder(bytes.NewReader(all.Ranks[c.Rank()])).Decode(&mine); err != nil {
		return 0, fmt.Errorf("%s: %w", s.checkpoint, err)
	}
	copy(parameters, all.Parameters)
	copy(velocity, mine.Velocity)
	return all.Epoch, exchange.Restore(ctx, mine.Exchange)
}
