package elastic

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// epochOf makes an epoch of members of one letter.
func epochOf(number uint64, members string) *record {
	r := &record{Number: number, World: fmt.Sprint(number, members)}
	for _, c := range members {
		r.Members = append(r.Members, person{Name: string(c), Incarnation: "1"})
	}
	return r
}

// at is a member at the boundary behind an epoch, nil for one that joins.
func at(name string, entered *record, change ...func(s *status)) status {
	s := status{Name: name, Incarnation: "1", Standing: joining}
	if entered != nil {
		s.Standing = boundary
		s.Entered = entered.World
		s.Formed = entered.World
		s.Step = 7
	}
	for _, c := range change {
		c(&s)
	}
	return s
}

func withResult(s *status) { s.Standing = prepared }
func votedOut(s *status)   { s.Standing, s.Wishes = leaving, true }
func unformed(s *status)   { s.Formed = "" }
func training(s *status)   { s.Standing = s.Standing.inside() }
func awaiting(s *status)   { s.Awaits = s.Entered }
func again(s *status)      { s.Incarnation = "2" }
func ahead(s *status)      { s.Step++ }
func withoutAny(s *status) { s.Standing = joining }

// TestView: what follows from who is at the boundary.
func TestView(t *testing.T) {
	abc := epochOf(3, "abc")
	forming := epochOf(4, "abc") // decided, and not known to be formed
	for name, c := range map[string]struct {
		v       view
		members string
		step    uint64
		lost    []string
		why     string
	}{
		"the first":                            {v: view{record: &record{}, present: []status{at("a", nil)}}, members: "a"},
		"too few for the first":                {v: view{record: &record{}, min: 2, present: []status{at("a", nil)}}, why: "at least 2"},
		"the first with a file":                {v: view{record: &record{}, present: []status{at("a", nil), at("b", nil, ahead)}}, members: "ba", step: 1},
		"one trains":                           {v: view{record: abc, present: []status{at("a", abc), at("b", abc, training), at("c", abc)}}, why: "b is not"},
		"one waits for an earlier epoch's end": {v: view{record: abc, present: []status{at("a", abc), at("b", epochOf(2, "ab")), at("c", abc)}}, why: "b is not"},
		"join and leave in one boundary": {v: view{record: abc, present: []status{at("a", abc), at("b", abc, votedOut), at("c", abc), at("d", nil)}},
			members: "acd", step: 7},
		"all leave, and another joins": {v: view{record: abc, present: []status{at("a", abc, votedOut), at("b", abc, votedOut), at("c", abc, votedOut), at("d", nil)}},
			members: "abcd", step: 7},
		"all leave at the bound": {v: view{record: epochOf(3, "ab"), max: 2, present: []status{at("a", epochOf(3, "ab"), votedOut), at("b", epochOf(3, "ab"), votedOut), at("c", nil), at("d", nil)}},
			members: "ac", step: 7},
		"the only one leaves at the bound": {v: view{record: epochOf(3, "a"), max: 1, present: []status{at("a", epochOf(3, "a"), votedOut), at("c", nil), at("d", nil)}},
			members: "ac", step: 7},
		"who has the state leaves":                    {v: view{record: abc, present: []status{at("a", abc, votedOut), at("c", abc, withoutAny)}}, members: "ac", step: 7, lost: []string{"b"}},
		"all leave":                                   {v: view{record: abc, present: []status{at("a", abc, votedOut), at("b", abc, votedOut), at("c", abc, votedOut)}}, why: "0 of at least 1"},
		"one that is lost":                            {v: view{record: abc, present: []status{at("a", abc), at("c", abc)}}, members: "ac", step: 7, lost: []string{"b"}},
		"one that came again":                         {v: view{record: abc, present: []status{at("a", abc), at("b", nil, again), at("c", abc)}}, members: "acb", step: 7, lost: []string{"b"}},
		"most at the bound":                           {v: view{record: abc, max: 4, present: []status{at("a", abc), at("b", abc), at("c", abc), at("d", nil), at("e", nil)}}, members: "abcd", step: 7},
		"all have prepared":                           {v: view{record: abc, present: []status{at("a", abc, withResult), at("b", abc, withResult), at("c", abc, withResult)}}, members: "abc", step: 8},
		"one has committed":                           {v: view{record: abc, present: []status{at("a", abc, withResult), at("b", abc, ahead), at("c", abc, withResult)}}, members: "abc", step: 8},
		"one has given up that another has committed": {v: view{record: abc, present: []status{at("a", abc), at("b", abc, withResult), at("c", abc, ahead)}}, members: "bca", step: 8},
		"one has not prepared":                        {v: view{record: abc, present: []status{at("a", abc, withResult), at("b", abc), at("c", abc, withResult)}}, members: "abc", step: 7},
		"half":                                        {v: view{record: epochOf(2, "ab"), present: []status{at("a", epochOf(2, "ab"))}}, members: "a", step: 7, lost: []string{"b"}},
		"a third":                                     {v: view{record: abc, present: []status{at("c", abc)}}, members: "c", step: 7, lost: []string{"a", "b"}},
		"the state is away":                           {v: view{record: abc, present: []status{at("d", nil)}}, why: "no member that has the state"},
		"all state is lost":                           {v: view{record: abc, orphaned: 1, present: []status{at("d", nil)}}, members: "d", lost: []string{"a", "b", "c"}},
		"no record, all here":                         {v: view{entered: abc, present: []status{at("a", abc), at("b", abc), at("c", abc)}}, members: "abc", step: 7},
		"no record, one is not":                       {v: view{entered: abc, present: []status{at("b", abc), at("c", abc)}}, members: "bc", step: 7, lost: []string{"a"}},
		"an attempt failed": {v: view{record: forming, present: []status{at("a", forming, unformed), at("b", forming, unformed), at("c", forming, unformed)}},
			members: "abc", step: 7},
		"half an epoch": {v: view{record: forming, present: []status{at("a", forming), at("b", forming, unformed)}}, members: "ab", step: 7, lost: []string{"c"}},
		"joined and got no state": {v: view{record: forming, present: []status{at("a", forming), at("b", forming), at("c", forming, withoutAny)}},
			members: "abc", step: 7},
	} {
		t.Run(name, func(t *testing.T) {
			v := c.v
			v.min = max(v.min, 1)
			next, why := v.next()
			if c.why != "" {
				require.Nil(t, next)
				assert.Contains(t, why, c.why)
				return
			}
			require.NotNil(t, next, why)
			members := ""
			for _, p := range next.Members {
				members += p.Name
			}
			assert.Equal(t, c.members, members)
			assert.Equal(t, c.step, next.Step)
			assert.Equal(t, c.lost, next.Lost)
			assert.Equal(t, v.last().Number+1, next.Number)
			assert.NotContains(t, next.Members, person{Name: "b", Incarnation: "1", Fresh: true})
			fresh := 0
			for _, p := range next.Members {
				if p.Fresh {
					fresh++
				}
			}
			assert.Less(t, fresh, len(next.Members), "somebody has the state")
		})
	}
}
