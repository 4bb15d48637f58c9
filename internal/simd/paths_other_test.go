//go:build !amd64

package simd

import "testing"

func eachPath(t *testing.T, test func(t *testing.T)) { t.Run("portable", test) }
