//go:build unix

package launch

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/fault"
)

// The culprit is named, whichever rank ends first.
func TestVerdicts(t *testing.T) {
	a, b := machines+"1", machines+"2"
	job := plan{
		Size:  4,
		First: map[string]int{a: 0, b: 2},
		Machines: map[string]machine{
			a: {Host: "one", Ranks: 2, Address: "10.0.0.1"},
			b: {Host: "two", Ranks: 2, Address: "10.0.0.2"},
		},
	}
	const silence = "nothing has come from it for 10s"
	lost := func(about int, by ...int) (all []fault.Report) {
		for _, rank := range by {
			all = append(all, fault.Report{By: rank, About: about, Reason: silence})
		}
		return all
	}
	waited := func(kind fault.Kind, about int, by ...int) (all []fault.Report) {
		for _, r := range lost(about, by...) {
			r.Kind = kind
			r.Reason = "other ranks timed out waiting for it"
			all = append(all, r)
		}
		return all
	}
	reached := func(kind fault.Kind, by, about int) []fault.Report {
		return []fault.Report{{Kind: kind, By: by, About: about, Reason: "cannot be reached at [10.0.0.1:29500]: i/o timeout"}}
	}
	const blocked = "rank 2 on two (10.0.0.2) reports that rank 0 on one (10.0.0.1) cannot be reached at [10.0.0.1:29500]: " +
		"i/o timeout; does a firewall let the machines reach each other?"
	victim := evidence{Failed: []failure{{0, "exit status 1", 1}}}
	killed := evidence{Failed: []failure{{3, "signal: killed", 137}}}
	first := End{Text: "rank 0 on one (10.0.0.1): exit status 1", Code: 1, Rank: true}
	for name, c := range map[string]struct {
		one, two evidence
		silent   bool // the second machine is silent
		gone     bool // and its session has ended
		reports  []fault.Report
		began    int // the rank whose failure the launchers heard of first
		text     string
		code     int
		restarts bool
	}{
		"one alone": {one: victim, text: first.Text, code: 1, restarts: true},
		"a killed one, and its victim": {
			one: victim, two: killed, reports: lost(3, 0),
			text: "rank 3 on two (10.0.0.2): signal: killed", code: 137, restarts: true,
		},
		"a shell says that it was killed": {
			one: victim, two: evidence{Failed: []failure{{2, "exit status 1", 1}, {3, "exit status 137", 137}}},
			text: "rank 3 on two (10.0.0.2): exit status 137", code: 137, restarts: true,
		},
		"a victim whose code is above 128": {
			one: evidence{Failed: []failure{{0, "exit status 255", 255}}}, two: evidence{Failed: []failure{{2, "exit status 3", 3}}},
			began: 2, text: "rank 2 on two (10.0.0.2): exit status 3", code: 3, restarts: true,
		},
		"a victim that aborts": {
			one: evidence{Failed: []failure{{0, "signal: aborted", 134}}}, two: evidence{Failed: []failure{{2, "exit status 3", 3}}},
			began: 2, text: "rank 2 on two (10.0.0.2): exit status 3", code: 3, restarts: true,
		},
		"a victim that crashes after it has lost another": {
			one: evidence{Failed: []failure{{0, "signal: segmentation fault", 139}}}, two: evidence{Failed: []failure{{2, "exit status 3", 3}}},
			reports: lost(2, 0), began: 2, text: "rank 2 on two (10.0.0.2): exit status 3", code: 3, restarts: true,
		},
		"the first one crashes, and has lost another": {
			one: evidence{Failed: []failure{{0, "signal: segmentation fault", 139}}}, two: evidence{Failed: []failure{{2, "exit status 3", 3}}},
			reports: lost(2, 0), text: "rank 0 on one (10.0.0.1): signal: segmentation fault", code: 139, restarts: true,
		},
		"two that were killed": {
			one: evidence{Failed: []failure{{1, "signal: killed", 137}}}, two: evidence{Failed: []failure{{2, "exit status 1", 1}, {3, "signal: killed", 137}}},
			began: 3, text: "rank 3 on two (10.0.0.2): signal: killed", code: 137, restarts: true,
		},
		"a stopped one": {
			one: victim, two: evidence{Stopped: []stoppedRank{{2, 77}}}, reports: lost(2, 0, 1), code: 1, restarts: true,
			text: "rank 2 on two (10.0.0.2): process 77 is stopped: " + silence + ", says rank 0 on one (10.0.0.1); --tcp-silence has others wait longer for it",
		},
		"one that was stopped before it had connected": {
			one: victim, two: evidence{Stopped: []stoppedRank{{2, 77}}}, code: 1, restarts: true,
			reports: []fault.Report{{By: 0, About: 2, Kind: fault.Unreached, Reason: "it has not connected"}},
			text:    "rank 2 on two (10.0.0.2): process 77 is stopped: it has not connected, says rank 0 on one (10.0.0.1); TUTTI_CONNECT_TIMEOUT has others wait longer for it",
		},
		"a machine that is cut off": {
			one: victim, silent: true, reports: append(lost(2, 0), lost(3, 0, 1)...), code: 1,
			text: "rank 3 on two (10.0.0.2): " + silence + ", says rank 0 on one (10.0.0.1); its launcher does not answer: is the machine down, or the network to it cut?",
		},
		"a machine whose launcher has ended": {
			one: victim, silent: true, gone: true, reports: lost(2, 0), code: 1,
			text: "rank 2 on two (10.0.0.2): " + silence + ", says rank 0 on one (10.0.0.1); its launcher has ended, or its machine cannot be reached",
		},
		"a firewall between the ranks": {
			one: victim, reports: lost(2, 0), code: 1, restarts: true,
			text: "rank 2 on two (10.0.0.2): " + silence + ", says rank 0 on one (10.0.0.1); its process is there: does a firewall let the machines reach each other?",
		},
		"a firewall, and all ranks have failed": {
			one: victim, two: evidence{Failed: []failure{{2, "exit status 1", 1}}}, reports: append(lost(2, 0), lost(0, 2)...), code: 1, restarts: true,
			text: "rank 0 on one (10.0.0.1) has lost rank 2 on two (10.0.0.2), and the other way round: " + silence + "; does a firewall let the machines reach each other?",
		},
		"one that hangs in the kernel": {
			one: victim, reports: lost(1, 0), code: 1, restarts: true,
			text: "rank 1 on one (10.0.0.1): " + silence + ", says rank 0 on one (10.0.0.1); its process is there, but does not run",
		},
		"one that fails, whose victim is faster": {
			one: victim, two: evidence{Failed: []failure{{3, "exit status 7", 7}}}, reports: lost(3, 0), code: 7, restarts: true,
			text: "rank 3 on two (10.0.0.2): exit status 7",
		},
		"one that others have lost, and that loses them then": {
			one: evidence{Failed: []failure{{1, "exit status 1", 1}}}, reports: append(lost(1, 0, 2, 3), lost(0, 1)...), began: 1,
			text: "rank 1 on one (10.0.0.1): exit status 1", code: 1, restarts: true,
		},
		"one that others have lost, that loses them then, and one of these": {
			one: evidence{Failed: []failure{{0, "exit status 4", 4}, {1, "exit status 5", 5}}}, reports: append(lost(1, 0, 2, 3), lost(0, 1)...),
			text: "rank 1 on one (10.0.0.1): exit status 5", code: 5, restarts: true,
		},
		"one that fails, whose victim is faster, and has victims as well": {
			one: victim, two: evidence{Failed: []failure{{3, "exit status 7", 7}}}, reports: append(lost(3, 0), lost(0, 1, 2)...),
			text: "rank 3 on two (10.0.0.2): exit status 7", code: 7, restarts: true,
		},
		"one that does not answer, whose victim has victims": {
			one: victim, silent: true, reports: append(lost(3, 0), lost(0, 1, 2)...), code: 1,
			text: "rank 3 on two (10.0.0.2): " + silence + ", says rank 0 on one (10.0.0.1); its launcher does not answer: is the machine down, or the network to it cut?",
		},
		"one that has ended with success too early": {
			one: evidence{Failed: victim.Failed, Succeeded: []int{1}}, two: evidence{Succeeded: []int{2}}, reports: lost(1, 0), code: 1, restarts: true,
			text: first.Text + "; ranks 1, 2 had ended with success before",
		},
		"one that others have waited for": {
			one: victim, reports: append(waited(fault.Late, 3, 0, 1), waited(fault.Late, 1, 0)...), code: 1, restarts: true,
			text: "rank 3 on two (10.0.0.2): other ranks timed out waiting for it, says rank 0 on one (10.0.0.1); its process is there: with TUTTI_RECORD=1000, 'tutti diagnose .' says what it does instead",
		},
		"one that others have waited for, and that has lost one of them since": {
			one: victim, reports: append(waited(fault.Late, 3, 0), lost(0, 3)...), code: 1, restarts: true,
			text: "rank 3 on two (10.0.0.2): other ranks timed out waiting for it, says rank 0 on one (10.0.0.1); its process is there: with TUTTI_RECORD=1000, 'tutti diagnose .' says what it does instead",
		},
		"one that others have waited for, on a machine that is cut off": {
			one: victim, silent: true, reports: waited(fault.Late, 3, 0), code: 1, restarts: true,
			text: "rank 3 on two (10.0.0.2): other ranks timed out waiting for it, says rank 0 on one (10.0.0.1); its launcher does not answer: is the machine down, or the network to it cut?",
		},
		"two that wait for each other": {
			one: victim, reports: append(waited(fault.Late, 3, 0), waited(fault.Late, 0, 3)...), text: first.Text, code: 1, restarts: true,
		},
		"one that nobody was connected to": {
			one: victim, reports: waited(fault.Unreached, 1, 0), code: 1, restarts: true,
			text: "rank 1 on one (10.0.0.1): other ranks timed out waiting for it, says rank 0 on one (10.0.0.1); its process is there: with TUTTI_RECORD=1000, 'tutti diagnose .' says what it does instead",
		},
		"one that nobody of another machine was connected to": {
			one: victim, reports: waited(fault.Unreached, 2, 0), code: 1, restarts: true,
			text: "rank 2 on two (10.0.0.2): other ranks timed out waiting for it, says rank 0 on one (10.0.0.1); its process is there: does a firewall let the machines reach each other, and has its program come so far?",
		},
		"a firewall from the beginning": {
			one: victim, reports: append(waited(fault.Unreached, 2, 0), waited(fault.Unreached, 0, 2)...), code: 1, restarts: true,
			text: "rank 0 on one (10.0.0.1) does not reach rank 2 on two (10.0.0.2), and the other way round: other ranks timed out waiting for it; does a firewall let the machines reach each other?",
		},
		"a firewall from the beginning, and only the one that was called has said so yet": {
			one: victim, reports: reached(fault.Heard, 0, 2), code: 1, restarts: true, text: blocked,
		},
		"a firewall from the beginning, and both have said so": {
			one: victim, two: evidence{Failed: []failure{{2, "exit status 1", 1}}}, code: 1, restarts: true,
			reports: append(reached(fault.Heard, 0, 2), reached(fault.Tried, 2, 0)...), text: blocked,
		},
		"a firewall from the beginning, and the one that was called has not heard of it": {
			one: victim, reports: append(waited(fault.Unreached, 2, 0), reached(fault.Tried, 2, 0)...), code: 1, restarts: true, text: blocked,
		},
		"a firewall from the beginning, and the one that was called waits on": {
			two: evidence{Failed: []failure{{2, "exit status 1", 1}}}, reports: reached(fault.Tried, 2, 0), began: 2, code: 1, restarts: true, text: blocked,
		},
		"one that has failed, and that another one has tried since": {
			one: victim, reports: reached(fault.Tried, 2, 0), text: first.Text, code: 1, restarts: true,
		},
		"one that has tried one of a machine that is cut off": {
			one: victim, silent: true, reports: reached(fault.Tried, 0, 2), code: 1, restarts: true,
			text: "rank 2 on two (10.0.0.2): cannot be reached at [10.0.0.1:29500]: i/o timeout, says rank 0 on one (10.0.0.1); its launcher does not answer: is the machine down, or the network to it cut?",
		},
		"one that nobody was connected to, as it has ended": {
			one: evidence{Failed: victim.Failed, Succeeded: []int{1}}, reports: waited(fault.Unreached, 1, 0), code: 1, restarts: true,
			text: first.Text + "; rank 1 had ended with success before",
		},
		"a machine that lies of others": {
			one: victim, two: evidence{Failed: []failure{{1, "signal: killed", 137}, {0, "forged", 2}}, Stopped: []stoppedRank{{0, 1}}, Succeeded: []int{1}},
			text: first.Text, code: 1, restarts: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			docket := court{plan: job, all: map[string]evidence{a: c.one}, present: map[string]bool{a: true, b: !c.gone}, reports: c.reports}
			if !c.silent {
				text := mustJSON(t, c.two)
				docket.add(b, text)
			}
			end := first
			for _, f := range docket.failed() {
				if f.Rank == c.began {
					end = docket.blame(f)
				}
			}
			assert.Equal(t, End{Text: c.text, Code: c.code, Rank: c.restarts}, docket.verdict(end))
		})
	}
}

// processOf returns the process that the last rank prints as its own.
func processOf(t *testing.T, s *started) int {
	t.Helper()
	s.says(t, "process ")
	_, text, _ := strings.Cut(s.out.String(), "process ")
	pid, err := strconv.Atoi(strings.Fields(text)[0])
	require.NoError(t, err)
	return pid
}

// Every launcher names a stopped or killed rank, on any machine, although its victims end first.
func TestCulprits(t *testing.T) {
	for signal, want := range map[syscall.Signal]string{
		syscall.SIGSTOP: `rank 4 on .* \(\S+\): process %d is stopped: nothing has come from it for .*, says rank . on `,
		syscall.SIGKILL: `^rank 4 on .* \(\S+\): signal: killed \(out of memory\? .*dmesg\)$`,
		syscall.SIGSEGV: `^rank 4 on .* \(\S+\): (signal: segmentation fault|exit status 2)`,
	} {
		t.Run(signal.String(), func(t *testing.T) {
			if signal == syscall.SIGSTOP { // nothing else ends the others
				t.Setenv("TUTTI_TCP_SILENCE", "2s")
			}
			first, second := pair(t)
			a := begin(t, t.Context(), "works", first)
			b := begin(t, t.Context(), "works", second)
			pid := processOf(t, b)
			require.NoError(t, syscall.Kill(pid, signal))
			if strings.Contains(want, "%d") {
				want = fmt.Sprintf(want, pid)
			}
			for _, s := range []*started{a, b} {
				assert.Regexp(t, want, ended(t, s.wait(t)).Text)
			}
		})
	}
}

// The launcher names a rank that sleeps in its code or never joins, not the rank whose patience ends first.
func TestStragglers(t *testing.T) {
	for way, want := range map[string]string{
		"absent, first": `^rank 0 on \S+: it has not come to connect, says rank . on \S+; its process is there: with TUTTI_RECORD=1000, `,
		"works, sleeps": `^rank 1 on \S+: other ranks timed out waiting for it, says rank . on \S+; its process is there: with TUTTI_RECORD=1000, `,
		"absent":        `^rank 1 on \S+: it has (published no address|not connected to this rank, which listens at .*), says rank . on \S+; its process is there: with TUTTI_RECORD=1000, `,
	} {
		t.Run(way, func(t *testing.T) {
			s := begin(t, t.Context(), way, func(c *Config) { c.Ranks = 2 })
			assert.Regexp(t, want, ended(t, s.wait(t)).Text)
		})
	}
}

// A rank that succeeds while others still need it is named.
func TestARankThatLeavesEarly(t *testing.T) {
	s := begin(t, t.Context(), "works, leaves", one)
	host, err := os.Hostname()
	require.NoError(t, err)
	assert.Equal(t, "rank 0 on "+host+": exit status 1; rank 1 had ended with success before", ended(t, s.wait(t)).Text)
}

// mustJSON encodes a value in the form that launchers exchange.
func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return text
}
