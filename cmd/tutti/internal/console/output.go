package console

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"sync"
)

// Output is where a command prints. It keeps the first error, so that commands need not look at each line's, and ends
// what runs: nobody will see it.
type Output struct {
	writer io.Writer         // of the command
	stop   func(cause error) // called with the error of a Write

	mu  sync.Mutex // not held during a Write
	err error      // guarded by mu
}

// NewOutput makes an Output that prints to w and calls stop at the first error.
func NewOutput(w io.Writer, stop func(cause error)) *Output {
	return &Output{writer: w, stop: stop}
}

// Write implements [io.Writer].
func (o *Output) Write(p []byte) (int, error) {
	if err := o.Err(); err != nil {
		return 0, err
	}
	n, err := o.writer.Write(p)
	if err == nil {
		return n, nil
	}
	err = fmt.Errorf("writing the output: %w", err)
	o.mu.Lock()
	o.err = cmp.Or(o.err, err)
	o.mu.Unlock()
	o.stop(err)
	return n, err
}

// Err returns the first error of a Write, also while another one waits for its reader.
func (o *Output) Err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// Forms returns where a command writes its results for programs, by --json, and for people. One of the two is
// discarded.
func Forms(out io.Writer, asJSON bool) (json, text io.Writer) {
	if asJSON {
		return out, io.Discard
	}
	return io.Discard, out
}

// WriteJSON writes v, which has a JSON form, as one line. An error of out is for [Output] to tell.
func WriteJSON(out io.Writer, v any) {
	_ = json.NewEncoder(out).Encode(v)
}
