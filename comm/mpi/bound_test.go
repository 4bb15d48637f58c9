package mpi_test

import (
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A launcher that binds each rank to one processor of several is named, once.
func TestBound(t *testing.T) {
	if runtime.GOOS != "linux" || runtime.NumCPU() == 1 {
		t.Skip("needs two processors, on Linux")
	}
	const warning = "--map-by slot:PE=n"
	forOneMPI(t, func(t *testing.T, l launcher) {
		out := l.mustRun(t, job{ranks: 2, test: "TestRankSignals", options: []string{"--bind-to", "core"}})
		assert.Equal(t, 1, strings.Count(out, warning), out)
		out = l.mustRun(t, job{ranks: 2, test: "TestRankSignals", options: []string{"--bind-to", "none"}})
		assert.NotContains(t, out, warning)
	})
}
