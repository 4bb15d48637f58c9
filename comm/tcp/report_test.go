package tcp

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/fault"
)

// deaf is a launcher that has heard something, and does not answer.
type deaf struct {
	posted []string // keys, in order
	waited []string // likewise, of what waited for an answer
}

func (d *deaf) Post(key string, _ []byte, _ ...store.Option) { d.posted = append(d.posted, key) }

func (d *deaf) Set(ctx context.Context, key string, _ []byte, _ ...store.Option) error {
	if _, bounded := ctx.Deadline(); !bounded {
		return errors.New("a wait without a bound")
	}
	d.waited = append(d.waited, key)
	return context.DeadlineExceeded
}

// A launcher that does not answer holds a rank up once, however many others the rank reports.
func TestReportsWaitOnce(t *testing.T) {
	d := new(deaf)
	report := reporter(d)
	var list []fault.Report
	var keys []string
	for about := range 500 {
		r := fault.Report{By: 500, About: about, Reason: "a test"}
		list = append(list, r)
		keys = append(keys, r.Key())
	}
	report(nil)
	report(list)
	assert.Equal(t, keys[:499], d.posted)
	assert.Equal(t, keys[499:], d.waited)
	report(list[:1])
	assert.Len(t, d.posted, 500)
	assert.Len(t, d.waited, 1)
}

// Signs of life to others, and what writes under locks, do not wait for the launcher. The peer is lost when that knows.
func TestReportsBesideOthers(t *testing.T) {
	broken := errors.New("broken")
	for name, lose := range map[string]func(p *pair){
		"nothing has come": func(p *pair) {
			p.node.countSilence()
			p.beat(p.node.ticks.Add(100), 2)
		},
		"broken": func(p *pair) {
			p.lanes[0].secure = severed{err: broken}
			p.quiet()
			p.lanes[0].write(true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, _ := newEarly(1 << 20)
			p.node.rank = 1
			begun := make(chan []fault.Report)
			answer := make(chan struct{})
			p.node.report = func(list []fault.Report) {
				begun <- list
				<-answer
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				lose(p)
			}()
			list := <-begun
			require.Len(t, list, 1)
			assert.Contains(t, list[0].Reason, name)
			select {
			case <-done:
			case <-time.After(time.Minute):
				assert.Fail(t, "it waits for the launcher")
			}
			p.mu.Lock()
			assert.NoError(t, p.gone, "the launcher does not know it yet")
			p.mu.Unlock()
			close(answer)
			<-p.dead
			assert.ErrorContains(t, p.gone, name)
		})
	}
}

// severed is a connection over which nothing can be sent.
type severed struct {
	script
	err error
}

func (s severed) Write([]byte) (int, error) { return 0, s.err }

// A rank that was never connected to others has no lock when it says so.
func TestUnreachedWithoutLock(t *testing.T) {
	n := &node{rank: 1, size: 4}
	for rank := range n.size {
		n.pairs = append(n.pairs, newPair(n, rank))
	}
	k := &connector{node: n}
	var about []int
	n.report = func(list []fault.Report) {
		if !assert.True(t, k.mu.TryLock()) {
			return
		}
		defer k.mu.Unlock()
		for _, r := range list {
			about = append(about, r.About)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	err := k.failure(ctx, missingRanks{unreached: []int{0, 2, 3}}, nil)
	assert.ErrorContains(t, err, fmt.Sprint("no connection to ranks 0, 2"))
	assert.Equal(t, []int{0, 2, 3}, about)
}
