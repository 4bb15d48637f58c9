package cli

import (
	"fmt"
	"io"
)

// output is where the commands print. It remembers the first error, so that
// they need not look at each line's, and ends what runs: nobody will see it.
type output struct {
	io.Writer
	stop func(cause error)
	err  error
}

// Write implements [io.Writer].
func (o *output) Write(p []byte) (int, error) {
	if o.err != nil {
		return 0, o.err
	}
	n, err := o.Writer.Write(p)
	if err != nil {
		o.err = fmt.Errorf("writing the output: %w", err)
		o.stop(o.err)
	}
	return n, o.err
}

// forms are where a command writes what it found for programs, by --json, and for
// people. One of the two is discarded.
func forms(out io.Writer, asJSON bool) (json, text io.Writer) {
	if asJSON {
		return out, io.Discard
	}
	return io.Discard, out
}
