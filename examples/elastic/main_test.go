package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDemonstration: members join, one is killed, and the others come to the end.
func TestDemonstration(t *testing.T) {
	*steps = 100
	require.NoError(t, demonstrate(t.Context()))
}
