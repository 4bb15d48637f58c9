package measure_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/internal/measure"
)

// subjects of which the first takes a second, the next two and so on, later rounds a tenth more each.
func subjects(n int, order *[]int) (all []measure.Round) {
	for i := range n {
		all = append(all, func() (float64, error) {
			*order = append(*order, i)
			return float64(i+1) + float64((len(*order)-1)/n)/10, nil
		})
	}
	return all
}

// doubled stands for a rank that takes twice as long.
func doubled(values []float64) ([]float64, error) {
	slowest := make([]float64, len(values))
	for i, v := range values {
		slowest[i] = 2 * v
	}
	return slowest, nil
}

// A round of each subject at a time, and each begins once.
func TestInTurns(t *testing.T) {
	var order []int
	got, err := measure.InTurns(1, 2, doubled, subjects(3, &order)...)
	assert.NoError(t, err)
	assert.Equal(t, [][]float64{{2.2, 2.4}, {4.2, 4.4}, {6.2, 6.4}}, got)
	assert.Equal(t, []int{0, 1, 2, 1, 2, 0, 2, 0, 1}, order)
}

// An error ends the measurement.
func TestErrors(t *testing.T) {
	failed := errors.New("failed")
	calls := 0
	fails := func() (float64, error) { calls++; return 1, failed }
	_, err := measure.InTurns(0, 3, measure.Alone, fails)
	assert.ErrorIs(t, err, failed)
	_, err = measure.Fit(1, 10, measure.Alone, func(int) (float64, error) { return fails() })
	assert.ErrorIs(t, err, failed)
	assert.Equal(t, 2, calls)
	_, err = measure.InTurns(0, 1, func([]float64) ([]float64, error) { return nil, failed }, func() (float64, error) { return 1, nil })
	assert.ErrorIs(t, err, failed)
}

func TestFit(t *testing.T) {
	for perCall, want := range map[float64]int{1e-9: 20000, 2e-5: 500, 1: 1} {
		got, err := measure.Fit(0.02, 20000, doubled, func(n int) (float64, error) { return float64(n) * perCall, nil })
		assert.NoError(t, err)
		assert.Equal(t, want, got, "%g s a call", perCall)
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{[]float64{7}, 7}, {[]float64{2, 1}, 1.5}, {[]float64{9, 1, 2}, 2}, {[]float64{9, 1, 2, 4}, 3}} {
		assert.InDelta(t, c.want, measure.Median(c.values), 0)
	}
	values := []float64{3, 1, 2}
	measure.Median(values)
	assert.Equal(t, []float64{3, 1, 2}, values, "the caller's order stays")
}
