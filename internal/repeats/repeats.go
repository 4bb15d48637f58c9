// Package repeats makes a log report repeated events at increasing intervals.
package repeats

import "sync"

// Log counts events, so that the first, second, fourth, eighth … event of a class is logged. The zero value has
// counted none.
type Log struct {
	mu    sync.Mutex     // guards times
	times map[string]int // by class; nil before the first event; guarded by mu
}

// Count returns how often an event of a class has happened, including this time, and whether to log it.
func (l *Log) Count(class string) (times int, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.times == nil {
		l.times = map[string]int{}
	}
	l.times[class]++
	times = l.times[class]
	return times, Due(times)
}

// Due reports whether to log an event that has happened this number of times.
func Due(times int) bool { return times&(times-1) == 0 }
