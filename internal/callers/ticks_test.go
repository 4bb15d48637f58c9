package callers

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// What the processor's clock says is between what the system's said before and after.
func TestTicks(t *testing.T) {
	type moment struct {
		before, after time.Time
		ticks         Ticks
	}
	var moments []moment
	for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end); {
		moments = append(moments, moment{time.Now(), time.Time{}, Now()})
		moments[len(moments)-1].after = time.Now()
	}
	const tolerance = time.Millisecond // clocks are adjusted
	clock := NewClock()
	last := moments[0].before.Add(-tolerance)
	for _, m := range moments {
		told := clock.Time(m.ticks)
		assert.NotZero(t, m.ticks)
		assert.WithinRange(t, told, m.before.Add(-tolerance), m.after.Add(tolerance))
		assert.False(t, told.Before(last))
		last = told
	}
}

// A counter that has jumped back to before the process began, as when a virtual machine
// moves, tells the times since then, and about those before.
func TestTicksThatJumpBack(t *testing.T) {
	defer func(at time.Time, ticks Ticks) { began, first = at, ticks }(began, first)
	const tolerance = 50 * time.Millisecond // of a rate that is measured in a moment
	before, ticks, after := time.Now(), Now(), time.Now()
	began, first = before.Add(-time.Hour), ticks<<1
	clock := NewClock()
	assert.WithinRange(t, clock.Time(ticks), before.Add(-tolerance), after.Add(tolerance))
	assert.Equal(t, began, clock.Time(first))
	later := clock.Time(first + ticks/1_000_000)
	assert.True(t, later.After(began) && later.Before(after), "%v after the beginning", later.Sub(began))
}

func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		Now()
	}
}
