package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/fault"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/ranks"
	"github.com/tutti-go/tutti/internal/waiting"
)

// Keys in the store, before the purpose of a round.
const (
	countKeys   = "round/count/"   // how many rounds rank 0 has begun
	currentKeys = "round/current/" // the number of the round that rank 0 is in, leased by it
	arrivalKeys = "round/arrived/" // then the number of the round, and the rank
)

// completed is the value of a rank's arrival when its attempt has succeeded. Rank 0 may be in the round for longer.
const completed = "completed"

var (
	// errLaterRound ends an attempt in a round that rank 0 has left.
	errLaterRound = errors.New("rank 0 has begun a later round")
	errCompleted  = errors.New("this rank has completed the round")
)

// Round lets the ranks of a job meet in the store, under a number that no earlier round of the purpose had. All ranks
// call it, for one purpose in the same order, and it calls attempt with the number. If attempt fails because ctx has
// ended, the error names the ranks that did not come.
//
// A rank may try again after an error. When rank 0 does, it begins a round with another number: attempts of other
// ranks in the earlier round are canceled, and made again in the later one.
//
// The attempt of rank 0 must not succeed before those of the other ranks have begun ([Job.Arrivals]), because the
// number goes with it. Nor may rank 0 begin another round after a success before the other ranks have returned from
// Round: run a collective over the result of the attempts in between.
func (j Job) Round(ctx context.Context, kv *store.Client, purpose string,
	attempt func(ctx context.Context, number string) error) error {
	ctx, cancel := waiting.Bounded(ctx, j.Patience)
	defer cancel()
	r := round{Job: j, kv: kv, purpose: purpose, attempt: attempt}
	if j.Rank == 0 {
		return r.lead(ctx)
	}
	return r.follow(ctx)
}

// Arrivals are keys in the store, by rank. Each exists once its rank has come to a round.
func (j Job) Arrivals(purpose, number string) (keys []string) {
	for rank := range j.WorldSize {
		keys = append(keys, arrival(purpose, number, rank))
	}
	return keys
}

func arrival(purpose, number string, rank int) string {
	return fmt.Sprintf("%s%s/%s/%d", arrivalKeys, purpose, number, rank)
}

// round is a call of [Job.Round].
type round struct {
	Job
	kv      *store.Client                                  // session with the job's store
	purpose string                                         // what the ranks meet for
	attempt func(ctx context.Context, number string) error // an attempt under a number; the same on all ranks
}

// lead is the side of rank 0.
func (r *round) lead(ctx context.Context) error {
	count, err := r.kv.Add(ctx, countKeys+r.purpose, 1)
	if err != nil {
		return r.fail(err)
	}
	earlier, err := r.kv.List(ctx, arrivalKeys+r.purpose+"/")
	if err != nil {
		return r.fail(err)
	}
	for _, e := range earlier {
		r.kv.Drop(e.Key)
	}
	number := strconv.FormatInt(count, 10)
	if err := r.kv.Set(ctx, currentKeys+r.purpose, []byte(number), store.Lease); err != nil {
		return r.fail(err)
	}
	defer r.kv.Drop(currentKeys + r.purpose)
	return r.try(ctx, number)
}

// follow is the side of the other ranks.
func (r *round) follow(ctx context.Context) error {
	numbers := make(chan string, 1) // the last one that rank 0 has set, unless it is received already
	stop, err := r.kv.Watch(ctx, currentKeys+r.purpose, func(e store.Event) {
		if e.Key != currentKeys+r.purpose || e.Deleted {
			return
		}
		select {
		case <-numbers:
		default:
		}
		numbers <- string(e.Value)
	})
	if err != nil {
		return r.fail(err)
	}
	defer stop()
	reminder := waiting.Remind()
	defer reminder.Stop()
	number := "" // of no round
	atRank0 := r.waits(func() string {
		return fmt.Sprintf("waiting for %s to begin %s", r.leader(ctx), r.purpose)
	})
	defer func() { atRank0() }()
	for {
		for number == "" {
			select {
			case number = <-numbers:
			case <-reminder.C:
				waited := reminder.Next()
				slog.Warn("rendezvous: waiting for "+r.leader(ctx), "rank", r.Rank, "for", r.purpose, "waited", waited)
			case <-r.kv.Done():
				return r.fail(r.kv.Err())
			case <-ctx.Done():
				return &leaderless{fmt.Errorf("rendezvous: %s did not come: %w", r.leader(ctx), comm.ContextError(ctx))}
			}
		}
		atRank0()
		next, err := r.tryUntil(ctx, number, numbers)
		if err != errLaterRound && err != errCompleted {
			return err
		}
		number = next
	}
}

// leaderless is the error of a rank whose context has ended before rank 0 came.
type leaderless struct{ error }

// Unwrap returns the cause.
func (l *leaderless) Unwrap() error { return l.error }

// MissingRanks returns the ranks that have not come.
func (l *leaderless) MissingRanks() []int { return []int{0} }

// tryUntil makes an attempt in a round until rank 0 begins another one: the error is errLaterRound then, and next the
// number of that round. An attempt that has succeeded counts all the same.
func (r *round) tryUntil(ctx context.Context, number string, numbers <-chan string) (next string, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	tried := make(chan error, 1)
	go func() { tried <- r.try(ctx, number) }()
	select {
	case err := <-tried:
		return "", err
	case next := <-numbers:
		cancel(errLaterRound)
		if <-tried == nil {
			return "", nil
		}
		return next, errLaterRound
	}
}

// try makes an attempt in a round.
func (r *round) try(ctx context.Context, number string) error {
	if _, err := strconv.ParseUint(number, 10, 63); err != nil {
		return r.fail(fmt.Errorf("the number of a round: %w", err))
	}
	// No lease: the process of a rank that came may have ended when another rank says who is missing. Rank 0 clears
	// the keys when it begins the next round.
	key := arrival(r.purpose, number, r.Rank)
	now, _, err := r.kv.CompareAndSet(ctx, key, 0, nil)
	if err != nil {
		return r.fail(err)
	}
	if string(now.Value) == completed {
		return errCompleted
	}
	finished := r.remind(ctx, number)
	waited := r.waits(func() string {
		a := r.missing(ctx, number)
		if a.missing == nil {
			return "in the rendezvous of " + r.purpose + ", to which all ranks have come"
		}
		return fmt.Sprintf("in the rendezvous of %s, to which %v did not come yet", r.purpose, a)
	})
	err = r.attempt(ctx, number)
	waited()
	finished()
	if err == nil {
		r.kv.Post(key, []byte(completed))
		return nil
	}
	if ctx.Err() == nil || context.Cause(ctx) == errLaterRound {
		return err // nobody is known to be missing
	}
	a := r.missing(ctx, number)
	if a.missing == nil {
		return err
	}
	if a.refused != "" {
		err = fmt.Errorf("%w; refused: %s", err, a.refused)
	}
	return fmt.Errorf("rendezvous: %v did not come: %w", a, err)
}

// remind says which ranks have not come to a round, until finished is called.
func (r *round) remind(ctx context.Context, number string) (finished func()) {
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		reminder := waiting.Remind()
		defer reminder.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-reminder.C:
			}
			waited := reminder.Next()
			if a := r.missing(ctx, number); a.missing != nil {
				slog.Warn("rendezvous: waiting for ranks that have not come",
					"rank", r.Rank, "missing", a.String(), "for", r.purpose, "waited", waited)
			}
		}
	})
	return func() {
		cancel()
		done.Wait()
	}
}

// absence is which ranks did not come to a round, and what is known of why.
type absence struct {
	missing []int  // nil if none is known to be
	ended   []int  // those of them that have ended with success, as a launcher says
	refused string // the last process that the store has refused, with the reason; "" for none
}

// String names the ranks.
func (a absence) String() string {
	switch {
	case len(a.ended) == 0:
		return ranks.Text(a.missing)
	case len(a.ended) == len(a.missing):
		return ranks.Text(a.missing) + " (ended with success)"
	}
	return fmt.Sprintf("%s (%s ended with success)", ranks.Text(a.missing), ranks.Text(a.ended))
}

// missing returns which ranks did not come to a round, if that can still be found out when ctx has ended.
func (r *round) missing(ctx context.Context, number string) (a absence) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), missingTimeout)
	defer cancel()
	arrivals, _ := r.kv.List(ctx, arrivalKeys+r.purpose+"/"+number+"/")
	arrived := map[string]bool{}
	for _, e := range arrivals {
		arrived[e.Key] = true
	}
	if !arrived[arrival(r.purpose, number, r.Rank)] {
		return a // the store is lost, or a later round has begun
	}
	for rank, key := range r.Arrivals(r.purpose, number) {
		if !arrived[key] {
			a.missing = append(a.missing, rank)
		}
	}
	a.ended = r.ended(ctx, a.missing)
	if all, _ := r.kv.List(ctx, store.RefusedKey); len(all) > 0 {
		a.refused = printable.Text(string(all[0].Value))
	}
	return a
}

// ended returns which of some ranks have ended with success, as a launcher says.
func (r *round) ended(ctx context.Context, missing []int) (ended []int) {
	listed, _ := r.kv.List(ctx, fault.EndedPrefix)
	for _, e := range listed {
		if rank, ok := fault.EndedRank(e.Key, r.WorldSize); ok && slices.Contains(missing, rank) {
			ended = append(ended, rank)
		}
	}
	slices.Sort(ended)
	return ended
}

// leader names rank 0, which has not come, and says if it has ended, also when ctx has.
func (r *round) leader(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), missingTimeout)
	defer cancel()
	leader := []int{0}
	return absence{missing: leader, ended: r.ended(ctx, leader)}.String()
}

// fail adds who fails to an error of the store.
func (r *round) fail(err error) error {
	return fmt.Errorf("rendezvous: rank %d: %w", r.Rank, err)
}
