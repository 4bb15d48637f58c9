package launch

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// stuckReader is a stream whose reader does not read until it is released.
type stuckReader struct{ released chan struct{} }

// Write implements [io.Writer].
func (s stuckReader) Write(p []byte) (int, error) {
	<-s.released
	return len(p), nil
}

// The end of a job waits once for each reader. It reports lost output where it can. The clock is synctest's.
func TestTheEndWaitsOnce(t *testing.T) {
	failed := errors.New("exit status 3")
	for name, c := range map[string]struct {
		out, errs   bool // streams with a stuck reader; both may have the same one
		text, notes string
		wait        time.Duration
		unread      bool
	}{
		"one stuck reader":              {out: true, errs: true, text: "a", wait: patience, unread: true},
		"one stuck reader, and notes":   {out: true, errs: true, text: "a", notes: "b", wait: patience - lastWord, unread: true},
		"one stuck reader of notes":     {out: true, errs: true, notes: "b", wait: patience, unread: true},
		"a stuck reader of the output":  {out: true, text: "a", notes: "b", wait: patience - lastWord},
		"a stuck reader of the errors":  {errs: true, text: "a", notes: "b", wait: patience, unread: true},
		"readers":                       {text: "a", notes: "b"},
		"a stuck reader without a text": {out: true, errs: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				stuck := stuckReader{make(chan struct{})}
				defer close(stuck.released)
				var notes bytes.Buffer
				stream := func(isStuck bool, otherwise io.Writer) *outlet {
					if isStuck {
						otherwise = stuck
					}
					return newOutlet(otherwise)
				}
				out := stream(c.out, io.Discard)
				errs := stream(c.errs, &notes)
				write(t, out, c.text)
				write(t, errs, c.notes)
				began := time.Now()
				err := flush(out, errs, failed)
				assert.Equal(t, c.wait, time.Since(began))
				require.ErrorIs(t, err, failed)
				assert.Equal(t, c.unread, errors.As(err, new(*Unread)))
				synctest.Wait() // until all text is in notes
				assert.Equal(t, c.out && !c.errs && c.text != "", bytes.Contains(notes.Bytes(), []byte("nobody reads the output")))
			})
		})
	}
}

// write writes a text if it is not empty.
func write(t *testing.T, o *outlet, text string) {
	t.Helper()
	if text == "" {
		return
	}
	_, err := io.WriteString(o, text)
	require.NoError(t, err)
}
