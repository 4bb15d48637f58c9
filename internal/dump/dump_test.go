package dump_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/internal/dump"
)

// TestCaller: a call is the program's, whichever package of the library has made it for the program.
func TestCaller(t *testing.T) {
	const module = "github.com/tutti-go/tutti"
	program := dump.Frame{Name: "main.main", Line: 2}
	for name, library := range map[string]bool{
		module + ".Config.Run":                             true,
		module + "/comm/tcp.(*Communicator).AllReduce":     true,
		module + "/distributed/ddp.(*reproducible).raise":  true,
		module + "/delta.Send":                             true,
		module + "/runtime/cpu.Wrap":                       true,
		module + "/internal/queue.(*Queue).Run":            true,
		module + "/examples/digits.Descend":                false,
		module + "/cmd/tutti/internal/train.(*trainer).do": false,
		"github.com/tutti-go/tuttifrutti.Train":            false,
		"example.com/tutti/comm.Train":                     false,
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
