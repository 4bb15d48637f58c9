// Package digits holds the UCI optical digits data set: 1,797 real 8×8 images
// of handwritten digits (E. Alpaydin, C. Kaynak, CC BY 4.0; see
// ATTRIBUTION.md), so that training needs no download.
package digits

import (
	"bytes"
	"compress/gzip"
	_ "embed" // the data
	"encoding/csv"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
)

// The shape of the data.
const (
	Pixels  = 64 // inputs per image, 8×8
	Classes = 10 // digits 0 to 9
	Images  = 1797

	maxPixel = 16 // darkest value in the file
)

// TestImages is the number of images that [Split] keeps for the test, a fifth.
const TestImages = 360

//go:embed digits.csv.gz
var compressed []byte

// Set is a list of images with their digits.
type Set struct {
	// Inputs are the images, row by row: image i is at [i*Pixels, (i+1)*Pixels).
	// Pixels are scaled to [0, 1].
	Inputs []float32
	// Labels are the digits, one per image.
	Labels []uint8
}

// Len is the number of images.
func (s Set) Len() int { return len(s.Labels) }

// Image returns the pixels of image i.
func (s Set) Image(i int) []float32 {
	return s.Inputs[i*Pixels : (i+1)*Pixels]
}

// Part returns the images with indices from ≤ i < to, in the same memory.
func (s Set) Part(from, to int) Set {
	return Set{
		Inputs: s.Inputs[from*Pixels : to*Pixels],
		Labels: s.Labels[from:to],
	}
}

// Load returns all images in the order of the file. The caller must not change them.
var Load = sync.OnceValues(func() (Set, error) {
	s, err := parse(compressed)
	if err != nil {
		return Set{}, fmt.Errorf("digits: %w", err)
	}
	return s, nil
})

// Split returns the images shuffled by seed and divided into a training set
// and a test set of [TestImages]. The same seed gives the same sets.
func Split(seed uint64) (train, test Set, err error) {
	all, err := Load()
	if err != nil {
		return Set{}, Set{}, err
	}
	order := rand.New(rand.NewPCG(seed, 0xd161)).Perm(all.Len())
	return all.pick(order[TestImages:]), all.pick(order[:TestImages]), nil
}

// pick copies the images with the given indices into a new set.
func (s Set) pick(indices []int) Set {
	out := Set{
		Inputs: make([]float32, 0, len(indices)*Pixels),
		Labels: make([]uint8, 0, len(indices)),
	}
	for _, i := range indices {
		out.Inputs = append(out.Inputs, s.Image(i)...)
		out.Labels = append(out.Labels, s.Labels[i])
	}
	return out
}

// parse reads the compressed CSV file and checks each value.
func parse(gz []byte) (Set, error) {
	r, err := gzip.NewReader(bytes.NewReader(gz))
	if err != nil {
		return Set{}, err
	}
	lines := csv.NewReader(r)
	lines.FieldsPerRecord = Pixels + 1
	records, err := lines.ReadAll()
	if err != nil {
		return Set{}, err
	}
	s := Set{
		Inputs: make([]float32, 0, len(records)*Pixels),
		Labels: make([]uint8, 0, len(records)),
	}
	for n, record := range records {
		for column, field := range record {
			limit := maxPixel
			if column == Pixels {
				limit = Classes - 1
			}
			v, err := strconv.ParseUint(field, 10, 8)
			if err != nil || int(v) > limit {
				return Set{}, fmt.Errorf("line %d, column %d: %q is not in 0…%d", n+1, column+1, field, limit)
			}
			if column == Pixels {
				s.Labels = append(s.Labels, uint8(v))
			} else {
				s.Inputs = append(s.Inputs, float32(v)/maxPixel)
			}
		}
	}
	return s, nil
}
