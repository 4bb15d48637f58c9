//go:build !linux

package launch

import "errors"

// usableProcessors returns an error: this system does not bind processes to processors.
func usableProcessors() ([]int, error) {
	return nil, errors.New("ranks can be bound to processors on Linux only: leave out --bind")
}

// bind does nothing, because [usableProcessors] has refused to bind.
func bind([]int) error { return nil }
