package cli

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/train"
)

// The names of figures in --json end with their unit, except for shares, ratios and counts.
func TestFiguresHaveUnits(t *testing.T) {
	units := []string{"_us", "_ms", "_s", "bytes", "_bytes_per_rank", "_bytes_per_rank_step", "_elements_per_rank_step", "_gb_per_s"}
	plain := []string{"density", "accuracy", "loss", "ratio_to_dense", "target", "hidden", "s"}
	looked := 0
	for _, result := range []any{bench.Result{}, bench.SparseResult{}, bench.BucketsResult{}, train.Result{}, train.Test{}, information{}} {
		for _, field := range reflect.VisibleFields(reflect.TypeOf(result)) {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			kind := field.Type
			for kind.Kind() == reflect.Pointer || kind.Kind() == reflect.Slice {
				kind = kind.Elem()
			}
			if name == "" || name == "-" || kind.Kind() != reflect.Float64 && kind.Kind() != reflect.Uint64 {
				continue
			}
			looked++
			unit := slices.ContainsFunc(units, func(u string) bool { return strings.HasSuffix(name, u) })
			assert.True(t, unit || slices.Contains(plain, name), "%T: %s", result, name)
		}
	}
	assert.Greater(t, looked, 20)
}
