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

func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		Now()
	}
}
