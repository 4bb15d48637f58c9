package main

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
)

// checkpoint is the state from which a training continues as if it had not stopped, on the same or another number of
// ranks. The parameters are the same on all ranks; each rank has its own residual and momentum.
type checkpoint struct {
	Epoch      int       // next epoch
	Parameters []float32 // of the model
	Ranks      [][]byte  // by rank: the state of its exchange
}

// save gathers the states of the ranks on rank 0, which writes the file.
func save(
	ctx context.Context,
	rt runtime.Runtime,
	c comm.Communicator,
	s settings,
	epoch int,
	parameters []float32,
	exchange *sparse.Reducer,
) error {
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
	return atomicfile.Write(s.checkpoint, func(w io.Writer) error {
		return gob.NewEncoder(w).Encode(checkpoint{epoch, parameters, states})
	})
}

// resume reads the file on rank 0, distributes the state, and returns the next epoch: 0 if there is no file.
func resume(
	ctx context.Context,
	rt runtime.Runtime,
	c comm.Communicator,
	s settings,
	parameters []float32,
	exchange *sparse.Reducer,
) (int, error) {
	if s.checkpoint == "" {
		return 0, nil
	}
	var message []byte
	if c.Rank() == 0 {
		var err error
		if message, err = announce(s.checkpoint); err != nil {
			return 0, err
		}
	}
	message, err := distributed.BroadcastBytes(ctx, rt, c, message, 0)
	if err != nil {
		return 0, err
	}
	if message[0] == absent {
		return 0, nil
	}
	var all checkpoint
	if err := gob.NewDecoder(bytes.NewReader(message[1:])).Decode(&all); err != nil {
		return 0, fmt.Errorf("%s is not a checkpoint, or not all of it: %w", s.checkpoint, err)
	}
	if len(all.Parameters) != len(parameters) || len(all.Ranks) == 0 {
		return 0, fmt.Errorf("%s is of another network: it has %d parameters and the states of %d ranks",
			s.checkpoint, len(all.Parameters), len(all.Ranks))
	}
	copy(parameters, all.Parameters)
	var states [][]byte
	for _, rank := range sparse.RestoreRanks(len(all.Ranks), c.WorldSize(), c.Rank()) {
		states = append(states, all.Ranks[rank])
	}
	return all.Epoch, exchange.Restore(ctx, states...)
}

// Values of the first byte of rank 0's message.
const (
	absent  = iota // there is no file
	present        // its content follows and may be empty
)

// announce returns rank 0's message about the file.
func announce(path string) ([]byte, error) {
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		// Without the directory, the first epoch would be lost.
		_, err = os.Stat(filepath.Dir(path))
		return []byte{absent}, err
	}
	return append([]byte{present}, content...), err
}
