package p2p

import (
	_ "embed"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/elements"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// The kernels' PTX, compiled from kernels/p2p.cu by runtime/cuda/kernels/generate.sh.
//
//go:embed kernels/p2p.ptx.gz
var compressed []byte

// The families of kernels. Families that reduce have one kernel for each element type.
const (
	kernelPair   = iota // sums of aligned buffers, two ranks
	kernelAdd           // the same, more ranks
	kernelTwice         // the same, more ranks, in two steps
	kernelReduce        // all reductions
	kernelRing          // all reductions, any size
	kernelFamilies
)

var familyNames = [kernelFamilies]string{"pair", "add", "twice", "reduce", "ring"}

// types is the number of element types, and of dtype.Invalid.
const types = int(dtype.Bool) + 1

// exists reports whether a family has a kernel for a type.
func exists(dt dtype.DType, family int) bool {
	return words(dt) || family >= kernelReduce
}

// function is an entry point of the PTX.
type function struct {
	*cuda.Kernel
	dependent bool // starts early
}

// kernelSet is all kernels.
type kernelSet struct {
	byType   [kernelFamilies][types]*function // by dtype.DType; nil where there is none
	move     *function                        // of collectives that only move data, over the tagged wire
	moveRing *function                        // of the same, over rings
	leave    *function                        // tells the peers that this rank aborts
	i8       pieces                           // allreduces of values rounded to i8
	fp8      pieces                           // allreduces of values rounded to FP8E4M3
	post     *function                        // writes a list to the peers
	receive  *function                        // receives lists that post has written
}

// pieces are the kernels of an allreduce.
type pieces struct {
	packed *function // for pieces that all begin at packs
	ragged *function // for all other pieces
}

// load looks up all kernels in a module. early lets some of them start early.
func load(m *cuda.Module, early bool) (k kernelSet, err error) {
	found := map[string]*function{}
	find := func(name string, dependent bool) *function {
		if found[name] == nil && err == nil {
			f := &function{dependent: early && dependent}
			f.Kernel, err = m.Kernel(name)
			found[name] = f
		}
		return found[name]
	}
	for _, dt := range dtype.All() {
		for family, name := range familyNames {
			if exists(dt, family) {
				// Kernels for small messages start early.
				k.byType[family][dt] = find(name+"_"+elements.Name(dt), family <= kernelAdd)
			}
		}
	}
	k.move = find("move", true)
	k.moveRing = find("move_ring", false)
	k.leave = find("leave_all", false)
	k.i8 = pieces{find("rounded_i8", false), find("ragged_i8", false)}
	k.fp8 = pieces{find("rounded_e4m3", false), find("ragged_e4m3", false)}
	k.post = find("post_list", false)
	k.receive = find("receive_lists", true)
	return k, err
}

// all returns every kernel once.
func (k *kernelSet) all() (list []*function) {
	seen := map[*function]bool{nil: true}
	add := func(functions ...*function) {
		for _, f := range functions {
			if !seen[f] {
				seen[f] = true
				list = append(list, f)
			}
		}
	}
	for _, family := range k.byType {
		add(family[:]...)
	}
	add(k.move, k.moveRing, k.leave, k.post, k.receive)
	add(k.i8.packed, k.i8.ragged, k.fp8.packed, k.fp8.ragged)
	return list
}
