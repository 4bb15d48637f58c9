package commtest

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// suite is one backend under test.
type suite struct {
	Backend
	config
}

func newSuite(b Backend, opts ...Option) *suite {
	s := &suite{Backend: b, config: config{timeout: time.Minute}}
	for _, o := range opts {
		o(&s.config)
	}
	return s
}

// testCase is one named part of the suite. Its body runs on every rank of a
// world; all ranks go through the same communication, whatever they find.
type testCase struct {
	name  string
	body  func(p *probe)
	needs need
	// minRanks is the smallest world in which the case means anything.
	minRanks int
	// once says that the smallest world of several ranks is enough: the case takes long, and shows
	// nothing else in others.
	once bool
}

// skip returns why the case does not run, or "".
func (c testCase) skip(b Backend, size int) string {
	if size < c.minRanks {
		return fmt.Sprintf("needs at least %d ranks", c.minRanks)
	}
	if smallest := b.smallestWorld(); c.once && smallest > 0 && size != smallest {
		return fmt.Sprintf("runs with %d ranks", smallest)
	}
	if c.needs.lacks != nil && c.needs.lacks(b) {
		return c.needs.reason
	}
	return ""
}

// smallestWorld is the size of the smallest world of several ranks, or of the only one.
func (b Backend) smallestWorld() int {
	smallest := 0
	for _, size := range b.Sizes {
		if smallest <= 1 || 1 < size && size < smallest {
			smallest = size
		}
	}
	return smallest
}

// need is something that not all backends have. The zero need is nothing.
type need struct {
	lacks  func(b Backend) bool
	reason string // why those that lack it skip a case
}

// cases is the suite, in the order in which it runs.
var cases = slices.Concat(
	reductionCases,
	movementCases,
	messageCases,
	orderingCases,
	contractCases,
	splitCases,
	treeCases,
	misuseCases,
	closingCases,
	faultCases,
	abortCases,
	streamCases,
	longCases,
)

// run executes one case in a world of the given size and returns everything
// that the ranks of this process found wrong, or why they skipped it.
func (s *suite) run(ctx context.Context, c testCase, size int) (skipped string, err error) {
	limit := s.timeout
	if c.once { // it makes calls by the ten thousand, which take long where others use the processors
		limit *= 5
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var reason atomic.Value
	done := make(chan error, 1)
	go func() {
		done <- s.Run(ctx, size, func(ctx context.Context, r Rank) error {
			if r.Comm.WorldSize() != size {
				return fmt.Errorf("world has %d ranks, want %d", r.Comm.WorldSize(), size)
			}
			p := newProbe(ctx, s, r)
			err := p.guard(func() { c.body(p) })
			if p.skipped != "" {
				reason.Store(p.skipped)
			}
			return err
		})
	}()
	grace := limit / 4
	hang := time.NewTimer(limit + grace)
	defer hang.Stop()
	select {
	case err = <-done:
	case <-hang.C:
		err = fmt.Errorf("%s: ranks still running %v after the deadline of %v", c.name, grace, limit)
	}
	skipped, _ = reason.Load().(string)
	return skipped, err
}
