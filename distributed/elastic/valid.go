package elastic

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// Bounds of what the store has. Any process that knows the job's secret can write there, so a record or a status is
// checked when it is read, and the rest of this package relies on that.
const (
	maxMembers   = 1 << 14 // of an epoch
	maxTextBytes = 1 << 10 // bytes of a name
	lastNumber   = 1 << 62 // of epochs and steps, which count
)

// checkText returns why a name is none: it is empty, long, or would change how it is printed.
func checkText(text string) error {
	hidden := func(c rune) bool { return !strconv.IsPrint(c) }
	if text == "" || len(text) > maxTextBytes || strings.ContainsFunc(text, hidden) {
		return fmt.Errorf("%.100q is no name", text)
	}
	return nil
}

// check returns why a person can be no member.
func (p person) check() error {
	if err := checkText(p.Incarnation); err != nil {
		return err
	}
	return checkText(p.Name)
}

// checkPersons returns why a list of members is none.
func checkPersons(list []person) error {
	if len(list) > maxMembers {
		return fmt.Errorf("%d members", len(list))
	}
	names := map[string]bool{}
	for _, p := range list {
		if err := p.check(); err != nil {
			return err
		}
		if names[p.Name] {
			return fmt.Errorf("%s twice", p.Name)
		}
		names[p.Name] = true
	}
	return nil
}

// check returns why a record is none that members write.
func (r *record) check() error {
	if r.Number == 0 { // the job is to begin
		if r.World != "" || r.Step != 0 || len(r.Members)+len(r.Lost) > 0 {
			return errors.New("members before the first epoch")
		}
		return nil
	}
	if r.Number > lastNumber || r.Step > lastNumber {
		return errors.New("a number beyond all counts")
	}
	if err := checkText(r.World); err != nil {
		return err
	}
	if err := checkPersons(r.Members); err != nil {
		return err
	}
	if !slices.ContainsFunc(r.Members, func(p person) bool { return !p.Fresh }) {
		return errors.New("no member has the state")
	}
	if len(r.Lost) > maxMembers {
		return fmt.Errorf("%d lost members", len(r.Lost))
	}
	for _, name := range r.Lost {
		if err := checkText(name); err != nil {
			return err
		}
	}
	return r.checkFailures()
}

// checkFailures returns why a record's failed attempts are none that members count.
func (r *record) checkFailures() error {
	if len(r.Failed) > maxFailures {
		return fmt.Errorf("%d members that attempts failed for", len(r.Failed))
	}
	for _, f := range r.Failed {
		if err := checkText(f.Name); err != nil {
			return err
		}
		if f.Times < 1 || int64(f.Times) > lastNumber {
			return fmt.Errorf("%d attempts that failed", f.Times)
		}
	}
	return nil
}

// check returns why a status is none of a member of that name.
func (s *status) check(name string) error {
	if s.Name != name {
		return fmt.Errorf("it is of %.100q", s.Name)
	}
	if err := s.person().check(); err != nil {
		return err
	}
	if err := s.Standing.check(); err != nil {
		return err
	}
	if s.Entered == "" && !s.Standing.stateless() {
		return errors.New("it has the state, and has entered no epoch")
	}
	for _, world := range []string{s.Entered, s.Formed, s.Awaits} {
		if world == "" {
			continue
		}
		if err := checkText(world); err != nil {
			return err
		}
	}
	if s.Step >= lastNumber || s.BackedOff < 0 {
		return errors.New("a number beyond all counts")
	}
	if len(s.Unreached) > maxMembers {
		return fmt.Errorf("%d ranks that it does not reach", len(s.Unreached))
	}
	return nil
}

// read returns what an event says. A record or a status that is none is nil.
func read(e store.Event) (r entry, err error) {
	r.version = e.Version
	switch {
	case e.Key == finalKey:
		r.final = string(e.Value)
	case e.Key == epochKey:
		epoch := new(record)
		if err := json.Unmarshal(e.Value, epoch); err != nil {
			return r, err
		}
		if err := epoch.check(); err != nil {
			return r, err
		}
		r.record = epoch
	case strings.HasPrefix(e.Key, memberKeys):
		member := new(status)
		if err := json.Unmarshal(e.Value, member); err != nil {
			return r, err
		}
		if err := member.check(strings.TrimPrefix(e.Key, memberKeys)); err != nil {
			return r, err
		}
		r.status = member
	}
	return r, nil
}

// checkEntry returns why a member cannot enter an epoch: it is not in it, or has not the state with which the epoch
// begins.
func (r *record) checkEntry(s *status) error {
	rank := r.rank(s.person())
	if rank >= 0 && (r.Members[rank].Fresh || s.Step <= r.Step && r.Step <= s.reach()) {
		return nil
	}
	return fmt.Errorf("%w: epoch %d (%s) in the store begins behind step %d, and this member has made %d",
		comm.ErrMismatch, r.Number, r.World, r.Step, s.Step)
}
