package console

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
)

// Output is the output of a command. It keeps the first error, so that commands need not check every line, and then
// ends the command, whose output nobody would see.
type Output struct {
	writer io.Writer         // of the command
	stop   func(cause error) // called with the error of a Write
	errs   bool              // errors of the command, which only a reader that has left ends; never changed

	mu  sync.Mutex // not held during a Write
	err error      // guarded by mu
}

// NewOutput makes an Output that prints to w and calls stop at the first error.
func NewOutput(w io.Writer, stop func(cause error)) *Output {
	return &Output{writer: w, stop: stop}
}

// NewErrors makes an Output for a command's errors, which calls stop when their reader has left. After any other error,
// such as that of a full disk, the command continues and later lines are tried.
func NewErrors(w io.Writer, stop func(cause error)) *Output {
	return &Output{writer: w, stop: stop, errs: true}
}

// Write implements [io.Writer].
func (o *Output) Write(p []byte) (int, error) {
	if err := o.Err(); err != nil {
		return 0, err
	}
	n, err := o.writer.Write(p)
	if err == nil || o.errs && !errors.Is(err, syscall.EPIPE) {
		return n, err
	}
	err = fmt.Errorf("writing the output: %w", err)
	o.mu.Lock()
	o.err = cmp.Or(o.err, err)
	o.mu.Unlock()
	o.stop(err)
	return n, err
}

// Err returns the first error of a Write. It does not wait for a Write in flight.
func (o *Output) Err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// Forms returns two writers: one for JSON, which programs read, and one for people. asJSON chooses which of them is
// out; the other discards its data.
func Forms(out io.Writer, asJSON bool) (json, text io.Writer) {
	if asJSON {
		return out, io.Discard
	}
	return io.Discard, out
}

// WriteJSON writes v as one line of JSON. [Output] reports errors of out.
func WriteJSON(out io.Writer, v any) {
	_ = json.NewEncoder(out).Encode(v)
}
