package train

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/distributed/sparse"
)

// inputs returns all inputs of an example.
func inputs(set examples, i int) []float32 {
	if set.text == nil {
		return set.Image(i)
	}
	all := make([]float32, contextLength*byteValues)
	for place := range contextLength {
		all[place*256+int(set.text[i+place])] = 1
	}
	return all
}

// referenceLoss computes the sum of the losses in float64, by the definition.
func referenceLoss(params []float64, s shape, set examples, of []int) float64 {
	hidden := s.hidden
	w1, rest := params[:s.inputs*hidden], params[s.inputs*hidden:]
	b1, rest := rest[:hidden], rest[hidden:]
	w2, b2 := rest[:hidden*s.classes], rest[hidden*s.classes:]
	var loss float64
	for _, image := range of {
		logits := append([]float64{}, b2...)
		for h := range hidden {
			z := b1[h]
			for i, x := range inputs(set, image) {
				z += float64(x) * w1[i*hidden+h]
			}
			for c := range logits {
				logits[c] += max(z, 0) * w2[h*s.classes+c]
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
	images, _, err := Config{Seed: seed}.examples()
	require.NoError(t, err)
	testGradient(t, images, Config{Hidden: hidden}.shape(), 1, seed)
	text := ofText([]byte("the quick brown fox jumps over the lazy dog\n, the five boxing wizards jump quickly at \xff\x00 the quick brown fox jumps"))
	testGradient(t, text, Config{Hidden: hidden, Text: "fox"}.shape(), 37, seed)
}

// testGradient compares one in every n elements of a gradient.
func testGradient(t *testing.T, set examples, s shape, every int, seed uint64) {
	images := []int{4, 0, 17, 99, 4}
	m := newModel(s, len(images))
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
	assert.InDelta(t, referenceLoss(params, s, set, images), loss, 1e-4)
	const h = 1e-5
	for i := 0; i < len(params); i += every {
		old := params[i]
		params[i] = old + h
		up := referenceLoss(params, s, set, images)
		params[i] = old - h
		down := referenceLoss(params, s, set, images)
		params[i] = old
		assert.InDelta(t, scale*(up-down)/(2*h), float64(grad[i]), 1e-4, "parameter %d, seed %d", i, seed)
	}
}

func TestGradientOfNoImagesIsZero(t *testing.T) {
	m := newModel(Config{Hidden: 3}.shape(), 1)
	m.initialize(1)
	grad := []float32{}
	for range m.params {
		grad = append(grad, 9)
	}
	assert.Zero(t, m.gradient(grad, examples{}, nil, 1))
	assert.Equal(t, make([]float32, len(grad)), grad)
}

func TestRightDoesNotDependOnTheCapacityNorOnTheDivision(t *testing.T) {
	_, test, err := Config{Seed: 1}.examples()
	require.NoError(t, err)
	right := func(m *model, set examples) int {
		n, _ := m.test(set)
		return n
	}
	want := 0
	for _, capacity := range []int{test.Len(), 7, 1} {
		m := newModel(Config{Hidden: 16}.shape(), capacity)
		m.initialize(5)
		got := right(m, test.part(0, 100)) + right(m, test.part(100, 100)) + right(m, test.part(100, test.Len()))
		assert.Equal(t, right(m, test), got, "capacity %d", capacity)
		if want == 0 {
			want = got
		}
		assert.Equal(t, want, got, "capacity %d", capacity)
	}
	// A bias much larger than everything else makes every answer a 3.
	m := newModel(Config{Hidden: 4}.shape(), 50)
	m.layers.b2[3] = 1e6
	threes := 0
	for _, label := range test.Labels {
		if label == 3 {
			threes++
		}
	}
	assert.Equal(t, threes, right(m, test))
}

// A text's test part follows its training part. Each example has the bytes before it as context, across the ranks'
// boundaries too.
func TestExamplesOfATextOverlap(t *testing.T) {
	text := make([]byte, 1000)
	for i := range text {
		text[i] = byte(i * i)
	}
	path := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	cfg := Default(sparse.Dense)
	cfg.Text = path
	train, test, err := cfg.examples()
	require.NoError(t, err)
	check := func(set examples, from int) {
		for i := range set.Len() {
			assert.Equal(t, text[from+i], set.Labels[i])
			for place, input := range set.context(i) {
				assert.Equal(t, place*256+int(text[from+i-8+place]), input)
			}
		}
	}
	assert.Equal(t, []int{892, 92}, []int{train.Len(), test.Len()})
	check(train, 8)
	check(test, 908)
	check(test.part(30, 60), 938)

	m := newModel(cfg.shape(), 16)
	m.initialize(1)
	whole, loss := m.test(test)
	params := make([]float64, len(m.params))
	for i, p := range m.params {
		params[i] = float64(p)
	}
	all := make([]int, test.Len())
	for i := range all {
		all[i] = i
	}
	assert.InDelta(t, referenceLoss(params, m.shape, test, all), loss, 1e-2)
	first, _ := m.test(test.part(0, 30))
	second, _ := m.test(test.part(30, 92))
	assert.Equal(t, whole, first+second)

	cfg.Batch = 893
	_, _, err = cfg.examples()
	assert.ErrorContains(t, err, "batch 893 is not in [1, 892]")
	require.NoError(t, os.WriteFile(path, text[:20], 0o600))
	_, _, err = cfg.examples()
	assert.ErrorContains(t, err, "too short")
}
