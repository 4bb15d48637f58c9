package dump_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/internal/dump"
)

// TestCaller: a call is the program's, whichever package of the library has made it for the program.
func TestCaller(t *testing.T) {
	program := dump.Frame{Name: "main.main", Line: 2}
	for name, library := range map[string]bool{
		"github.com/tutti-go/tutti.Config.Run":                             true,
		"github.com/tutti-go/tutti/comm/tcp.(*Communicator).AllReduce":     true,
		"github.com/tutti-go/tutti/distributed/ddp.(*reproducible).raise":  true,
		"github.com/tutti-go/tutti/delta.Send":                             true,
		"github.com/tutti-go/tutti/runtime/cpu.Wrap":                       true,
		"github.com/tutti-go/tutti/internal/queue.(*Queue).Run":            true,
		"github.com/tutti-go/tutti/examples/digits.Descend":                false,
		"github.com/tutti-go/tutti/cmd/tutti/internal/train.(*trainer).do": false,
		"github.com/tutti-go/tuttifrutti.Train":                            false,
		"example.com/tutti/comm.Train":                                     false,
	} {
		inner := dump.Frame{Name: name, Line: 1}
		want := inner
		if library {
			want = program
		}
		assert.Equal(t, want, dump.Caller([]dump.Frame{inner, program}), name)
		assert.Equal(t, inner, dump.Caller([]dump.Frame{inner}), "a goroutine without the program: %s", name)
	}
}
