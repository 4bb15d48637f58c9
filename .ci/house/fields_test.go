package main

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestFieldsWithoutAComment(t *testing.T) {
	const text = `package a

import "sync"

type t struct {
	bare1 int
	line  int // of the line
	bare2, bare3 int

	// Of this and
	// the next.
	above  int
	behind int

	bare4 int
	// Of one.
	one int

	sync.Mutex
	tagged int %[1]sjson:"x"%[1]s
	_      int
	// Of the field.
	nested struct {
		unnamed int
	}
}

// point is explained above it.
type point struct{ x, y int }

type function func(struct{ z int })

var table = []struct{ a, b int }{}
`
	source := fmt.Sprintf(text, "`")
	want := []string{
		"a.go:6: t.bare1", "a.go:8: t.bare2", "a.go:8: t.bare3", "a.go:15: t.bare4",
	}
	assert.ElementsMatch(t, want, lines(walk(t, map[string]string{
		"a.go":                   source,
		"atest/a.go":             source,
		".ci/a/a.go":             source,
		"internal/simd/gen/a.go": source,
		"x/standin/a.go":         source,
	}).silent))
}
