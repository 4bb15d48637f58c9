//go:build unix

package elastic

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
)

func init() { pause = pauseProcess }

// invitationVariable tells TestPaused its name and where the store is.
const invitationVariable = "TUTTI_TEST_INVITATION"

type invitation struct {
	Name    string
	Store   string
	Silence time.Duration
}

// invite starts a process that joins as a member, says what it does, and leaves when its orders end.
func invite(t *testing.T, name, address string, log *replay) (p *exec.Cmd, orders io.Closer, heard chan struct{}) {
	text, err := json.Marshal(invitation{name, address, silence})
	require.NoError(t, err)
	out, said, err := os.Pipe()
	require.NoError(t, err)
	p = exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestPaused$")
	p.Env = append(os.Environ(), invitationVariable+"="+string(text))
	p.ExtraFiles, p.Stderr, p.Stdout = []*os.File{said}, os.Stderr, os.Stderr
	orders, err = p.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, p.Start())
	require.NoError(t, said.Close())
	heard = make(chan struct{})
	go func() {
		defer close(heard)
		log.follow(t, out)
		_ = out.Close()
	}()
	return p, orders, heard
}

// pauseProcess has a member in its own process join, be stopped until the others go on without it, go on and train with
// them again, and leave or be killed. Meanwhile something happens to the others.
func pauseProcess(c *churn) (events int) {
	name := c.next()
	p, orders, heard := invite(c.t, name, listen(c.t, c.server), c.log)
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
	other()
	require.NoError(c.t, p.Process.Signal(syscall.SIGSTOP))
	until("")
	other()
	require.NoError(c.t, p.Process.Signal(syscall.SIGCONT))
	until(name)
	killed := c.rng.IntN(2) == 0
	if killed {
		require.NoError(c.t, p.Process.Kill())
	} else {
		require.NoError(c.t, orders.Close())
	}
	until("")
	if err := p.Wait(); !killed {
		assert.NoError(c.t, err)
	}
	<-heard
	return events
}

// listen serves a store to other processes, at the address that it returns.
func listen(t *testing.T, server *store.Server) string {
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	server.Serve(l, conf)
	return l.Addr().String()
}

// dialStore begins sessions of another process.
func dialStore(name, address string) dialer {
	return func(ctx context.Context) (store.Store, error) {
		kv, err := store.Dialer{Addresses: []string{address}, TLS: conf, Name: name + " " + rand.Text()}.Dial(ctx)
		if err != nil {
			return nil, err
		}
		return kv, nil
	}
}

// follow notes what a process says until it ends, in the middle of a word perhaps.
func (r *replay) follow(t *testing.T, out io.Reader) {
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

// TestTimes prints, of three members with the usual Silence, how long two are without a step when the third, a process, is killed or stopped,
// after how many steps another one trains with them, and how long their longest step about that is. docs/elastic.md has the command.
func TestTimes(t *testing.T) {
	times, _ := strconv.Atoi(os.Getenv("TUTTI_TIMES"))
	if times == 0 {
		t.Skip("is a measurement")
	}
	defer func(d time.Duration) { silence = d }(silence)
	silence = DefaultSilence
	log := newReplay()
	server := store.NewServer(store.Options{Silence: silence})
	defer server.Close() //nolint:errcheck // the members have ended
	address := listen(t, server)
	first := newTrainee(t, log, restless("a", dialStore("a", address), overTCP))
	second := newTrainee(t, log, restless("b", dialStore("b", address), overTCP))
	defer first.free()
	defer second.free()
	until := make(chan struct{})
	var all sync.WaitGroup
	over := func() bool {
		select {
		case <-until:
			return true
		case <-time.After(10 * time.Millisecond): // the time of a step's computation
			return false
		}
	}
	all.Go(func() {
		assert.NoError(t, second.run(t.Context(), t, func(*Epoch, int) bool { return over() && second.steps >= first.steps }))
	})

	var p *exec.Cmd
	var orders io.Closer
	var heard chan struct{}
	var began, last time.Time // of what is measured, and the last step
	var seen int              // steps since the third is in the store
	var longest, usual time.Duration
	var took []time.Duration
	kinds := []os.Signal{syscall.SIGKILL, syscall.SIGSTOP}
	n, here := 0, false
	lost := map[os.Signal][]time.Duration{}
	var steps []int
	var waits, calm []time.Duration
	require.NoError(t, first.Run(t.Context(), func(ctx context.Context, e *Epoch) error {
		over()
		if err := first.step(ctx, t, e); err != nil {
			return err
		}
		now := time.Now()
		step := now.Sub(last)
		last = now
		switch size := len(e.Members); {
		case size == 2 && p == nil: // the third joins
			if took = append(took, step); len(took) < 20 {
				return nil
			}
			usual = slices.Sorted(slices.Values(took[1:]))[10]
			p, orders, heard = invite(t, fmt.Sprint("c", n), address, log)
			longest, seen = 0, 0
		case size == 2 && began.IsZero():
			longest = max(longest, step)
			first.mu.Lock()
			v, _ := first.look()
			first.mu.Unlock()
			if len(v.present) == 3 {
				seen++
			}
		case size == 3 && !here:
			here, longest = true, max(longest, step)
			steps, waits, calm, took = append(steps, seen+1), append(waits, longest), append(calm, usual), nil
		case size == 3 && began.IsZero():
			if took = append(took, step); len(took) == 20 {
				began = time.Now()
				return p.Process.Signal(kinds[n%2])
			}
		case size == 2: // it is gone
			lost[kinds[n%2]] = append(lost[kinds[n%2]], now.Sub(began))
			_ = p.Process.Kill()
			_ = p.Wait()
			_ = orders.Close()
			<-heard
			p, began, here, took = nil, time.Time{}, false, nil
			if n++; n == 2*times {
				close(until)
				return io.EOF
			}
		}
		return nil
	}))
	all.Wait()
	ms := func(list []time.Duration) string {
		s := slices.Sorted(slices.Values(list))
		return fmt.Sprintf("%v (%v to %v)", s[len(s)/2].Round(time.Millisecond), s[0].Round(time.Millisecond), s[len(s)-1].Round(time.Millisecond))
	}
	slices.Sort(steps)
	t.Logf("killed: %s; stopped: %s; joined after %d steps (%d to %d), the longest took %s, usual ones %s", ms(lost[syscall.SIGKILL]), ms(lost[syscall.SIGSTOP]),
		steps[len(steps)/2], steps[0], steps[len(steps)-1], ms(waits), ms(calm))
	assert.NoError(t, errors.Join(first.Close(), second.Close()))
}

// TestPaused is the process.
func TestPaused(t *testing.T) {
	text := os.Getenv(invitationVariable)
	if text == "" {
		t.Skip("is part of TestChurn")
	}
	var own invitation
	require.NoError(t, json.Unmarshal([]byte(text), &own))
	silence = own.Silence
	log, out := newReplay(), json.NewEncoder(os.NewFile(3, "what is said"))
	log.tell = func(s said) { assert.NoError(t, out.Encode(s)) }
	a := newTrainee(t, log, restless(own.Name, dialStore(own.Name, own.Store), overTCP))
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
