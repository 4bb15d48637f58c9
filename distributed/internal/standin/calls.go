package standin

import (
	"bytes"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// noticed is a communicator that has each call looked at before it is made.
type noticed struct {
	comm.Methods
	comm.Wrapped
}

// Notice returns c with look called for each of its calls, before it is made.
func Notice(c comm.Communicator, look func(call comm.Call)) comm.Communicator {
	p := &noticed{Wrapped: comm.Wrap(c)}
	p.Methods = comm.Methods{
		Do: func(call comm.Call) error {
			look(call)
			return call.Make(c)
		},
		Together: func(calls []comm.Call) error {
			for _, call := range calls {
				look(call)
			}
			return c.Group(calls...)
		},
	}
	return p
}

// Pace says what calls take, beside a microsecond each: when the ranks agree on the
// time of a step that Auto measures, it puts that in its place. So a choice does not
// depend on how fast and how busy the machine is.
func Pace(c comm.Communicator, takes func(call comm.Call) time.Duration) comm.Communicator {
	var step atomic.Int64
	return Notice(c, func(call comm.Call) {
		if call.Op == comm.OpAllReduce && call.DType == dtype.F64 && call.Reduce == comm.Max {
			hostmem.Slice[float64](call.Send, 1)[0] = time.Duration(step.Swap(0)).Seconds()
			return
		}
		step.Add(int64(time.Microsecond + takes(call)))
	})
}

type lockedBuffer struct {
	mu   *sync.Mutex
	text *bytes.Buffer
}

// NewLockedBuffer returns a writer to text.
func NewLockedBuffer(mu *sync.Mutex, text *bytes.Buffer) lockedBuffer { return lockedBuffer{mu, text} }

func (l lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}
