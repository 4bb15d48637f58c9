package elastic_test

import (
	"bytes"
	"context"
	"encoding/gob"
	"math/rand/v2"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
)

// trainer is what members train with: gradients, and a generator of random numbers that all members have alike.
type trainer struct {
	*ddp.Gradients
	random *rand.PCG
}

// shared is what a joining member needs.
type shared struct {
	Random, Gradients []byte
}

// SharedState implements [elastic.Trainer].
func (t *trainer) SharedState(ctx context.Context) ([]byte, error) {
	random, err := t.random.MarshalBinary()
	if err != nil {
		return nil, err
	}
	gradients, err := t.Gradients.SharedState(ctx)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = gob.NewEncoder(&b).Encode(shared{random, gradients})
	return b.Bytes(), err
}

// Restore implements [elastic.Trainer].
func (t *trainer) Restore(ctx context.Context, states ...[]byte) error {
	var s shared
	if err := gob.NewDecoder(bytes.NewReader(states[0])).Decode(&s); err != nil {
		return err
	}
	if err := t.random.UnmarshalBinary(s.Random); err != nil {
		return err
	}
	return t.Gradients.Restore(ctx, s.Gradients)
}

// A program with additional state embeds the trainer that reduces its gradients.
func ExampleTrainer() {
	var _ elastic.Trainer = &trainer{}
}
