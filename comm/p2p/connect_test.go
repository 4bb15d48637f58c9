package p2p

import (
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
)

// All ranks get an error of one kind: the worst rank's.
func TestRanksAgreeOnAnError(t *testing.T) {
	unsupported, broken := fmt.Errorf("%w: no peers", comm.ErrUnsupported), errors.New("out of memory")
	for _, c := range []struct {
		own  [2]error
		want [2]error // what each rank's error is
	}{
		{[2]error{}, [2]error{}},
		{[2]error{nil, unsupported}, [2]error{comm.ErrUnsupported, unsupported}},
		{[2]error{unsupported, unsupported}, [2]error{unsupported, unsupported}},
		{[2]error{broken, nil}, [2]error{broken, comm.ErrPeerFailed}},
		{[2]error{broken, unsupported}, [2]error{broken, comm.ErrPeerFailed}},
	} {
		all := []hello{{state: verdictOf(c.own[0])}, {state: verdictOf(c.own[1])}}
		unsupportedRanks := 0
		for rank, own := range c.own {
			err := worst(all, own)
			if c.want[rank] == nil {
				assert.NoError(t, err)
			} else {
				assert.ErrorIs(t, err, c.want[rank])
			}
			if errors.Is(err, comm.ErrUnsupported) {
				unsupportedRanks++
			}
		}
		assert.True(t, unsupportedRanks == 0 || unsupportedRanks == 2, "%v", c.own)
	}
}

// Ranks of several hosts, or with other options, share no memory, and all of them are told.
func TestCompatible(t *testing.T) {
	hosts := []hello{{host: [16]byte{1}}, {host: [16]byte{1}}, {host: [16]byte{2}}}
	sizes := []hello{{bytes: 1}, {bytes: 1}, {bytes: 2}}
	for rank := range hosts {
		assert.NoError(t, compatible(hosts[:2], rank%2))
		assert.ErrorIs(t, compatible(hosts, rank), comm.ErrUnsupported)
		assert.ErrorContains(t, compatible(hosts, rank), "different hosts")
		assert.ErrorIs(t, compatible(sizes, rank), comm.ErrMismatch)
	}
}

// Ranks on one GPU share it, and the smallest share counts.
func TestRanksHaveTheirShareOfAGPU(t *testing.T) {
	on := func(gpu byte, multiprocessors int) hello {
		return hello{bus: [16]byte{gpu}, multiprocessors: multiprocessors}
	}
	for want, all := range map[int][]hello{
		132: {on(1, 132), on(2, 132)},
		108: {on(1, 132), on(2, 108), on(3, 132)},
		44:  {on(1, 132), on(1, 132), on(2, 108), on(1, 132)},
		1:   {on(1, 2), on(1, 2), on(1, 2)},
	} {
		assert.Equal(t, want, multiprocessors(all))
	}
}

// Kernels start early where nothing has to have left their GPU before.
func TestKernelsThatStartEarly(t *testing.T) {
	l := &library{}
	assert.Same(t, &l.kernels, l.suited(false))
	assert.Same(t, &l.late, l.suited(true), "a peer on the same GPU")
}

// Ranks exchange bytes: processes have no use for each other's pointers.
func TestHelloHasNoPointers(t *testing.T) {
	var plain func(x reflect.Type)
	plain = func(x reflect.Type) {
		switch k := x.Kind(); {
		case k == reflect.Struct:
			for i := range x.NumField() {
				plain(x.Field(i).Type)
			}
		case k == reflect.Array:
			plain(x.Elem())
		default:
			assert.LessOrEqual(t, k, reflect.Float64, "%v", x)
		}
	}
	plain(reflect.TypeFor[hello]())
}
