package main

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/cc"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// TestOverNCCL trains on one rank over stand-ins for NCCL and for a GPU, whose memory is freed. The program ends
// without an error, and with the bits of a run without either.
func TestOverNCCL(t *testing.T) {
	program := jobtest.Build(t, ".")
	args := []string{"-steps", "3", "-ranks", "1"}
	want := jobtest.Output(t, program, args...)
	for variable, source := range map[string]string{
		"TUTTI_CUDA_LIB": filepath.Join("runtime", "cuda", "testdata", "driver.c"),
		"TUTTI_NCCL_LIB": filepath.Join("comm", "nccl", "testdata", "nccl.c"),
	} {
		library, err := cc.Build(t, "cc", filepath.Join("..", "..", "..", source), "", "-O2", "-shared", "-fPIC", "-lpthread")
		require.NoError(t, err)
		t.Setenv(variable, library)
	}
	assert.Equal(t, want, jobtest.Output(t, program, append(args, "-backend", "nccl")...))
}
