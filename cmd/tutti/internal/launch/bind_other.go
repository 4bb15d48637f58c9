//go:build !linux

package launch

import "errors"

// usableProcessors is an error: processes are not bound to processors here.
func usableProcessors() ([]int, error) {
	return nil, errors.New("ranks can be bound to processors on Linux only: leave out --bind")
}

// bind does nothing: [usableProcessors] has refused it.
func bind([]int) error { return nil }
