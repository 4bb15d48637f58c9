package main

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/runtime"
)

// randomLengths are the lengths of random gradients: blocks, parts of blocks, and several.
var randomLengths = []int{130, 1, 64, 7}

// precision is the precision of contributions without ReproducibleBits.
const precision = 27

// random compares the sums of random inputs of a type, with and without clipping, with sums of big integers.
func (b *bits) random(dt dtype.DType, inputs int) error {
	for _, limit := range []float64{0, 0.75} {
		if err := b.randomSteps(dt, inputs, limit); err != nil {
			return fmt.Errorf("%v clipped to %v: %w", dt, limit, err)
		}
	}
	return nil
}

func (b *bits) randomSteps(dt dtype.DType, inputs int, limit float64) (err error) {
	var tensors []*runtime.Tensor
	for _, n := range randomLengths {
		t, err := runtime.New(b.Runtime, dt, n)
		if err != nil {
			return err
		}
		defer t.Free() //nolint:errcheck // the program ends
		tensors = append(tensors, t)
	}
	cfg := ddp.Config{Reproducible: contributions, Config: sparse.Config{ClipNorm: limit}}
	g, err := ddp.New(b.ctx, b.Runtime, b.Comm, tensors, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	for input := range inputs {
		values := drawInput(dt, input)
		if err := b.contribute(g, tensors, values); err != nil {
			return err
		}
		want, norm := means(dt, values)
		factor := 1.0
		if limit > 0 && norm > limit && !math.IsInf(norm, 0) {
			factor = limit / norm
		}
		for i := range tensors {
			got, err := b.read(g.Result(i))
			if err != nil {
				return err
			}
			if err := compare(dt, got, want[i], factor); err != nil {
				return fmt.Errorf("input %d, gradient %d, %w", input, i, err)
			}
		}
	}
	return nil
}

// contribute makes a step of contributions, each with values for all gradients.
func (b *bits) contribute(g *ddp.Gradients, tensors []*runtime.Tensor, values [][][]float64) error {
	ranks := b.Comm.WorldSize()
	rank := b.Comm.Rank()
	end := (rank + 1) * contributions / ranks
	for c := rank * contributions / ranks; c < end; c++ {
		for i, t := range tensors {
			if err := b.write(t, reference.Encode(t.DType(), values[c][i]...)); err != nil {
				return err
			}
			if c == end-1 {
				continue
			}
			if err := g.Accumulate(i, t); err != nil {
				return err
			}
		}
	}
	if rank*contributions/ranks == end { // it has no contributions
		return g.Wait(b.ctx)
	}
	if err := g.ReduceAll(b.ctx, tensors); err != nil {
		return err
	}
	return b.Comm.Sync(b.ctx)
}

// drawInput draws contributions of values of a type: zeros, denormals, largest numbers, and magnitudes that differ by
// up to 2^200 between blocks and contributions. Some inputs have infinities and NaN.
func drawInput(dt dtype.DType, input int) (values [][][]float64) {
	special := input%8 == 0
	largest := map[dtype.DType]float64{dtype.F32: math.MaxFloat32, dtype.F16: 65504, dtype.BF16: 0x1.fep127}[dt]
	for c := range contributions {
		random := rand.New(rand.NewPCG(uint64(input), uint64(c)))
		var all [][]float64
		for _, n := range randomLengths {
			x := make([]float64, n)
			scale := 1.0
			for i := range x {
				if i%64 == 0 {
					scale = []float64{1, math.Ldexp(1, random.IntN(200)-100), 0, 1e-42, largest / 4, 0.01}[random.IntN(6)]
				}
				v := max(-largest, min(random.NormFloat64()*scale, largest))
				if special && random.IntN(400) == 0 {
					v = []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[random.IntN(3)]
				}
				x[i] = exact(dt, v)
			}
			all = append(all, x)
		}
		values = append(values, all)
	}
	return values
}

// exact rounds a value to a type.
func exact(dt dtype.DType, v float64) float64 {
	element, err := dtype.FromFloat64(dt, v)
	if err != nil {
		panic(err)
	}
	v, err = dtype.ToFloat64(dt, element)
	if err != nil {
		panic(err)
	}
	return v
}

// means returns the results of a step, computed with integers of any size, and their norm before rounding.
func means(dt dtype.DType, values [][][]float64) (all [][]float64, norm float64) {
	square := 0.0
	for i, n := range randomLengths {
		x := make([]float64, n)
		for j := range x {
			field := 0
			for _, c := range values {
				for _, v := range c[i][j/64*64 : min(j/64*64+64, n)] {
					field = max(field, int(math.Float32bits(float32(v))>>23&255))
				}
			}
			if field == 255 {
				x[j] = math.NaN()
				square = math.NaN()
				continue
			}
			sum := new(big.Int)
			for _, c := range values {
				sum.Add(sum, toInteger(c[i][j], precision+126-field))
			}
			x[j] = float64(sum.Int64()) * math.Ldexp(1/float64(contributions), field-126-precision)
			square += x[j] * x[j]
		}
		all = append(all, x)
	}
	return all, math.Sqrt(square)
}

// toInteger returns v·2^power rounded to the nearest integer, with ties to even.
func toInteger(v float64, power int) *big.Int {
	scaled := new(big.Float).SetMantExp(big.NewFloat(v), power)
	whole, accuracy := scaled.Int(nil)
	if accuracy == big.Exact {
		return whole
	}
	remainder := new(big.Float).SetPrec(300).Sub(scaled, new(big.Float).SetInt(whole))
	half := remainder.Abs(remainder).Cmp(big.NewFloat(0.5))
	if half > 0 || half == 0 && whole.Bit(0) == 1 {
		whole.Add(whole, big.NewInt(int64(scaled.Sign())))
	}
	return whole
}

// compare compares a result with means, bit for bit or, after scaling by a factor, approximately.
func compare(dt dtype.DType, got []byte, want []float64, factor float64) error {
	largest := float32(map[dtype.DType]float64{dtype.F32: math.MaxFloat32, dtype.F16: 65504, dtype.BF16: 0x1.fep127}[dt])
	all := make([]float32, len(want))
	if err := dtype.ToFloat32(all, got, dt); err != nil {
		return err
	}
	for j, v := range want {
		mean := max(-largest, min(float32(v*factor), largest))
		rounded := float32(exact(dt, float64(mean)))
		difference := math.Abs(float64(all[j]) - float64(rounded))
		ulp := math.Abs(float64(rounded))/128 + 1e-7
		if dt == dtype.F32 {
			ulp = math.Abs(float64(rounded))*1e-6 + 1e-44
		}
		same := all[j] == rounded || math.IsNaN(v) && math.IsNaN(float64(all[j])) || factor != 1 && difference <= ulp
		if !same {
			return fmt.Errorf("element %d is %v, want %v", j, all[j], rounded)
		}
	}
	return nil
}
