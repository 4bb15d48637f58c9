//go:build simulated

package simulation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/peers"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/sim"
)

// sharePayload gives all ranks rank 0's payload of a round. Rank 0 returns when they have it.
func sharePayload(ctx context.Context, kv *store.Client, job rendezvous.Job, payload []byte) (got []byte, err error) {
	var key string
	err = job.Round(ctx, kv, "payload", func(ctx context.Context, number string) (err error) {
		key = "payload/" + number
		if job.Rank > 0 {
			got, err = kv.Get(ctx, key)
			return err
		}
		for _, arrival := range job.Arrivals("payload", number) {
			if _, err := kv.Get(ctx, arrival); err != nil {
				return err
			}
		}
		got = payload
		return kv.Set(ctx, key, payload)
	})
	if err != nil {
		return nil, err
	}
	receipt := func(rank int) string { return fmt.Sprint(key, "/", rank) }
	if job.Rank > 0 {
		return got, kv.Set(ctx, receipt(job.Rank), nil)
	}
	for rank := 1; rank < job.WorldSize; rank++ {
		if _, err := kv.Get(ctx, receipt(rank)); err != nil {
			return nil, fmt.Errorf("the receipt of rank %d: %w", rank, err)
		}
		kv.Drop(receipt(rank))
	}
	kv.Drop(key)
	return got, nil
}

// playRendezvous has ranks share rank 0's store, get its payloads, and tell each other of an abort. A rank may come
// late, come twice, not come, be killed, or abort. Other processes may have rank 0's port.
func playRendezvous(p *play) {
	const patience = 12 * time.Second
	size := 2 + p.IntN(3)
	nodes := p.nodes(size)
	kind, victim := []string{"", "late", "kill", "missing", "twice", "taken", "abort"}[p.IntN(7)], p.IntN(size)
	job := rendezvous.Job{WorldSize: size, Address: nodes[0].Host() + ":29500", Secret: []byte("a secret of tests, long enough as it is")}
	if kind == "taken" {
		p.together(nodes[:1], func(int) { must(sim.Listen("tcp", job.Address)) })
	}
	ends, rounds := make([]bool, size), 1+p.IntN(4)
	killed := make(chan struct{}, 1)
	sim.AfterFunc(p.Between(0, 40*time.Millisecond)>>p.IntN(4), func() {
		if kind == "kill" && !ends[victim] {
			p.Kill(nodes[victim], false)
			killed <- struct{}{}
		}
	})
	aborted := false // all ranks know it
	errs, began := make([]error, size), time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	life := func(rank int) error {
		if rank == victim && kind == "late" {
			sim.Sleep(p.Between(0, 5*time.Second))
		}
		job := job
		job.Rank = rank
		kv, err := job.Connect(ctx)
		if err != nil {
			return err
		}
		defer func() {
			for others := true; others && rank == 0 && ctx.Err() == nil; sim.Sleep(time.Millisecond) { // they need the store
				others = false
				for other, ended := range ends {
					others = others || other > 0 && !ended && !(kind == "kill" && other == victim)
				}
			}
			p.within(5*time.Second, "Close of a client", func() { _ = kv.Close() })
		}()
		if rank == victim && kind == "twice" {
			if again, err := job.Connect(ctx); !errors.Is(err, store.ErrRefused) && rank > 0 {
				p.fail("rank %d is there twice: %v, %v", rank, again, err)
			} else if rank == 0 && err == nil {
				p.fail("there are two stores")
			}
		}
		status := func(rank int) string { return fmt.Sprintf("number %d is busy", rank) }
		group := peers.Join(ctx, kv, "group", rank, size, func() string { return status(rank) })
		defer group.Leave()
		abort := func() (text string) {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			p.within(2*time.Second, "telling of an abort", func() { text = group.Abort(ctx, "has had enough", 3) })
			return text
		}
		for round := range rounds {
			payload := bytes.Repeat([]byte{byte(sim.Mix(p.Seed, uint64(round)))}, round<<(4*(p.Seed%4)))
			got, err := sharePayload(ctx, kv, job, payload)
			if err != nil {
				if kind == "kill" {
					abort()
				}
				return err
			}
			if !bytes.Equal(got, payload) {
				p.fail("rank %d got %d bytes in round %d, expected %d", rank, len(got), round, len(payload))
			}
		}
		if kind != "abort" {
			return nil
		}
		if rank == victim {
			text := abort()
			for other := range size {
				if other != rank && ctx.Err() == nil && !strings.Contains(text, status(other)) {
					p.fail("rank %d has aborted, and rank %d did not answer: %s", rank, other, text)
				}
			}
			aborted = true
		}
		for !aborted {
			sim.Sleep(time.Millisecond)
		}
		failed := group.Failed(4)
		if rank != victim && (!errors.Is(failed, comm.ErrPeerFailed) || !names(failed, victim)) {
			p.fail("rank %d does not know that rank %d has aborted: %v", rank, victim, failed)
		}
		if before := group.Failed(3); before != nil {
			p.fail("rank %d: what was done before the abort has failed: %v", rank, before)
		}
		group.Leave()
		// Only the notice and the run's name stay until rank 0's process ends.
		for began := time.Now(); rank == 0; sim.Sleep(time.Millisecond) {
			all, err := kv.List(ctx, "")
			if err != nil || time.Since(began) > 3*time.Second {
				p.fail("after all have left there is %v, %v", all, err)
			}
			all = slices.DeleteFunc(all, func(e store.Entry) bool {
				return e.Key == "run" || strings.HasPrefix(e.Key, "round/") || strings.HasPrefix(e.Key, "peers/notice/")
			})
			if len(all) == 0 {
				break
			}
		}
		return nil
	}
	all := make(chan int, size)
	for rank, node := range nodes {
		if rank == victim && kind == "missing" {
			ends[rank] = true
			all <- rank
			continue
		}
		sim.GoOn(node, func() {
			defer func() { ends[rank] = true; all <- rank }()
			errs[rank] = life(rank)
			p.Event("rank %d ends: %v", rank, errs[rank])
			if took := time.Since(began); took > patience+4*time.Second && !(kind == "kill" && rank == victim) {
				p.fail("rank %d ends after %v", rank, took)
			}
		})
	}
	p.together([]*sim.Node{p.NewNode("watch")}, func(int) {
		late, dead := time.After(patience+6*time.Second), false
		for left := size; left > 0; {
			if left == 1 && dead && !ends[victim] {
				p.Bury(nodes[victim])
			}
			select {
			case <-all:
				left--
			case <-killed:
				dead = true
			case <-late:
				p.fail("ranks have not ended: %v", ends)
			}
		}
	})
	lost := kind == "kill" || kind == "missing"
	for rank, err := range errs {
		switch {
		case err == nil:
		case !lost:
			p.fail("rank %d failed, though nothing was lost: %v", rank, err)
		case rank == 0 && victim > 0 && !strings.Contains(err.Error(), fmt.Sprint(victim)):
			p.fail("rank 0 does not name rank %d: %v", victim, err)
		case rank != victim && !errors.Is(err, comm.ErrPeerFailed) && !errors.Is(err, comm.ErrTimeout):
			p.fail("rank %d: an error of another kind: %v", rank, err)
		}
	}
	sim.Sleep(15 * time.Second)
}
