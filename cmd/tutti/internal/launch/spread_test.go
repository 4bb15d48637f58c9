//go:build unix

package launch

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// newSpread returns a job of two hosts with one rank each. The first host has joined, and the second looks for the
// store.
func newSpread(t *testing.T, change func(*spread)) (s *spread, notes *buffer, ends <-chan End, cancel context.CancelCauseFunc) {
	t.Helper()
	notes = new(buffer)
	s = &spread{
		out:     newOutlet(io.Discard),
		err:     newOutlet(io.Discard),
		notes:   notes,
		words:   make(chan word),
		closed:  make(chan struct{}),
		known:   make(chan struct{}),
		address: "a:1",
		silence: time.Hour,
	}
	s.Wait = time.Hour
	change(s)
	t.Cleanup(func() { _ = flush(s.out, s.err, nil) })
	for i, name := range []string{"a", "b"} {
		h := &remote{
			Slots:    Slots{Host: name, Ranks: 1},
			through:  i + 1,
			cmd:      exec.Command("sleep", "1000"),
			gone:     make(chan struct{}),
			reported: make(chan struct{}),
			signals:  make(chan syscall.Signal, 8),
		}
		var err error
		h.control, err = h.cmd.StdinPipe()
		require.NoError(t, err)
		require.NoError(t, h.cmd.Start())
		t.Cleanup(func() {
			_ = h.cmd.Process.Kill()
			_ = h.cmd.Wait()
		})
		s.hosts = append(s.hosts, h)
	}
	s.hosts[0].stage = stageJoined
	s.hosts[1].stage = stageStarted
	ctx, cancel := context.WithCancelCause(t.Context())
	result := make(chan End, 1)
	go func() { result <- s.follow(ctx) }()
	return s, notes, result, cancel
}

// say sends a word of a host's launcher unless the job has ended.
func (s *spread) say(t *testing.T, w word, ends <-chan End) {
	t.Helper()
	select {
	case s.words <- w:
	case end := <-ends:
		t.Fatalf("the job has ended: %+v", end)
	case <-time.After(time.Minute):
		t.Fatal("nobody listens")
	}
}

// receive returns the next value of a channel.
func receive[T any](t *testing.T, from <-chan T) (value T) {
	t.Helper()
	select {
	case value = <-from:
	case <-time.After(time.Minute):
		t.Fatal("nothing comes")
	}
	return value
}

// A host that has not joined does not shorten the time in which other hosts' ranks end.
func TestAnInterruptedHostThatHasNotJoined(t *testing.T) {
	s, _, ends, cancel := newSpread(t, func(s *spread) { s.Min = 1 })
	cancel(Signaled(syscall.SIGINT))
	assert.Equal(t, syscall.SIGINT, receive(t, s.hosts[0].signals))
	s.say(t, word{from: s.hosts[1], err: errors.New("exit status 1")}, ends)
	s.say(t, word{from: s.hosts[0], kind: reportEnded, value: `{"text":"interrupted on a","code":130}`}, ends)
	s.say(t, word{from: s.hosts[0], err: errors.New("exit status 130")}, ends)
	assert.Equal(t, End{Text: "interrupted on a", Code: 130}, receive(t, ends))
}

// An elastic job with enough members goes on without a host that does not join in time. Any other job ends.
func TestAHostThatDoesNotCome(t *testing.T) {
	s, notes, ends, _ := newSpread(t, func(s *spread) { s.Min, s.Wait = 1, time.Millisecond })
	require.Eventually(t, func() bool { return strings.Contains(notes.String(), "goes on with the other hosts") }, time.Minute, time.Millisecond)
	s.say(t, word{from: s.hosts[1], err: errors.New("exit status 1")}, ends)
	s.say(t, word{from: s.hosts[0]}, ends)
	assert.Equal(t, End{}, receive(t, ends), "the first has succeeded, though its report was not read")
	for _, least := range []int{0, 2} {
		_, _, ends, _ := newSpread(t, func(s *spread) { s.Min, s.Wait = least, time.Millisecond })
		assert.Contains(t, receive(t, ends).Text, "b does not reach the first host")
	}
}

// A stopped first launcher has not ended.
func TestALauncherThatDoesNotAnswer(t *testing.T) {
	s, _, _, _ := newSpread(t, func(*spread) {})
	assert.Equal(t, End{Text: "the launcher on a does not answer", Code: 1}, s.unended())
}

// A host that has not ended in time is not waited for again: here, the wait would last an hour.
func TestAFrozenHostIsWaitedForOnce(t *testing.T) {
	s, _, ends, cancel := newSpread(t, func(s *spread) { s.Grace = -stopMargin - dumpTime - patience }) // no time at all
	cancel(Signaled(syscall.SIGINT))
	assert.Contains(t, receive(t, ends).Text, "the launcher on a does not answer")
	s.Grace = time.Hour
	s.started = len(s.hosts)
	for _, h := range s.hosts {
		go s.await(h, new(sync.WaitGroup))
	}
	ended := make(chan struct{}, 1)
	go func() {
		s.close()
		ended <- struct{}{}
	}()
	receive(t, ended)
	for _, h := range s.hosts {
		require.NotNil(t, h.cmd.ProcessState, "it has been ended")
	}
}

// Signals come after a host's assignment, in their order, and by name.
func TestSignalsComeAfterTheAssignment(t *testing.T) {
	s, _, _, _ := newSpread(t, func(*spread) {})
	h := s.hosts[1]
	read, write := io.Pipe()
	h.control = write
	go s.direct(h)
	s.signal(s.hosts[1:], syscall.SIGUSR1)
	s.signal(s.hosts[1:], syscall.SIGUSR2)
	s.signal(s.hosts[1:], syscall.SIGTERM)
	close(s.known)
	lines := bufio.NewScanner(read)
	require.True(t, lines.Scan())
	var a assignment
	require.NoError(t, json.Unmarshal(lines.Bytes(), &a))
	assert.Equal(t, []string{"a:1"}, a.Join)
	for _, want := range []string{"USR1", "USR2", "TERM"} {
		require.True(t, lines.Scan())
		assert.Equal(t, want, lines.Text())
	}
	close(h.gone)
}

// The job's exit code is that of a host's launcher, unless it is ssh's, or the runtime's of a launcher that has crashed.
func TestExitCodesOfHosts(t *testing.T) {
	for code, want := range map[int]int{0: 1, 1: 1, 2: 1, 7: 7, 137: 137, 143: 143, 255: 1} {
		cmd := exec.Command("sh", "-c", fmt.Sprint("exit ", code))
		_ = cmd.Run()
		assert.Equal(t, want, (&remote{state: cmd.ProcessState}).exitCode(), code)
	}
}

// An unknown signal, such as another system's number, ends no job.
func TestUnknownSignals(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	obey(bufio.NewReader(strings.NewReader("30\n10\nINFO\nUSR1\n")), time.Minute, cancel)
	assert.ErrorIs(t, context.Cause(ctx), errDetached)
	read, write := io.Pipe()
	ctx, cancel = context.WithCancelCause(t.Context())
	go obey(bufio.NewReader(read), time.Minute, cancel)
	_, err := io.WriteString(write, "INT\n")
	require.NoError(t, err)
	<-ctx.Done()
	assert.Equal(t, Signaled(syscall.SIGINT), context.Cause(ctx))
}

// A launcher ends its job when its starter has been silent for a time: a cable may have been pulled.
func TestSilentStarter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		read, write := io.Pipe()
		var all sync.WaitGroup
		all.Go(func() { obey(bufio.NewReader(read), time.Minute, cancel) })
		for range 5 {
			time.Sleep(50 * time.Second)
			_, err := io.WriteString(write, reportAlive+"\n")
			require.NoError(t, err)
			require.NoError(t, ctx.Err())
		}
		last := time.Now()
		<-ctx.Done()
		assert.Equal(t, time.Minute, time.Since(last))
		assert.ErrorIs(t, context.Cause(ctx), errDetached)
		require.NoError(t, write.Close())
		all.Wait()
	})
}

// A shell that begins a line, for example with a terminal's title, hides neither output nor reports.
func TestReportsBehindATitle(t *testing.T) {
	const title = "\x1b]0;a\a"
	out := new(buffer)
	o := &output{to: out, from: new(remote), prefix: "a: "}
	for _, line := range []string{"Welcome\n", title + marker + "started v1\n", "one\n", "two " + marker + "\n"} {
		_, err := o.Write([]byte(line))
		require.NoError(t, err)
	}
	assert.Equal(t, "a: one\na: two "+marker+"\n", out.String())
	s, _, ends, _ := newSpread(t, func(s *spread) { s.Version = "v1" })
	r := &reader{spread: s, from: s.hosts[1]}
	_, err := r.Write([]byte(title + marker + "started v2\n"))
	require.NoError(t, err)
	assert.Contains(t, receive(t, ends).Text, "b has tutti v2")
}

// All hosts with stuck connections are ended within one common bound.
func TestAllStandingConnectionsAreEnded(t *testing.T) {
	s := &spread{closed: make(chan struct{})}
	s.Grace = -(stopMargin + dumpTime + patience) // close waits for nobody
	for range 3 {
		h := &remote{cmd: exec.Command("sleep", "1000"), gone: make(chan struct{}), stage: stageJoined}
		var err error
		h.control, err = h.cmd.StdinPipe()
		require.NoError(t, err)
		require.NoError(t, h.cmd.Start())
		go func() {
			_ = h.cmd.Wait()
			close(h.gone)
		}()
		s.hosts = append(s.hosts, h)
	}
	s.started = len(s.hosts)
	ended := make(chan struct{})
	go func() {
		s.close()
		close(ended)
	}()
	receive(t, ended)
}

// A host is lost if it has sent a sign of life and then nothing for as many looks as its silence has. A host is not
// lost if its lines wait for a reader of this launcher's output, or if it has only just begun.
func TestSilentHosts(t *testing.T) {
	names := []string{"silent", "talking", "blocked", "waiting", "gone"}
	s := &spread{silence: 10 * time.Second, notes: io.Discard, err: newOutlet(io.Discard)}
	t.Cleanup(func() { _ = flush(s.err, s.err, nil) })
	hosts := map[string]*remote{}
	for _, name := range names {
		h := &remote{Slots: Slots{Host: name}, stage: stageJoined, cmd: exec.Command("sleep", "1000")}
		require.NoError(t, h.cmd.Start())
		s.hosts = append(s.hosts, h)
		hosts[name] = h
		if name != "waiting" {
			_, err := (&reader{spread: s, from: h, open: true}).Write([]byte(marker + reportAlive + " \n"))
			require.NoError(t, err)
		}
	}
	hosts["gone"].stage = stageGone
	hosts["silent"].address = "10.0.0.5"
	done := hosts["blocked"].receive()
	assert.Empty(t, s.look(), "all have been heard")
	for range looks - 1 {
		hosts["talking"].receive()()
		assert.Empty(t, s.look())
	}
	hosts["talking"].receive()()
	lost := s.look()
	require.Equal(t, []*remote{hosts["silent"]}, lost)
	want := "silent (10.0.0.5): nothing has come from its launcher for 10s: is the machine down or hung, or the network to it cut?"
	assert.Equal(t, &End{Text: want, Code: 1}, s.lose(lost))
	done()
	for range looks {
		hosts["talking"].receive()()
		assert.Empty(t, s.look(), "it was heard when its line was taken")
	}
	hosts["talking"].receive()()
	assert.Equal(t, []*remote{hosts["blocked"]}, s.look())
	for _, h := range s.hosts {
		_ = h.cmd.Process.Kill()
		_ = h.cmd.Wait()
	}
}

// An elastic job goes on without a silent host, unless that is the first host.
func TestSilentHostsOfAnElasticJob(t *testing.T) {
	const want = "b (10.0.0.6): nothing has come from its launcher for 10ms"
	s, notes, ends, _ := newSpread(t, func(s *spread) {
		s.Min = 1
		s.silence = 10 * time.Millisecond
	})
	s.say(t, word{from: s.hosts[1], kind: reportJoined, value: "10.0.0.5:1 10.0.0.6"}, ends)
	s.hosts[1].beating.Store(true)
	assert.Error(t, s.hosts[1].cmd.Wait(), "it is killed")
	s.say(t, word{from: s.hosts[1], err: errors.New("signal: killed")}, ends)
	s.say(t, word{from: s.hosts[0], kind: reportAlive}, ends) // it is handled after the loss
	assert.Contains(t, notes.String(), want)
	assert.Contains(t, notes.String(), "the job goes on without it")
	s.hosts[0].beating.Store(true)
	assert.Contains(t, receive(t, ends).Text, "a: nothing has come from its launcher for 10ms")
	for least, index := range []int{1, 0} { // in a job that is not elastic, any host; in an elastic one, the first
		s, _, ends, _ := newSpread(t, func(s *spread) {
			s.Min = least
			s.silence = 10 * time.Millisecond
		})
		s.hosts[index].beating.Store(true)
		assert.Contains(t, receive(t, ends).Text, s.hosts[index].Host+": nothing has come from its launcher for 10ms")
	}
}

// Words of a command and a directory}

// Words of a command and a directory may be in any encoding.
func TestWordsInOtherEncodings(t *testing.T) {
	const latin = "na\xefve \"' \n$x"
	t.Chdir(t.TempDir())
	s := &spread{}
	s.Typed = []string{"sh", "-c", latin}
	h := &remote{Slots: Slots{Host: "a", Ranks: 1}, through: 1}
	s.hosts = []*remote{h}
	t.Setenv("TUTTI_ANY", latin)
	sent, err := json.Marshal(s.assignment(h))
	require.NoError(t, err)
	var told assignment
	require.NoError(t, json.Unmarshal(sent, &told))
	require.NoError(t, os.Unsetenv("TUTTI_ANY"))
	require.NoError(t, told.enter(io.Discard))
	assert.Equal(t, latin, os.Getenv("TUTTI_ANY"))
	var cfg Config
	told.configure(&cfg)
	assert.Equal(t, s.Typed, cfg.Typed)
}

// A rank may write a launcher's marker.
func TestReportsOfARank(t *testing.T) {
	s, _, _, _ := newSpread(t, func(*spread) {})
	var lines buffer
	s.err = newOutlet(&lines)
	r := &reader{spread: s, from: s.hosts[0], open: true}
	for _, kind := range []string{reportStarted, reportJoined} {
		line := marker + kind + " v0.0.0\n"
		_, err := r.Write([]byte(line))
		require.NoError(t, err)
	}
	_ = flush(s.err, s.err, nil)
	assert.Equal(t, 2, strings.Count(lines.String(), "v0.0.0"))
}
