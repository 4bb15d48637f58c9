package train

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/examples/digits"
)

// examples are the data that a model learns: images, or the bytes of a text, each after its context. A text has its
// bytes as labels and no images.
type examples struct {
	digits.Set
	text []byte // starts with the context of the first label
}

// The model predicts a byte from the contextLength bytes before it. Its inputs say which byte is at which place.
const (
	contextLength = 8
	byteValues    = 256
)

// context returns the indices of the inputs of an example that are 1. It returns none for an image.
func (e examples) context(i int) []int {
	if e.text == nil {
		return nil
	}
	var inputs [contextLength]int
	for place, b := range e.text[i:][:contextLength] {
		inputs[place] = place*byteValues + int(b)
	}
	return inputs[:]
}

// part returns the examples with indices from ≤ i < to.
func (e examples) part(from, to int) examples {
	if e.text == nil {
		return examples{Set: e.Part(from, to)}
	}
	return ofText(e.text[from : to+contextLength])
}

// share returns the examples of one rank.
func (e examples) share(c comm.Communicator) examples {
	rank := c.Rank()
	ranks := c.WorldSize()
	return e.part(rank*e.Len()/ranks, (rank+1)*e.Len()/ranks)
}

func ofText(text []byte) examples {
	return examples{Set: digits.Set{Labels: text[contextLength:]}, text: text}
}

// shape returns the shape of the model.
func (c Config) shape() shape {
	if c.Text != "" {
		return shape{contextLength * byteValues, contextLength, c.Hidden, byteValues}
	}
	return shape{digits.Pixels, digits.Pixels, c.Hidden, digits.Classes}
}

// examples returns the training and the test examples. A text's last tenth, at most 16 KiB, is for tests.
func (c Config) examples() (train, test examples, err error) {
	if c.Text != "" {
		text, err := os.ReadFile(c.Text)
		n := len(text) - min(len(text)/10, 16<<10)
		if err == nil && n <= len(text)-contextLength && n > contextLength {
			train = ofText(text[:n])
			test = ofText(text[n:])
		} else if err == nil {
			err = errors.New("it is too short")
		}
		if err != nil {
			err = fmt.Errorf("cannot use --text %s: %w", c.Text, err)
		} else {
			err = c.validateSize(train.Len())
		}
		return train, test, err
	}
	if train.Set, test.Set, err = digits.Split(c.Seed); err == nil && c.Turned {
		rng := rand.New(rand.NewPCG(c.Seed, 0x7412))
		train.Set, test.Set = turn(train.Set, rng), turn(test.Set, rng)
	}
	return train, test, err
}

// noise is the standard deviation of the noise that [turn] adds to pixels, which are in [0, 1].
const noise = 0.15

// turn makes the task harder. In a copy of the set it turns and mirrors every image at random, in one of a square's
// eight symmetries, and adds noise.
func turn(set digits.Set, rng *rand.Rand) digits.Set {
	const side = 8
	turned := digits.Set{Inputs: slices.Clone(set.Inputs), Labels: set.Labels}
	for i := range set.Len() {
		from := set.Image(i)
		to := turned.Image(i)
		way := rng.IntN(8)
		for y := range side {
			for x := range side {
				u := x
				v := y
				if way&1 != 0 {
					u = side - 1 - u
				}
				if way&2 != 0 {
					v = side - 1 - v
				}
				if way&4 != 0 {
					u, v = v, u
				}
				to[y*side+x] = from[v*side+u] + float32(noise*rng.NormFloat64())
			}
		}
	}
	return turned
}
