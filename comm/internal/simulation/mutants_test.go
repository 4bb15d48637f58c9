//go:build !simulated

package simulation

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// mutant is a defect: a change, and the subject whose seeds find it or the package whose tests do. why says why a
// mutant that nothing finds is harmless.
type mutant struct {
	name    string
	subject string
	change
	why string
}

const (
	lotFile, failureFile, messageFile, progressFile = "comm/local/lot.go", "comm/local/failure.go", "comm/local/message.go", "comm/local/progress.go"
	smallFile, endpointFile, localCloseFile         = "comm/local/small.go", "comm/local/endpoint.go", "comm/local/close.go"
	driverFile, lifeFile                            = "comm/local/driver.go", "comm/backend/life.go"
	engineFile, controlFile, stallFile              = "comm/internal/schedule/engine.go", "comm/internal/schedule/control.go", "comm/internal/schedule/stall.go"
	waitFile, driveFile, submitFile                 = "comm/internal/schedule/wait.go", "comm/internal/schedule/drive.go", "comm/internal/schedule/submit.go"
	segmentFile, blocksFile                         = "comm/internal/schedule/segment.go", "comm/internal/schedule/blocks.go"
	pairFile, inboxFile, nodeFile, laneFile         = "comm/tcp/pair.go", "comm/tcp/inbox.go", "comm/tcp/node.go", "comm/tcp/lane.go"
	wireFile, connectFile                           = "comm/tcp/wire.go", "comm/tcp/connect.go"
	stateFile, serverFile, clientFile               = "comm/store/state.go", "comm/store/server.go", "comm/store/client.go"
	peersFile                                       = "comm/internal/peers/peers.go"
)

const (
	viewFile, boundaryFile, memberFile = "distributed/elastic/view.go", "distributed/elastic/boundary.go", "distributed/elastic/state.go"
	publishFile, reachFile, awaitFile  = "distributed/elastic/publish.go", "distributed/elastic/reach.go", "distributed/elastic/await.go"
	rollCallFile                       = "distributed/elastic/rollcall.go"
)

// The first ten were once in this repository and have been fixed.
var mutants = []mutant{
	{"a sleeper whose small collective others have finished is not woken", "local", change{lotFile, "e.mayFinish() || e.done() ||", "e.done() ||"}, ""},
	{"the messages of a group wait behind its collectives", "local", change{endpointFile, "[...]bool{true, false}", "[...]bool{false, true}"}, ""},
	{"a rank that aborts because of another one tells nobody", "tcp", change{engineFile, "\te.notifyFailure(&comm.OpError{Op: op.String(), Err: err})\n\t}\n\treturn err", "\tif _, ok := err.(*peerFailure); ok {\n\t\t\te.notified = true\n\t\t}\n\t\te.notifyFailure(&comm.OpError{Op: op.String(), Err: err})\n\t}\n\treturn err"}, ""},
	{"a rank waits for one that is gone and called something else", "schedule", change{stallFile, "!alone && e.wire.Gone(src) != nil", "false"}, ""},
	{"control messages are sent to a rank that is lost", "tcp", change{wireFile, "taken := p.gone == nil", "taken := true"}, "nobody asks whether they were sent; they take memory until the connections close"},
	{"a lane counts as joined before its hello is answered", "tcp", change{connectFile, "\tif accepts {\n\t\tif _, err := conn.Write([]byte{byte(welcome)}); err != nil {\n\t\t\treturn nil\n\t\t}\n\t}\n\tl := newLane(p, int(h.Lane), conn)\n\tp.lanes[h.Lane] = l\n\tnotify(k.changed)\n\treturn l", "\tl := newLane(p, int(h.Lane), conn)\n\tp.lanes[h.Lane] = l\n\tnotify(k.changed)\n\tk.mu.Unlock()\n\tdefer k.mu.Lock()\n\tif accepts {\n\t\t_, _ = conn.Write([]byte{byte(welcome)})\n\t}\n\treturn l"}, ""},
	{"a sub-communicator that comes with an error stays open", "tcp", change{"comm/backend/base.go", "_ = comm.CloseAll(child, err) // its other ranks may have their sub-communicators", ""}, ""},
	{"memory is written after a communicator was closed", "schedule", change{engineFile, "if touched == 0 || ctx.Err() != nil {", "if true {"}, ""},
	{"Close returns nil after a drain that failed", "tcp", change{lifeFile, "l.Fail(err)\n\t\terr = l.Cause()", "l.Fail(err)\n\t\terr = nil"}, ""},
	{"messages of a group of the engine wait behind its collectives", "schedule", change{submitFile, "[...]bool{true, false}", "[...]bool{false, true}"}, ""},

	// comm/local: notifications.
	{"a sleeper does not look whether it is done", "local", change{lotFile, "e.mayFinish() || e.done() ||", "e.mayFinish() ||"}, ""},
	{"a sleeper looks whether it is done before it looks whether it may be", "local", change{lotFile, "e.mayFinish() || e.done() ||", "e.done() || e.mayFinish() ||"}, ""},
	{"a sleeper does not look for a failure", "local", change{lotFile, "w.failure.Load() != nil ||", ""}, ""},
	{"a sleeper does not look for chunks", "local", change{lotFile, "e.exhausted.Load() != uint64(front.claim.last()) || ", ""}, ""},
	{"a sleeper does not look for messages", "local", change{lotFile, " || front.jobs.Load() > 0\n", "\n"}, ""},
	{"nobody is woken when a small collective was told", "local", change{smallFile, "w.wake(-1, func(e *endpoint) bool { return e.mayFinish() || e.done() })", ""}, ""},
	{"backlogs do not go on when a small collective was told", "local", change{smallFile, "\td.kickStalled()\n\tif w.left", "\tif w.left"}, ""},
	{"nobody is woken when a collective is done", "local", change{progressFile, "\tw.wakeDone()\n\td.kickStalled()", "\td.kickStalled()"}, ""},
	{"backlogs do not go on when a collective is done", "local", change{progressFile, "\tw.wakeDone()\n\td.kickStalled()", "\tw.wakeDone()"}, ""},
	{"a collective does not let the next one start", "local", change{progressFile, "\td.arrived(seq + 1)\n", ""}, ""},
	{"a backlog that stalls does not look again", "local", change{endpointFile, "// A collective may have ended before it could see the mark.\n\treturn e.startable()", "return false"}, ""},
	{"a message that ends does not let the backlog go on", "local", change{messageFile, "if goesOn {", "if goesOn && false {"}, ""},
	{"a message that ends wakes nobody", "local", change{messageFile, "if idle {", "if idle && false {"}, ""},
	{"a failure wakes nobody", "local", change{failureFile, "w.wakeAll()", ""}, ""},
	{"a message to a rank that has left waits", "local", change{messageFile, "if w.left.Load() > 0 {", "if false {"}, ""},
	{"a rank that leaves does not look for messages to it", "local", change{localCloseFile, "\te.world.checkMailboxes()\n", ""}, ""},
	{"a rank that leaves does not look for collectives", "local", change{localCloseFile, "\te.world.checkLeft()\n", ""}, ""},
	{"a collective does not look for ranks that have left", "local", change{driverFile, "if d.world.left.Load() > 0 {", "if false {"}, ""},
	{"a rank that leaves looks before it counts as gone", "local", change{localCloseFile, "\te.world.left.Add(1)\n\te.world.checkLeft()\n\te.world.checkMailboxes()\n", "\te.world.checkLeft()\n\te.world.checkMailboxes()\n\te.world.left.Add(1)\n"}, ""},
	{"an abort does not wait for those who copy", "local", change{progressFile, "if !running && w.copying.Load() == 0 {", "if !running {"}, ""},
	{"a backlog starts operations of a world that broke", "local", change{progressFile, "if d.world.failure.Load() != nil || !e.advanceable() {", "if !e.advanceable() {"}, "what it starts looks for the failure itself before it touches memory"},
	{"chunks of a collective are offered to nobody", "local", change{progressFile, "w.wakeHelpers(chunks, anyone)", ""}, ""},
	{"chunks of a message are offered to nobody", "local", change{messageFile, "w.wakeHelpers(chunks, takesPart)", "_ = takesPart"}, ""},
	{"an endpoint may be kicked only after its backlog was looked at", "local", change{progressFile, "\t\t\te.linked.Store(false) // from here on, others may kick it again\n\t\t\td.pump(e)", "\t\t\td.pump(e)\n\t\t\te.linked.Store(false)"}, ""},

	{"a rank whose Split fails stays in the communicator that others have of it", "local", change{"comm/local/collective.go", "s.extras[r].split.forsake(e, w.failure.Load().errorFor(w.ranks[r]))", ""}, ""},

	// comm/backend: the order of the end.
	{"Close releases before it drains", "schedule", change{lifeFile, "known := l.known.Load()", "known := l.known.Load()\n\t_ = l.bounded(l.backend.Release)"}, ""},
	{"an error does not end what is in flight", "schedule", change{lifeFile, "l.Fail(err)\n\t\tl.abort()\n\t\tl.known", "l.Fail(err)\n\t\tl.known"}, ""},
	{"a communicator that has failed is released without an abort", "comm/backend", change{lifeFile, "if !l.broken.CompareAndSwap(nil, new(error)) {\n\t\tl.abortOnce()\n\t}", ""}, ""},
	{"a second failure comes before calls are refused", "comm/backend", change{lifeFile, "earlier := l.broken.Load(); *earlier != nil", "earlier := l.broken.Load(); first && *earlier != nil"}, ""},
	{"the second Close does not wait for the first", "local", change{lifeFile, "l.closes.Do(func() { err = l.closeOnce() })", "if !l.closing.Swap(true) {\n\t\terr = l.closeOnce()\n\t}"}, ""},

	// comm/internal/schedule.
	{"nobody hears control messages while nobody waits", "schedule", change{driveFile, "if e.Life.Err() == nil {", "if false {"}, ""},
	{"what came during a wait is left to nobody", "schedule", change{waitFile, "if e.waiters.Add(-1) == 0 && e.waiter != nil && (e.missed.Load() || e.inFlight.Load() > 0) {", "if e.waiters.Add(-1); false {"}, ""},
	{"a rank leaves without a goodbye", "schedule", change{engineFile, "\te.notifyAll(controlMessage{kind: goodbye})\n", ""}, ""},
	{"a rank is gone before what it said is heard", "schedule", change{controlFile, "if bytes != nil {", "if gone := e.wire.Gone(src); gone != nil {\n\t\tm := &controlMessage{kind: lost}\n\t\tm.say(gone.Error())\n\t\treturn m, nil\n\t} else if bytes != nil {"}, ""},
	{"a stalled wait reports nothing", "schedule", change{waitFile, "\t\te.reportStall()\n", ""}, ""},
	{"a barrier that all have come to fails", "schedule", change{controlFile, "if o := e.oldest(); o != nil && !o.op.MovesData() && o.number < m.passed {", "if false {"}, ""},
	{"a wait does not look for failures", "schedule", change{waitFile, "if err := e.attend(); err != nil {\n\t\treturn false, e.fail(op, err)\n\t}", ""}, ""},
	{"an operation completes at its first message", "schedule", change{engineFile, "if o.inFlight--; o.inFlight == 0 {", "if o.inFlight--; o.inFlight >= 0 {"}, ""},
	{"a report of calls is compared once for all", "schedule", change{controlFile, "p.report = m\n\t\tp.agreed = false", "p.report = m"}, ""},

	// comm/internal/schedule, over memory that ranks share.
	{"a round is complete before the last rank has begun it", "segment", change{segmentFile, "s.seen < len(slots); s.seen++", "s.seen < len(slots)-1; s.seen++"}, ""},
	{"a rank begins a round before it has written", "segment", change{blocksFile, "\tif o.phase < blocks {\n\t\te.writeBlock(o, o.phase)\n\t}\n\tif !ends {\n\t\ts.announce(o)\n\t}\n", "\tif !ends {\n\t\ts.announce(o)\n\t}\n\tif o.phase < blocks {\n\t\te.writeBlock(o, o.phase)\n\t}\n"}, ""},
	{"results are taken from the round that begins", "segment", change{blocksFile, "e.takeBlock(o, i, full)", "e.takeBlock(o, i, s.now())"}, ""},

	// comm/tcp.
	{"a rank leaves before its goodbye is seen", "tcp", change{nodeFile, "if len(p.lanes) > 0 {\n\t\t\tselect {", "if false {\n\t\t\tselect {"}, ""},
	{"who leaves is not told that its goodbye was seen", "tcp", change{pairFile, "\t\tnotify(p.acknowledged)\n", ""}, ""},
	{"goodbyes are not confirmed", "tcp", change{pairFile, "p.outbox.urgent.Push(outFrame{header: header{kind: frameGoodbyeAck}})", ""}, ""},
	{"the end of a connection is told to nobody", "tcp", change{pairFile, "go p.node.signal() // not with mu held", ""}, "waits look every millisecond, and Close drains"},
	{"messages that are done are told to nobody", "tcp", change{wireFile, "w.done = append(w.done, schedule.Done{ID: id, Bytes: bytes})\n\tw.mu.Unlock()\n\tif !w.collects.Load() {\n\t\tw.signal()\n\t}", "w.done = append(w.done, schedule.Done{ID: id, Bytes: bytes})\n\tw.mu.Unlock()"}, "waits look every millisecond: what they wait for is later by that"},
	{"grants are not sent", "tcp", change{inboxFile, "p.outbox.grants.Push(outFrame{header: header{kind: frameGrant, message: in.number}})", ""}, ""},
	{"credit is not returned", "comm/tcp", change{"comm/tcp/credit.go", "c.available += int(bytes)", ""}, ""},
	{"silence is not noticed", "tcp", change{"comm/tcp/silence.go", "silent >= patience {", "silent < 0 {"}, ""},
	{"a rank that still connects is lost for its silence", "comm/tcp", change{"comm/tcp/silence.go", "if last == unheard {", "if false {"}, ""},
	{"no signs of life", "tcp", change{"comm/tcp/silence.go", "quiet := !p.active && !p.state.departing()", "quiet := false"}, ""},
	{"a dropped message is received into its memory", "tcp", change{laneFile, "if in != nil && !in.dropped.Load() {", "if in != nil {"}, ""},
	{"an abort does not wait for who writes to memory", "tcp", change{pairFile, "\t\tawaitUnlock(&l.filling)\n", ""}, ""},
	{"a rank is gone before its messages are taken", "tcp", change{wireFile, "if m := w.mailboxes[rank]; len(w.done) > 0 || m.report != nil || m.last != nil {", "if false {"}, ""},
	{"the parts of a message that was granted are left to nobody", "tcp", change{pairFile, "if ready {", "if ready && false {"}, ""},
	{"communicator IDs come again", "trees", change{nodeFile, "n.proposals.Add(1)*uint64(n.size)", "(n.proposals.Add(1)%8+1)*uint64(n.size)"}, ""},
	{"parts overtake their announcement", "tcp", change{pairFile, "for message > p.inbox.announced && p.gone == nil && len(p.lanes) > 1 {", "for false {"}, ""},
	{"lanes of an attempt before count", "comm/tcp", change{connectFile, "k.done || h.Attempt < p.attempt || len(p.lanes) != int(h.Lanes)", "k.done || len(p.lanes) != int(h.Lanes)"}, ""},

	// comm/store.
	{"a key that is set is told to nobody", "store", change{stateFile, "replies = append(replies, reply{To: w.session, ID: w.id, Entries: now})", ""}, ""},
	{"a rank does not wait for the answers to its abort", "rendezvous", change{peersFile, "if rank < 0 {\n\t\t\treturn doing, nil", "if true {\n\t\t\treturn doing, nil"}, ""},
	{"a rank answers an abort before it has noted it", "comm/internal/peers", change{peersFile, "uncovered := g.note(rank, n)\n\tg.endWaits()\n\tif uncovered && !g.aborted.Load() {", "defer g.note(rank, n)\n\tif n.Aborted {"}, ""},
	{"a rank that has aborted answers", "comm/internal/peers", change{peersFile, "g.aborted.Store(true)\n\tearlier", "earlier"}, ""},
	{"a rank that has aborted is waited for", "comm/internal/peers", change{peersFile, "case n.Answer != \"\" || n.Doing != \"\":", "case false:"}, ""},
	{"a rank answers each abort", "comm/internal/peers", change{peersFile, "uncovered = !g.failed.Load() || n.Done < g.known.Done", "uncovered = true"}, ""},
	{"an answer covers later aborts", "comm/internal/peers", change{peersFile, "err == nil && a.Done <= done", "err == nil"}, ""},
	{"a rank misses the aborts before it joined", "comm/internal/peers", change{peersFile, "stop, err := g.client.Watch(ctx, g.prefix(noticeKeys), g.hear)", "joined := false\n\tstop, err := g.client.Watch(ctx, g.prefix(noticeKeys), func(e store.Event) {\n\t\tif joined {\n\t\t\tg.hear(e)\n\t\t}\n\t})\n\tjoined = true"}, ""},
	{"a rank waits for one that is lost", "comm/internal/peers", change{peersFile, "case reachable:", "case reachable, member:"}, ""},
	{"leases stay", "store", change{stateFile, "if e.lease && e.session == session {", "if e.lease && false {"}, ""},
	{"a client does not notice the end of its store", "store", change{clientFile, "c.fail(fmt.Errorf(\"%w: the job's store does not answer: %w\", comm.ErrPeerFailed, err))", ""}, ""},
	{"a session that is silent goes on", "store", change{serverFile, "if silence > 0 {", "if false {"}, ""},
	{"clients send no heartbeats", "store", change{clientFile, "_ = c.post(request{Op: opPing})", ""}, ""},
	{"two goroutines send at once", "store", change{serverFile, "first = !o.busy", "first = true"}, ""},
	{"a store that closes tells nobody", "store", change{serverFile, "<-n.out.close()", ""}, ""},
	{"a session whose connection has ended goes on", "store", change{serverFile, "\tdefer s.end(n)\n", ""}, ""},

	// distributed/elastic.
	{"a member that joins gets no state", "elastic", change{memberFile, "case receiver:\n\t\t\tif err := m.receive(ctx, e, sender); err != nil {\n\t\t\t\treturn err\n\t\t\t}", "case receiver:"}, ""},
	{"a member that leaves makes a step alone", "distributed/elastic", change{boundaryFile, "next != nil && k.self.Wishes && k.alone(next)", "false"}, ""},
	{"a refused status is taken for told", "elastic", change{publishFile, "retry = time.After(refused.add(written, err))", "m.mu.Lock()\n\t\t\tif c := m.due(); c != nil {\n\t\t\t\tc.exists, c.stored = true, c.want\n\t\t\t}\n\t\t\tm.mu.Unlock()"}, ""},
	{"a refused epoch is proposed no more", "elastic", change{awaitFile, "w.propose = time.Now().Add(w.refused.add(epochKey, err))", "w.propose = time.Now().Add(time.Hour)"}, ""},
	{"who failed an attempt is tried again at once", "elastic", change{viewFile, "excluded := v.unreachable(last)", "excluded := v.unreachable(last)[:0]"}, ""},
	{"who failed an attempt does not wait", "distributed/elastic", change{reachFile, "s.BackedOff >= r.attempts(s.Name) ||", "true ||"}, ""},
	{"one in doubt rolls the last step back", "distributed/elastic", change{boundaryFile, "k.self.Standing == prepared && k.self.Step < k.step(last)", "false"}, ""},
	{"a step that was rolled back is entered", "distributed/elastic", change{boundaryFile, "last.Step == k.withdrawn", "false"}, ""},
	{"a member that hangs in a step is waited for", "elastic", change{rollCallFile, "m.abortLate(w.record, absent)\n", ""}, ""},
	{"who comes to an exchange does not begin the time anew", "distributed/elastic", change{rollCallFile, "|| !slices.Equal(missing, r.missing)", "|| r.missing == nil"}, ""},
	{"members that are all to leave wait for a vote", "distributed/elastic", change{boundaryFile, "k.self.Wishes && k.ends && !k.stays()", "false"}, ""},
}

// TestMutantTexts checks that the texts are where the mutants expect them.
func TestMutantTexts(t *testing.T) {
	for _, m := range mutants {
		text, err := os.ReadFile("../../../" + m.file)
		require.NoError(t, err)
		assert.Equal(t, 1, strings.Count(string(text), m.old), "%s: %q in %s", m.name, m.old, m.file)
	}
}

// seeds is the largest number of seeds for a mutant; a harmless one gets a fifth.
var seeds = map[string]int{"rendezvous": 1500, "schedule": 12000, "segment": 2000, "local": 20000, "store": 1500, "tcp": 4000, "trees": 200, "elastic": 750}

// TestMutants inserts the defects and checks that seeds find each. It plays seeds for many minutes; set
// TUTTI_EXTENDED.
func TestMutants(t *testing.T) {
	here(t)
	if os.Getenv("TUTTI_EXTENDED") == "" {
		t.Skip("plays seeds for many minutes; set TUTTI_EXTENDED")
	}
	binary, err := build(t, true, mutants...)
	require.NoError(t, err)
	for i, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			var out string
			var err error
			if strings.Contains(m.subject, "/") {
				out, err = unit(t, m)
			} else {
				runs := seeds[m.subject]
				if m.why != "" {
					runs /= 5
				}
				out, err = simulate(t, binary, "TestSeeds", fmt.Sprint("TUTTI_SIM_MUTANT=", i+1), "TUTTI_SIM_SUBJECT="+m.subject, "TUTTI_SIM_FIRST=1", fmt.Sprint("TUTTI_SIM_RUNS=", runs))
			}
			found := "not found"
			if err != nil {
				_, found, _ = strings.Cut(out, map[bool]string{true: "--- FAIL: ", false: "FAILED: "}[strings.Contains(m.subject, "/")])
				found, _, _ = strings.Cut(found, "\n")
			}
			fmt.Printf("mutant %q: %s\n", m.name, cmp.Or(found, "ended: "+out[max(0, len(out)-300):]))
			require.Equal(t, m.why == "", err != nil, "%s", cmp.Or(m.why, "not found"))
		})
	}
}

// unit runs the tests of a package with a mutant.
func unit(t *testing.T, m mutant) (string, error) {
	file, err := filepath.Abs("../../../" + m.file)
	require.NoError(t, err)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	changed, overlay := filepath.Join(t.TempDir(), "changed.go"), filepath.Join(t.TempDir(), "overlay.json")
	require.NoError(t, os.WriteFile(changed, []byte(apply(t, m.file, string(text), []change{m.change})), 0o600))
	text, err = json.Marshal(map[string]any{"Replace": map[string]string{file: changed}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(overlay, text, 0o600))
	out, err := exec.CommandContext(t.Context(), "go", "test", "-vet=off", "-timeout", "3m", "-overlay", overlay, "../../../"+m.subject).CombinedOutput()
	require.NotContains(t, string(out), "[build failed]")
	return string(out), err
}
