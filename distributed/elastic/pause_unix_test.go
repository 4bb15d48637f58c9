//go:build unix

package elastic

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func init() { pause = pauseProcess }

// invitationVariable tells TestPaused its name and its peers.
const invitationVariable = "TUTTI_TEST_INVITATION"

type invitation struct {
	Name  string
	Peers []string
}

// pauseProcess has a member in a process of its own join, be stopped until the others go on without it, go on and train with
// them again, and leave or be killed. Meanwhile something happens to the others.
func pauseProcess(c *churn) (events int) {
	name, peers := c.next()
	text, err := json.Marshal(invitation{name, peers})
	require.NoError(c.t, err)
	out, said, err := os.Pipe()
	require.NoError(c.t, err)
	p := exec.CommandContext(c.t.Context(), os.Args[0], "-test.run", "^TestPaused$")
	p.Env = append(os.Environ(), invitationVariable+"="+string(text))
	p.ExtraFiles, p.Stderr, p.Stdout = []*os.File{said}, os.Stderr, os.Stderr
	orders, err := p.StdinPipe()
	require.NoError(c.t, err)
	require.NoError(c.t, p.Start())
	require.NoError(c.t, said.Close())
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		c.log.listen(c.t, out)
		_ = out.Close()
	}()
	until := func(with string) { // those who are here, and the process or nobody else, train
		c.apart = with
		c.wait()
		events++
	}
	other := func() {
		events += c.event()
		c.wait()
	}

	until(name)
	other() // it may get the store
	if members, _ := c.last(); len(members) > 2 || members[0] != name {
		require.NoError(c.t, p.Process.Signal(syscall.SIGSTOP))
		until("")
		other()
		require.NoError(c.t, p.Process.Signal(syscall.SIGCONT))
		until(name)
	}
	killed := c.rng.IntN(2) == 0
	if members, _ := c.last(); killed && (len(members) > 2 || members[0] != name) {
		require.NoError(c.t, p.Process.Kill())
	} else {
		killed = false
		require.NoError(c.t, orders.Close())
	}
	until("")
	if err := p.Wait(); !killed {
		assert.NoError(c.t, err)
	}
	<-heard
	return events
}

// listen notes what a process says until it ends, in the middle of a word perhaps.
func (r *replay) listen(t *testing.T, out io.Reader) {
	for in := json.NewDecoder(out); ; {
		var s said
		if err := in.Decode(&s); err != nil {
			assert.True(t, errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF), "%v", err)
			return
		}
		if s.Joined != "" {
			r.join(s.Epoch, s.Joined)
		} else {
			r.note(t, s.Step, s.Epoch, s.Names, s.Result)
		}
	}
}

// TestPaused is the process.
func TestPaused(t *testing.T) {
	text := os.Getenv(invitationVariable)
	if text == "" {
		t.Skip("is part of TestChurn")
	}
	var own invitation
	require.NoError(t, json.Unmarshal([]byte(text), &own))
	log, out := newReplay(), json.NewEncoder(os.NewFile(3, "what is said"))
	log.tell = func(s said) { assert.NoError(t, out.Encode(s)) }
	a := newTrainee(t, log, restless(own.Name, own.Peers, overTCP))
	defer a.free()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		a.Leave()
	}()
	assert.NoError(t, a.run(t.Context(), t, func(*Epoch, int) bool {
		time.Sleep(time.Millisecond) // leaves the processor to others
		return false
	}))
	assert.NoError(t, a.Close())
}
