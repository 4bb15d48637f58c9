package cpu_test

import (
	"testing"

	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/runtimetest"
)

func TestConformance(t *testing.T) {
	runtimetest.RunCodecs(t, func(*testing.T) runtime.Runtime { return cpu.New() }, reference{})
}
