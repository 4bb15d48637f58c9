package delta

import (
	"context"
	"encoding/binary"
	"slices"
)

// If the base has no tensor with the same name, type and shape, a tensor may still have an origin: a tensor of the
// base with the same number of bytes, most of which are equal. It was renamed, reshaped or stored as another type, and
// is coded as the changes of these bytes.

// Sampled words of a tensor identify similar tensors.
const (
	samplePlaces = 16
	sampleWords  = 4 // at each place
	wordBytes    = 8
	maxLike      = 8 // tensors recorded for the same word, such as zeros
)

// sample is a word at one of the places of a tensor with this many bytes.
type sample struct {
	bytes, place int    // of the tensor; place: of the word in it
	word         uint64 // its eight bytes
}

// bytes returns the length of t.
func (t *Tensor) bytes() int { return t.elements * t.DType.Size() }

// samples returns the words at the places of t.
func (t *Tensor) samples() ([]sample, error) {
	const span = sampleWords * wordBytes
	var all []sample
	total := t.bytes()
	var buf [span]byte
	for place := range samplePlaces {
		from := max(total-span, 0) * place / (samplePlaces - 1) &^ (wordBytes - 1)
		n := min(span, total-from)
		if _, err := t.Memory.ReadAt(buf[:n], int64(from)); err != nil {
			return nil, err
		}
		clear(buf[n:])
		for i := range sampleWords {
			all = append(all, sample{
				bytes: total,
				place: place*sampleWords + i,
				word:  binary.LittleEndian.Uint64(buf[i*wordBytes:]),
			})
		}
		if total <= span {
			break
		}
	}
	return all, nil
}

// counterparts returns the index in r of the counterpart of each tensor of next, -1 if it has none. Version 0 has
// none.
func (r *replica) counterparts(next []Tensor) []int {
	from := make([]int, len(next))
	for i := range next {
		from[i] = -1
		if r.version != 0 {
			from[i] = find(r.tensors, &next[i])
		}
	}
	return from
}

// origins returns the origin of each tensor of next without a counterpart, -1 if it has none.
func (r *replica) origins(next []Tensor, from []int) ([]int, error) {
	sizes := map[int]bool{}
	for i, counterpart := range from {
		if counterpart < 0 && next[i].elements > 0 {
			sizes[next[i].bytes()] = true
		}
	}
	known := map[sample][]int{}
	for i := range r.tensors {
		t := &r.tensors[i]
		if !sizes[t.bytes()] {
			continue
		}
		words, err := t.samples()
		if err != nil {
			return nil, err
		}
		for _, w := range words {
			if like := known[w]; len(like) < maxLike {
				known[w] = append(like, i)
			}
		}
	}
	var origins []int
	for i, counterpart := range from {
		if counterpart >= 0 {
			continue
		}
		origin := -1
		if next[i].elements > 0 {
			words, err := next[i].samples()
			if err != nil {
				return nil, err
			}
			origin = likest(words, known)
		}
		origins = append(origins, origin)
	}
	return origins, nil
}

// likest returns the tensor with the most of these words, and at least half of them; -1 if there is none.
func likest(words []sample, known map[sample][]int) int {
	votes := map[int]int{}
	for _, w := range words {
		for _, i := range known[w] {
			votes[i]++
		}
	}
	best := -1
	for i, n := range votes {
		if 2*n < len(words) {
			continue
		}
		if best < 0 || n > votes[best] || n == votes[best] && i < best {
			best = i
		}
	}
	return best
}

// extend returns r with one more tensor for each tensor of next that has an origin, with its layout and in the memory
// of the origin. These become the counterparts in from, without checksums of their blocks.
func (r *replica) extend(next []Tensor, from, origins []int) (*replica, error) {
	extended := &replica{
		version: r.version,
		tensors: slices.Clip(r.tensors),
		sums:    slices.Clip(r.sums),
		hook:    r.hook,
	}
	for i, counterpart := range from {
		if counterpart >= 0 {
			continue
		}
		origin := origins[0]
		origins = origins[1:]
		if origin < 0 {
			continue
		}
		t := next[i]
		if t.bytes() != r.tensors[origin].bytes() {
			return nil, errDamaged
		}
		t.Memory = r.tensors[origin].Memory
		from[i] = len(extended.tensors)
		extended.tensors = append(extended.tensors, t)
		extended.sums = append(extended.sums, make([]uint32, t.blocks()))
	}
	return extended, nil
}

// packLayout sets the layout of d from next and the origins of its tensors, and returns r with these.
func (d *Delta) packLayout(ctx context.Context, r, next *replica, from []int) (*replica, error) {
	origins, err := r.origins(next.tensors, from)
	if err != nil {
		return nil, err
	}
	layout := appendOrigins(appendLayout(nil, next.tensors), origins)
	if d.packed, err = newPacked(appendLayout(nil, r.tensors), layout); err != nil {
		return nil, err
	}
	extended, err := r.extend(next.tensors, from, origins)
	if err != nil {
		return nil, err
	}
	counts := extended.blocks()
	clear(counts[:len(r.tensors)])
	return extended, parallel(ctx, counts, nil, extended.measureBlock)
}

// unpackLayout returns what packLayout has packed: the layout, the counterparts of its tensors, and r extended by
// their origins.
func (d *Delta) unpackLayout(r *replica) (layout []Tensor, from []int, extended *replica, err error) {
	data, err := d.packed.unpack(appendLayout(nil, r.tensors))
	if err != nil {
		return nil, nil, nil, d.describe(err)
	}
	src := cursor{data: data}
	if layout, err = readLayout(&src); err != nil {
		return nil, nil, nil, err
	}
	from = r.counterparts(layout)
	missing := 0
	for _, counterpart := range from {
		if counterpart < 0 {
			missing++
		}
	}
	origins, err := readOrigins(&src, missing, len(r.tensors))
	if err != nil {
		return nil, nil, nil, err
	}
	extended, err = r.extend(layout, from, origins)
	return layout, from, extended, err
}
