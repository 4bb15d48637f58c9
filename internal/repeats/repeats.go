// Package repeats has a log say what happens again and again, ever less often.
package repeats

import "sync"

// Log counts events, so that those of one class are logged the first, second, fourth, eighth … time. The zero value
// has counted none.
type Log struct {
	mu    sync.Mutex     // guards times
	times map[string]int // by class; nil before the first event; guarded by mu
}

// Count returns how often an event of a class has happened, this time included, and whether to log it.
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

// Due reports whether to log an event that has happened so often.
func Due(times int) bool { return times&(times-1) == 0 }
