package train

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/examples/digits"
)

// referenceLoss computes the sum of the losses in float64, by the definition.
func referenceLoss(params []float64, hidden int, set digits.Set, images []int) float64 {
	w1, rest := params[:digits.Pixels*hidden], params[digits.Pixels*hidden:]
	b1, rest := rest[:hidden], rest[hidden:]
	w2, b2 := rest[:hidden*digits.Classes], rest[hidden*digits.Classes:]
	var loss float64
	for _, image := range images {
		logits := append([]float64{}, b2...)
		for h := range hidden {
			z := b1[h]
			for i, x := range set.Image(image) {
				z += float64(x) * w1[i*hidden+h]
			}
			for c := range logits {
				logits[c] += max(z, 0) * w2[h*digits.Classes+c]
			}
		}
		var sum float64
		for _, l := range logits {
			sum += math.Exp(l)
		}
		loss += math.Log(sum) - logits[set.Labels[image]]
	}
	return loss
}

func TestGradientIsTheDerivativeOfTheLoss(t *testing.T) {
	const hidden, seed = 7, 3
	set, _, err := digits.Split(seed)
	require.NoError(t, err)
	images := []int{4, 0, 17, 99, 4}
	m := newModel(hidden, len(images))
	m.initialize(seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range m.layers.b1 {
		m.layers.b1[i] = float32(rng.NormFloat64()) / 10
	}

	grad := make([]float32, len(m.params))
	const scale = 0.5
	loss := m.gradient(grad, set, images, scale)

	params := make([]float64, len(m.params))
	for i, p := range m.params {
		params[i] = float64(p)
	}
	assert.InDelta(t, referenceLoss(params, hidden, set, images), loss, 1e-4)
	const h = 1e-5
	for i := range params {
		old := params[i]
		params[i] = old + h
		up := referenceLoss(params, hidden, set, images)
		params[i] = old - h
		down := referenceLoss(params, hidden, set, images)
		params[i] = old
		assert.InDelta(t, scale*(up-down)/(2*h), float64(grad[i]), 1e-4, "parameter %d, seed %d", i, seed)
	}
}

func TestGradientOfNoImagesIsZero(t *testing.T) {
	m := newModel(3, 1)
	m.initialize(1)
	grad := []float32{}
	for range m.params {
		grad = append(grad, 9)
	}
	assert.Zero(t, m.gradient(grad, digits.Set{}, nil, 1))
	assert.Equal(t, make([]float32, len(grad)), grad)
}

func TestRightDoesNotDependOnTheCapacityNorOnTheDivision(t *testing.T) {
	_, test, err := digits.Split(1)
	require.NoError(t, err)
	want := 0
	for _, capacity := range []int{test.Len(), 7, 1} {
		m := newModel(16, capacity)
		m.initialize(5)
		got := m.right(test.Part(0, 100)) + m.right(test.Part(100, 100)) + m.right(test.Part(100, test.Len()))
		assert.Equal(t, m.right(test), got, "capacity %d", capacity)
		if want == 0 {
			want = got
		}
		assert.Equal(t, want, got, "capacity %d", capacity)
	}
	// A bias that drowns everything makes every answer a 3.
	m := newModel(4, 50)
	m.layers.b2[3] = 1e6
	threes := 0
	for _, label := range test.Labels {
		if label == 3 {
			threes++
		}
	}
	assert.Equal(t, threes, m.right(test))
}
