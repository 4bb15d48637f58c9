package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestParallelAssignments(t *testing.T) {
	const text = `package a

type point struct{ x, y int }

func f() (int, int) { return 1, 2 }

func g(p point, all []int) {
	a, b := 1, 2 // want
	a, b = 3, 4 // want
	a, b = b, a
	a, b = b, a+b
	a, b = f()
	p.x, p.y = 1, 2 // want
	p.x, p.y = p.y, p.x
	all[0], all[1] = 1, 2 // want
	all[a], all[b] = all[b], all[a]
	all[a+1], all[b] = all[b], all[a+1]
	p.x, a = p.y, b // want
	for i, j := 0, 1; i < j; i, j = i+1, j-1 {
		a, b := i, j // want
		_, _ = a, b // want
	}
	if c, d := 1, 2; c < d {
	}
	switch c, d := 1, 2; c + d {
	}
	v, ok := any(a).(int)
	_, _ = v, ok // want
}
`
	counted := walk(t, map[string]string{"a.go": text, "atest/a.go": text})
	assert.Equal(t, marked("a.go", text), lines(counted.together))
}
