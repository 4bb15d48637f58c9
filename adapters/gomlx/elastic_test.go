package gomlx_test

import (
	"context"
	"errors"
	"io"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/adapters/gomlx"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// sameImage is a data set whose batches are all the same, so the average of two members' gradients has the bits of
// one.
func sameImage(t *testing.T, c comm.Communicator, image int) *gomlx.Dataset {
	const n = 64
	set, _, err := digits.Split(1)
	require.NoError(t, err)
	var images []float32
	labels := make([]int32, n)
	for i := range n {
		images, labels[i] = append(images, set.Image(image)...), int32(set.Labels[image])
	}
	data, err := gomlx.NewDataset(c, "image", []*tensors.Tensor{tensors.FromFlatDataAndDimensions(images, n, digits.Pixels)},
		[]*tensors.Tensor{tensors.FromFlatDataAndDimensions(labels, n, 1)}, 8, distributed.SamplerConfig{})
	require.NoError(t, err)
	return data
}

// TestElastic trains a with b, which is killed, and then with c, which starts with other variables. No step is lost
// or made twice: both end with the bits of GoMLX alone.
func TestElastic(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conf, err := store.TLS([]byte("a secret of tests"), "gomlx")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	defer server.Close()
	var end atomic.Int64
	end.Store(math.MaxInt64)
	steps, parameters := map[string]int{}, map[string][]float32{}
	var mu sync.Mutex
	adam := func() optimizer.Interface { return optimizer.Adam().LearningRate(0.01).Done() }
	// member trains until end, and calls each with the number of its steps.
	member := func(ctx context.Context, name string, seed int64, image int, each func(made, step int)) error {
		rt := cpu.New()
		alone := noop.New(rt)
		o, err := gomlx.New(ctx, alone, adam(), ddp.Config{})
		if err != nil {
			return err
		}
		x, err := newTraining(alone, o, 16, 1)
		if err != nil {
			return err
		}
		if err := x.variables.SetRNGStateFromSeed(seed); err != nil {
			return err
		}
		o.Attach(x.loop)
		made := 0
		x.loop.OnStart("end", 0, func(loop *train.Loop, _ train.Dataset) error {
			if int64(loop.LoopStep) >= end.Load() {
				return io.EOF
			}
			return nil
		})
		x.loop.OnStep("each", 0, func(loop *train.Loop, _ []*tensors.Tensor) error {
			made++
			each(made, loop.LoopStep+1)
			return nil
		})
		_, err = o.RunElastic(ctx, elastic.Config{Name: name, Min: 1, TLS: conf, Silence: time.Second,
			Dial: func(context.Context) (store.Store, error) { return server.Local(name), nil },
			Form: func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
				return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf, Listen: "localhost", Silence: time.Second})
			}}, x.loop, sameImage(t, alone, image), math.MaxInt)
		mu.Lock()
		defer mu.Unlock()
		steps[name], parameters[name] = x.loop.LoopStep, x.parameters()
		stats, failed := o.Stats()
		assert.Equal(t, image == 0, stats.SentBytes > 0, "members exchange gradients")
		return errors.Join(err, failed, o.Close(), alone.Close(), rt.Close())
	}
	var all sync.WaitGroup
	begun := make(chan struct{})
	all.Go(func() {
		assert.NoError(t, member(ctx, "a", 0, 0, func(made, _ int) {
			if made == 1 {
				close(begun)
			}
		}))
	})
	select {
	case <-begun: // with a's variables
	case <-ctx.Done():
		t.Fatal(ctx.Err())
	}
	assert.ErrorContains(t, member(ctx, "d", 1, 1, func(int, int) {}), "checksum(image)", "it has another image")
	killed, kill := context.WithCancel(ctx)
	assert.ErrorIs(t, member(killed, "b", 1, 0, func(made, _ int) {
		if made == 5 {
			kill()
		}
	}), context.Canceled)
	all.Go(func() {
		assert.NoError(t, member(ctx, "c", 2, 0, func(made, step int) {
			if made == 5 {
				end.Store(int64(step + 5))
			}
		}))
	})
	all.Wait()
	require.Equal(t, steps["a"], steps["c"])
	require.NoError(t, local.Run(t.Context(), 1, func(_ context.Context, c comm.Communicator) error {
		x, err := newTraining(c, adam(), 16, 1)
		if err != nil {
			return err
		}
		_, err = x.loop.RunSteps(sameImage(t, c, 0).Infinite(true), steps["a"])
		assert.Equal(t, x.parameters(), parameters["a"])
		assert.Equal(t, x.parameters(), parameters["c"])
		return err
	}))
}

// TestElasticTwice checks that a second run continues with the same reducer of gradients, and that nothing else of
// the first run is left.
func TestElasticTwice(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conf, err := store.TLS([]byte("a secret of tests"), "gomlx")
	require.NoError(t, err)
	rt := cpu.New()
	alone := noop.New(rt)
	o, err := gomlx.New(ctx, alone, optimizer.Adam().LearningRate(0.01).Done(), ddp.Config{})
	require.NoError(t, err)
	x, err := newTraining(alone, o, 16, 1)
	require.NoError(t, err)
	o.Attach(x.loop)
	data := sameImage(t, alone, 0)
	for _, until := range []int{3, 6} {
		server := store.NewServer(store.Options{})
		_, err = o.RunElastic(ctx, elastic.Config{Name: "a", Min: 1, TLS: conf,
			Dial: func(context.Context) (store.Store, error) { return server.Local("a"), nil },
			Form: func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
				return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf, Listen: "localhost"})
			}}, x.loop, data, until)
		require.NoError(t, err)
		server.Close()
		stats, err := o.Stats()
		require.NoError(t, err)
		assert.Equal(t, until, stats.Step+1, "steps are counted on")
	}
	_, err = x.loop.RunSteps(data, 1) // with its own communicator
	require.NoError(t, err)
	require.NoError(t, errors.Join(o.Close(), alone.Close(), rt.Close()))
}
