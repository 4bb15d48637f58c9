package cuda_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/runtimetest"
)

func TestConformance(t *testing.T) {
	if _, err := cuda.Count(); errors.Is(err, runtime.ErrUnavailable) {
		t.Skipf("needs an NVIDIA GPU and its driver: %v", err)
	}
	runtimetest.Run(t, func(t *testing.T) runtime.Runtime {
		rt, err := cuda.Open(0)
		require.NoError(t, err)
		return rt
	})
}
