// Package launch starts the ranks of a job on one machine or several, and ends them together. The launchers meet in the
// job's store (comm/store), in which they agree how the job ended. The first machine's keeps it, unless other processes
// serve it: then no machine is special, but that one of the launchers makes the plan of a job that is not elastic.
//
//	launch.go   what a launcher does from its beginning to its end
//	hosts.go    launchers on other hosts, by ssh
//	attend.go   the launcher of such a host
//	store.go    which store, and what launchers have alike there
//	bind*.go    the processors of ranks
//	ranks.go    the processes of ranks
//	keeper*.go  the parent of a rank's processes, which knows them all
//	guard*.go   the parent of all keepers, which ends what a killed keeper or launcher leaves
//	relay*.go   signals that mean what the ranks' program says
//	outlet.go   output, whose reader may have stopped to read
//	dumps.go    flight records, which the first machine collects
package launch

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/diagnose"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	hardware "github.com/tutti-go/tutti/internal/machine"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/repeats"
)

// Config says what to start.
type Config struct {
	Command    []string      // of each rank; not empty
	Typed      []string      // the command in the user's words, for other machines; nil for Command
	Ranks      int           // on this machine
	Machines   int           // of the job; the first one's launcher says how many, or each one's of a served store
	Listen     string        // where the first machine keeps the store, "" for a port of the loopback address
	Join       []string      // addresses of the first machine, or of servers of the store; nil on the first machine
	Served     bool          // servers have the store, so that all launchers are told Machines, Min, Max and Restarts
	Job        string        // the name of the job, "" for one that its command tells from others
	SecretFile string        // "" for the user's, if there are several machines and TUTTI_SECRET is not set
	Restarts   int           // how often the ranks are started again when one fails; the first machine's counts
	Min, Max   int           // members of an elastic job, whose ranks are started again each by itself; 0 for another job
	Wait       time.Duration // until all machines have come
	Grace      time.Duration // from the signal that tells ranks to end until they are killed; 0 for DefaultGrace
	Version    string        // of this program
	Records    string        // the directory of flight records, which the first machine collects; "" if there are none
	Hosts      []Host        // emulated ones, which the ranks are on in order, as many on each; nil for this machine
	Slots      []Slots       // hosts of a job that Spread starts, in the order of their ranks; nil for Run
	Color      bool          // prefixes have colors
	Bind       bool          // each rank runs on processors that no other rank of the job has (bind*.go)
	Plain      bool          // ranks write to Out and Err themselves
	NoPrefix   bool          // lines do not begin with the rank
	Out, Err   io.Writer     // where the ranks' output goes; Err their errors, and what the launcher says
	starter    *starter      // the launcher that has started this one, nil if a user has
}

// Host is where ranks run.
type Host struct {
	Name  string   // as ranks see it
	Enter []string // the words before a command that is to run there
}

// MaxRanks is how many ranks a launcher starts at most: each takes one process more, and four pipes of the launcher.
const MaxRanks = 4096

// DefaultListen is where the first of several machines keeps the store.
const DefaultListen = ":29400"

// A variable of ranks beside those that [rendezvous.FromEnv] reads.
const restartVariable = "TUTTI_RESTART" // how often the ranks were started before

// Keys of the store.
const (
	keys       = "launch/"
	jobKey     = keys + "job"      // what all launchers have alike; leased in a served store unless the job is elastic
	leaderKey  = keys + "leader"   // the launcher that begins a job in a served store, leased
	machines   = keys + "machine/" // by the number of ranks up to it, leased
	planKey    = keys + "plan"
	ranksKey   = keys + "ranks"     // how many have come
	dumps      = keys + "dump/"     // by file and piece
	successKey = keys + "succeeded" // of an elastic job: a rank has
	relayed    = keys + "signal/"   // the last one, by machine
	refusals   = keys + "refusal/"  // why a launcher does not take part, leased
	arrivals   = keys + "arrived/"  // of hosts that a launcher has started, by their place in the list
)

// machine is one that has come.
type machine struct {
	Host  string        `json:"host"`  // its name
	Ranks int           `json:"ranks"` // on it, 1 and up
	Grace time.Duration `json:"grace"` // as its launcher has it
	// Protocol is the version of what its launcher says.
	Protocol int `json:"protocol"`
	// ID tells the machine from others.
	ID string `json:"id,omitempty"`
	// Address is the one by which the machine reaches the store.
	Address string   `json:"address,omitempty"`
	Hosts   []string `json:"hosts,omitempty"` // emulated ones, with as many ranks each; nil for Host
}

// host is the name of the one that a rank of the machine is on.
func (m machine) host(local int) string {
	if len(m.Hosts) == 0 || m.Ranks < len(m.Hosts) {
		return m.Host
	}
	return m.Hosts[min(local/(m.Ranks/len(m.Hosts)), len(m.Hosts)-1)]
}

// read reads what a launcher says of its machine.
func (m *machine) read(text []byte) error {
	if err := json.Unmarshal(text, m); err != nil {
		return err
	}
	m.Host = printable.Text(m.Host)
	m.Address = printable.Text(m.Address)
	m.Grace = max(0, min(m.Grace, longestGrace))
	for i := range m.Hosts {
		m.Hosts[i] = printable.Text(m.Hosts[i])
	}
	if m.Ranks < 1 || m.Ranks > MaxRanks {
		return fmt.Errorf("%w: %q has %d ranks", comm.ErrArgument, m.Host, m.Ranks)
	}
	return nil
}

// plan is who runs which ranks.
type plan struct {
	Size     int                `json:"size"`     // ranks of the job; 0 before there is a plan
	First    map[string]int     `json:"first"`    // rank, by the machine's key
	Restarts int                `json:"restarts"` // as the first machine has it
	Grace    time.Duration      `json:"grace"`    // the longest of all machines
	Machines map[string]machine `json:"machines"` // all of them, by key
	Run      string             `json:"run"`      // the name of the job's run, random
}

// End is how a job ended: the error that the launchers return. The zero value is success.
type End struct {
	Text   string         `json:"text,omitempty"`   // of the error; "" of success
	Code   int            `json:"code,omitempty"`   // of the exit
	Rank   bool           `json:"rank,omitempty"`   // a rank failed, which a restart may help
	Signal syscall.Signal `json:"signal,omitempty"` // that a user sent
}

// Error says it.
func (e *End) Error() string { return e.Text }

// readEnd reads how a job ended, as some launcher said it: nothing else than an end without text is success.
func readEnd(text []byte) (End, error) {
	var end End
	if err := json.Unmarshal(text, &end); err != nil {
		return End{}, fmt.Errorf("how the job ended: %w", err)
	}
	if end == (End{}) {
		return end, nil
	}
	end.Text = cmp.Or(printable.Text(end.Text), "the job failed")
	if end.Code < 1 || end.Code > 255 {
		end.Code = 1
	}
	if !slices.Contains([]syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM}, end.Signal) {
		end.Signal = 0
	}
	return end, nil
}

// agent is the launcher of this machine.
type agent struct {
	Config
	kv      *store.Client // the session of the store; nil before connect
	dialer  store.Dialer  // where the store is another process's
	host    string        // this machine's name
	began   time.Time     // when Run was called
	address string        // of the store
	known   string        // what tells the secret
	// copyName is the name of a copy of the secret's file, "" if it is where it is looked for, or there is none.
	copyName   string
	key        string                // of this machine in the store
	turnedAway refusalLog            // launchers that do not take part
	ranks      int                   // that have come up to this machine
	strangers  repeats.Log           // launchers of other versions
	running    atomic.Pointer[group] // nil while no ranks run
	outgoing   chan string           // user signals for the other launchers, by name; some room
	posts      chan lastPost         // the last one, where no session posts; room for one
	heard      atomic.Uint64         // version in the store of the last user signal of another launcher; 0: none
	silent     []string              // keys of machines whose launchers did not answer at the end
	first      bool                  // it makes the plan: on the first machine, or as the leader of a served store
	plan       plan                  // zero before there is one
	env        []string              // of all ranks of this machine
	processors []int                 // that ranks are bound to; nil if they are not
	out        *outlet               // of the ranks' output
	err        *outlet               // of the ranks' errors, and of what the launcher says
	notes      io.Writer             // what the launcher says
}

// lastPost is how far this launcher's user signals have come to the store.
type lastPost struct {
	unanswered string // the signal whose post was not answered; "" is none
	version    uint64 // in the store, of the one before; 0: none
}

// newAgent is the launcher of a job that nobody knows of yet.
func newAgent(cfg Config) *agent {
	cfg.Grace = cmp.Or(cfg.Grace, DefaultGrace)
	a := &agent{
		Config: cfg,
		first:  cfg.Join == nil,
		began:  time.Now(),

		outgoing: make(chan string, 8),
		posts:    make(chan lastPost, 1),
		out:      newOutlet(cfg.Out),
		err:      newOutlet(cfg.Err),
	}
	a.posts <- lastPost{}
	a.notes = note{a.err}
	var err error
	if a.host, err = os.Hostname(); err != nil {
		a.host = "this machine"
	}
	if a.Hosts == nil {
		a.Hosts = []Host{{Name: a.host}}
	}
	return a
}

// Run starts the ranks of this machine and returns when the job has ended on all: nil, or an *[End] if a rank
// failed. When ctx ends, ranks get its [Signal].
func Run(ctx context.Context, cfg Config) (err error) {
	a := newAgent(cfg)
	defer func() { err = flush(a.out, a.err, err) }()
	defer a.relay(ctx)()
	starting, cancel := context.WithTimeout(ctx, cfg.Wait)
	defer cancel()
	if err := a.findProcessors(); err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	if err := a.connect(starting); err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	defer func() { _ = a.kv.Close() }() // also one of a later session
	if a.starter != nil {
		a.starter.joined(a.address, a.machine().Address)
	}
	if a.Min > 0 {
		return a.elastic(ctx)
	}
	if err := a.gather(starting); err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	complete, err := a.attend(ctx)
	if err == nil {
		err = a.exchangeSignals(ctx, a.kv)
	}
	if err != nil {
		return fmt.Errorf("launch: %w", a.storeError(err))
	}
	for round := 0; ; round++ {
		began := time.Now()
		end, err := a.round(ctx, complete, round)
		if err == nil && end.Rank && round < a.plan.Restarts {
			if a.first {
				wait := after(time.Until(began.Add(pause(round))))
				fmt.Fprintf(a.notes, "tutti: %s; restart %d of %d%s\n", end.Text, round+1, a.plan.Restarts, wait)
			}
			if end, err = a.restart(ctx, complete, round, began); end == (End{}) && err == nil {
				continue
			}
		}
		if end.Text != "" && !a.first {
			a.sendDumps()
		}
		a.leave()
		if a.first {
			a.awaitLeaving(round, end)
			err = errors.Join(err, a.takeDumps())
		}
		switch {
		case err != nil:
			return fmt.Errorf("launch: %w", err)
		case end.Text != "":
			return &end
		}
		return nil
	}
}

// arrive takes the next place among the machines. The first machine, which keeps the store, has the lowest: the
// others wait for what it says of the job, after that.
func (a *agent) arrive(ctx context.Context) error {
	if a.key == "" { // or it has a place by an earlier session
		n, err := a.takePlace(ctx)
		if err != nil {
			return err
		}
		a.key = fmt.Sprintf("%s%08d", machines, n)
		a.ranks = int(n)
	}
	text, _ := json.Marshal(a.machine())
	err := a.kv.Set(ctx, a.key, text, store.Lease)
	if err == nil && a.first {
		err = a.hearRefusals(context.WithoutCancel(ctx))
	}
	if err != nil || a.starter == nil {
		return err
	}
	return a.kv.Set(ctx, arrivalKey(a.starter.index), nil)
}

// takePlace returns how many ranks the machines up to this one have: in the order in which they come, or in which the
// user has listed them.
func (a *agent) takePlace(ctx context.Context) (int64, error) {
	if a.starter == nil {
		return a.kv.Add(ctx, ranksKey, int64(a.Ranks))
	}
	if a.first { // machines that join later have the ranks after those that are listed
		if _, err := a.kv.Add(ctx, ranksKey, int64(a.starter.total)); err != nil {
			return 0, err
		}
	}
	return int64(a.starter.through), nil
}

// machine is this one, as the others know it.
func (a *agent) machine() machine {
	m := machine{Host: a.host, Ranks: a.Ranks, Grace: a.Grace, Protocol: protocol, ID: hardware.Network()}
	m.Address, _, _ = net.SplitHostPort(a.address)
	if local := a.kv.LocalAddr(); local != nil {
		m.Address, _, _ = net.SplitHostPort(local.String())
	}
	for _, host := range a.Hosts {
		m.Hosts = append(m.Hosts, host.Name)
	}
	return m
}

// elastic runs the ranks of this machine in a job whose machines come and go. It ends when each rank has ended, with
// success if one has. A first machine keeps the store until the others have gone.
func (a *agent) elastic(ctx context.Context) error {
	a.plan = plan{
		Size:     a.ranks,
		First:    map[string]int{a.key: a.ranks - a.Ranks},
		Machines: map[string]machine{a.key: a.machine()},
	}
	if a.first && a.Listen != "" && a.starter == nil {
		fmt.Fprint(a.notes, "tutti: other machines join at any time: there, ", a.invitation())
	}
	if err := a.exchangeSignals(ctx, a.kv); unexecuted(err) {
		_ = a.kv.Close() // follow replaces a session that is lost
	} else if err != nil && a.kv.Err() == nil {
		return fmt.Errorf("launch: %w", err)
	}
	a.leaveLoopback(a.listMachines(ctx))
	failures := make(chan End, a.Ranks)
	g := a.start(0, func(failed End) { failures <- failed })
	a.running.Store(g)
	defer a.running.Store(nil)
	watching, cancel := context.WithCancel(ctx)
	go a.sayWhoIsLeft(watching, g)
	go a.sayWhoIsStopped(watching, g)
	end := a.follow(ctx, g, failures)
	cancel()
	a.stopFor(ctx, g, end)
	if !a.first && !a.Served {
		a.reconnect(ctx)
	}
	if a.succeeded(g) {
		_ = a.kv.Set(context.WithoutCancel(ctx), successKey, nil)
	}
	var err error
	switch {
	case a.Served: // records stay on the machines, of which none is special
		a.leave()
	case a.first:
		a.awaitOthers(ctx, end)
		if end.Rank && a.othersSucceeded() {
			fmt.Fprintf(a.notes, "tutti: %s; ranks of other machines have ended with success\n", end.Text)
			end = End{}
		}
		a.leave()
		err = a.takeDumps()
	default:
		a.sendDumps() // also of members that were lost in a job that went well
		a.leave()
	}
	if end.Text != "" {
		return cmp.Or(err, error(&end))
	}
	return err
}

// arrivalKey is where a host says that it has come.
func arrivalKey(index int) string { return fmt.Sprint(arrivals, index) }

// awaitOthers keeps the store of an elastic job until the other machines have gone. A signal is for this machine alone,
// unless a launcher has started those of all hosts: then the others have it as well, and come before they go.
func (a *agent) awaitOthers(ctx context.Context, end End) {
	alone := func(present []store.Entry) bool { return len(present) < 2 }
	if end.Signal == 0 {
		waiting, cancel := context.WithCancel(ctx)
		go a.sayWhoStays(waiting)
		if a.starter != nil {
			for index := range a.Machines {
				_, _ = a.kv.Get(ctx, arrivalKey(index))
			}
		}
		_, _ = a.await(ctx, alone)
		cancel()
	}
	if a.starter != nil {
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.stopTime())
		_, _ = a.await(bounded, alone)
		cancel()
	}
}

// othersSucceeded reports whether a rank of an elastic job has ended with success on a machine that has joined.
func (a *agent) othersSucceeded() bool {
	listed, err := a.kv.List(context.Background(), successKey)
	return err == nil && len(listed) > 0
}

// succeeded reports whether a rank of this machine has ended with success.
func (a *agent) succeeded(g *group) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.seen.Succeeded) > 0
}

// follow waits until the ranks of this machine have ended, in an elastic job, and returns how. It connects to the store
// again whenever the session is lost, for as long as Config.Wait says.
func (a *agent) follow(ctx context.Context, g *group, failures <-chan End) End {
	ended := make(chan struct{})
	go func() {
		g.ended.Wait()
		close(ended)
	}()
	seeking, cancel := context.WithCancel(ctx)
	type session struct {
		kv  *store.Client // nil with err
		err error         // why there is no session
	}
	found := make(chan session, 1)
	lost := a.kv.Done() // nil while a session is looked for
	looking := false
	defer func() {
		cancel()
		if !looking {
			return
		}
		if next := <-found; next.err == nil { // another one of this name would be refused
			a.kv = next.kv
		}
	}()
	for {
		select {
		case <-ended:
			if len(failures) == a.Ranks {
				return <-failures
			}
			return End{}
		case <-lost: // members connect again themselves
			lost = nil
			looking = true
			go func() {
				kv, err := a.rejoin(seeking)
				found <- session{kv, err}
			}()
		case next := <-found:
			looking = false
			if next.err != nil {
				return End{Text: fmt.Sprintf("%s: %v; the session was lost: %v", a.keeper(), next.err, a.kv.Err()), Code: 1}
			}
			a.kv = next.kv
			lost = a.kv.Done()
		case <-ctx.Done():
			return a.signalled(ctx)
		}
	}
}

// reconnect connects to the store again if the session is lost, within reconnectTime: the ranks have ended, and the
// other machines go on without this one.
func (a *agent) reconnect(ctx context.Context) {
	if a.kv.Err() == nil {
		return
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), reconnectTime)
	defer cancel()
	kv, err := a.rejoin(bounded)
	if err != nil {
		if len(a.recorded()) == 0 {
			return // nothing is lost
		}
		fmt.Fprintf(a.notes, "tutti: what this machine's ranks have recorded stays here: %s: %v\n", a.keeper(), err)
		return
	}
	a.kv = kv
}

// perHost is the number of ranks on each host.
func (a *agent) perHost() int { return a.Ranks / len(a.Hosts) }

// Signaled is the cause of a context that a signal ended.
type Signaled syscall.Signal

// Error says what the signal did.
func (s Signaled) Error() string {
	switch syscall.Signal(s) {
	case syscall.SIGHUP:
		return "hung up"
	case syscall.SIGINT:
		return "interrupted"
	case syscall.SIGTERM:
		return "terminated"
	}
	return ""
}

// Signal is the signal that ended a context, SIGTERM if something else did.
func Signal(ctx context.Context) syscall.Signal {
	s := Signaled(syscall.SIGTERM)
	errors.As(context.Cause(ctx), &s)
	return syscall.Signal(s)
}

// signalled is the end of a job whose context has ended.
func (a *agent) signalled(ctx context.Context) End {
	sig := Signal(ctx)
	end := End{Text: fmt.Sprintf("%v on %s", context.Cause(ctx), a.host), Code: 128 + int(sig), Signal: sig}
	if errors.Is(context.Cause(ctx), errDetached) {
		end.Code = 1
	}
	return end
}

// gather waits until all machines have come, and has the first one make the plan.
func (a *agent) gather(ctx context.Context) error {
	if a.first {
		if err := a.makePlan(ctx); err != nil {
			return err
		}
	} else if a.starter == nil {
		fmt.Fprintf(a.notes, "tutti: joined %s\n", a.joined())
	}
	waiting, cancel := context.WithCancel(ctx)
	go a.sayWhoIsHere(waiting)
	text, err := a.kv.Get(ctx, planKey)
	cancel()
	if err == nil {
		err = json.Unmarshal(text, &a.plan)
	}
	first, ok := a.plan.First[a.key]
	if err == nil && !ok {
		err = fmt.Errorf("%w: the job at %s has its %d machines already", comm.ErrArgument, a.joined(), len(a.plan.First))
	}
	a.leaveLoopback(slices.Collect(maps.Values(a.plan.Machines)))
	if err == nil && (first < 0 || first > a.plan.Size-a.Ranks || a.plan.Restarts < 0) {
		err = fmt.Errorf("%w: the plan of the job has %d ranks, this machine's %d from %d on, and %d restarts",
			comm.ErrArgument, a.plan.Size, a.Ranks, first, a.plan.Restarts)
	}
	return err
}

// makePlan gives the machines that have come their ranks.
func (a *agent) makePlan(ctx context.Context) error {
	if a.Machines > 1 && !a.Served && a.starter == nil {
		fmt.Fprint(a.notes, "tutti: on the other machines, ", a.invitation())
	}
	waiting, cancel := context.WithCancel(ctx)
	go a.sayWhoIsHere(waiting)
	present, err := a.await(ctx, func(present []store.Entry) bool {
		return len(a.sameVersion(present)) >= a.Machines
	})
	cancel()
	present = a.sameVersion(present)
	p := plan{First: map[string]int{}, Restarts: a.Restarts, Machines: map[string]machine{}, Run: rand.Text()}
	var names []string
	for _, e := range present[:min(len(present), a.Machines)] {
		var m machine
		err = cmp.Or(err, m.read(e.Value))
		p.Grace = max(p.Grace, m.Grace)
		p.Machines[e.Key] = m
		names = append(names, m.Host)
		p.First[e.Key] = p.Size
		p.Size += m.Ranks
	}
	if err != nil {
		const text = "%d of %d machines came (%s): %w"
		return a.turnedAway.explain(fmt.Errorf(text, len(present), a.Machines, strings.Join(names, ", "), err))
	}
	text, _ := json.Marshal(p)
	return a.kv.Set(ctx, planKey, text)
}

// sameVersion returns the machines whose launchers are of this one's version. One that does not compare versions itself
// is left out, which is said once.
func (a *agent) sameVersion(present []store.Entry) (list []store.Entry) {
	for _, e := range present {
		var m machine
		if m.read(e.Value) == nil && m.Protocol != protocol {
			if times, _ := a.strangers.Count(e.Key); times == 1 {
				launcher := fmt.Sprintf("the launcher of %s (%s)", m.Host, m.Address)
				const text = "it speaks version %d of the launchers' protocol, and this one version %d: " +
					"all machines of a job use one build of tutti"
				reason := fmt.Sprintf(text, m.Protocol, protocol)
				a.turnedAway.add(launcher, reason)
				fmt.Fprintf(a.notes, "tutti: %s is left out: %s\n", launcher, reason)
			}
			continue
		}
		list = append(list, e)
	}
	return list
}

// await waits until enough machines are present, and returns them, also when ctx ends.
func (a *agent) await(ctx context.Context, enough func(present []store.Entry) bool) (present []store.Entry, err error) {
	changes := make(chan struct{}, 1)
	stop, err := a.kv.Watch(ctx, machines, func(store.Event) {
		select {
		case changes <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return nil, err
	}
	defer stop()
	for {
		listed, err := a.kv.List(ctx, machines)
		if err != nil || enough(listed) {
			return listed, err
		}
		present = listed
		select {
		case <-changes:
		case <-ctx.Done():
			return present, comm.ContextError(ctx)
		}
	}
}

// endKey says how a round ended.
func endKey(round int) string { return fmt.Sprintf("%send/%d", keys, round) }

// doneKey says that ranks of a machine have come to a stage of a round.
func (a *agent) doneKey(stage, machine string, round int) string {
	return fmt.Sprintf("%s%s/%d/%s", keys, stage, round, machine)
}

// finish says how a round ended, unless another launcher has said it.
func (a *agent) finish(ctx context.Context, round int, end End) {
	text, _ := json.Marshal(end)
	_, _, err := a.kv.CompareAndSet(ctx, endKey(round), 0, text)
	a.abandon(ctx, err)
}

// abandon ends the session after a write that the store has refused, as one that is full does, and that the other
// launchers wait for: they see the end of the session instead.
func (a *agent) abandon(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil || a.kv.Err() != nil {
		return
	}
	fmt.Fprintf(
		a.notes,
		"tutti: the launcher on %s cannot tell the others how its ranks have ended, and leaves the job: %v\n",
		a.host,
		err,
	)
	_ = a.kv.Close() // which is the word now
}

// attend returns a context that ends when the launcher of a planned machine has left, in a round or between two. Its
// cause is an [*End] then. It outlasts ctx. The store is watched until its session ends.
func (a *agent) attend(ctx context.Context) (context.Context, error) {
	lasting := context.WithoutCancel(ctx)
	if !a.first && !a.Served { // whose session ends with the first launcher, and that attends to the others
		return lasting, nil
	}
	complete, cancel := context.WithCancelCause(lasting)
	lose := func(key string) {
		m := a.plan.Machines[key]
		text := fmt.Sprintf("the launcher of %s (%s) has ended, or its machine cannot be reached", m.Host, m.Address)
		cancel(&End{Text: text, Code: 1})
	}
	_, err := a.kv.Watch(complete, machines, func(e store.Event) {
		if _, planned := a.plan.First[e.Key]; planned && e.Deleted {
			lose(e.Key)
		}
	})
	if err != nil {
		return nil, err
	}
	present, err := a.kv.List(lasting, machines)
	if err != nil {
		return nil, err
	}
	for _, key := range a.plan.keys() { // one may have left since it came
		if !slices.ContainsFunc(present, func(e store.Entry) bool { return e.Key == key }) {
			lose(key)
		}
	}
	return complete, nil
}

// lost is how a job ends whose machines are not complete any more.
func lost(complete context.Context) End {
	end := &End{}
	errors.As(context.Cause(complete), &end)
	return *end
}

// storeError says whose store an error is about.
func (a *agent) storeError(err error) error {
	if len(a.Join) == 0 {
		return err
	}
	return fmt.Errorf("%s: %w", a.keeper(), err)
}

// round runs the ranks once, until all launchers know how they ended.
func (a *agent) round(ctx, complete context.Context, round int) (end End, err error) {
	lasting := context.WithoutCancel(ctx)
	failures := make(chan End, a.Ranks)
	g := a.start(round, func(failed End) {
		failures <- failed
		a.finish(lasting, round, failed)
	})
	watching, cancel := context.WithCancel(lasting)
	defer cancel()
	a.running.Store(g)
	defer a.running.Store(nil)
	defer a.hearForeign(watching, g)()
	go a.sayWhoIsLeft(watching, g)
	go a.sayWhoIsStopped(watching, g)
	defer context.AfterFunc(complete, func() { a.finish(lasting, round, lost(complete)) })()
	if a.first {
		go func() { // which succeeds when all have
			if a.all(watching, "success", round) == nil {
				a.finish(watching, round, End{})
			}
		}()
	}
	go func() {
		select {
		case <-g.succeeded:
			a.abandon(watching, a.kv.Set(watching, a.doneKey("success", a.key, round), nil))
		case <-ctx.Done():
			a.finish(watching, round, a.signalled(ctx))
		case <-watching.Done():
		}
	}()
	end, err = a.awaitEnd(watching, round, failures)
	if err != nil || !end.Rank {
		if end.Text != "" {
			go a.testify(lasting, g, round) // that this launcher has heard of the end
		}
		a.stopFor(ctx, g, end)
		return end, err
	}
	time.Sleep(settleTime)
	a.testify(lasting, g, round)
	judged := make(chan End, 1)
	stopped := make(chan struct{})
	go func() {
		verdict := a.judge(lasting, round, end)
		judged <- verdict
		announce(a.notes, verdict.Text+"; the other ranks", a.Grace, stopped)
	}()
	a.stop(g, end.Signal)
	close(stopped)
	return <-judged, nil
}

// stopFor is stop for another reason than a rank's end, which it says where ranks take their time: to be interrupted,
// or the loss of another machine. Without a reason, all ranks have ended.
func (a *agent) stopFor(ctx context.Context, g *group, end End) {
	stopped := make(chan struct{})
	defer close(stopped)
	if end.Text != "" {
		subject := end.Text + "; ranks"
		if errors.Is(context.Cause(ctx), Signaled(syscall.SIGINT)) {
			subject = end.Text + "; Ctrl-C kills ranks, which"
		}
		go announce(a.notes, subject, a.Grace, stopped)
	}
	a.stop(g, end.Signal)
}

// announce says at once why ranks are told to end, where they take their time: the subject ends with them.
func announce(notes io.Writer, subject string, grace time.Duration, stopped <-chan struct{}) {
	select {
	case <-stopped:
	case <-time.After(linger):
		fmt.Fprintf(notes, "tutti: %s have %v to end\n", subject, grace)
	}
}

// awaitEnd waits until a launcher says how a round has ended. One whose rank has failed, and that does not reach the
// others, says so alone.
func (a *agent) awaitEnd(ctx context.Context, round int, failures <-chan End) (End, error) {
	type word struct {
		text []byte // how the job has ended, as JSON
		err  error  // of the store
	}
	words := make(chan word, 1)
	go func() {
		text, err := a.kv.Get(ctx, endKey(round))
		words <- word{text, err}
	}()
	var failed End
	var expired <-chan time.Time // nil until a rank has failed
	for {
		select {
		case w := <-words:
			if w.err != nil {
				return End{}, a.storeError(w.err)
			}
			return readEnd(w.text)
		case f := <-failures:
			if expired == nil {
				failed = f
				expired = time.After(answerTime)
			}
		case <-expired:
			return a.alone(failed), nil
		}
	}
}

// alone is the end of a job for a launcher that does not reach the others any more, when a rank has failed.
func (a *agent) alone(failed End) End {
	if len(a.Join) == 0 {
		return failed
	}
	_ = a.kv.Close() // nothing can be said any more
	failed.Text = fmt.Sprintf("%s does not answer at %s: is it down, or the network to it cut? Here, %s",
		a.keeper(), a.joined(), failed.Text)
	failed.Rank = false
	return failed
}

// all waits until the ranks of all machines have come to a stage of a round.
func (a *agent) all(ctx context.Context, stage string, round int) error {
	var waited []string
	for m := range a.plan.First {
		waited = append(waited, a.doneKey(stage, m, round))
	}
	return a.kv.Wait(ctx, waited...)
}

// restart waits until the ranks have ended everywhere, clears what they had in the store, and pauses until the next
// round, which the first machine begins. The job ends, with an end that is not zero, when a user's signal comes to any
// launcher meanwhile, or the machines are not complete any more.
func (a *agent) restart(ctx, complete context.Context, round int, began time.Time) (End, error) {
	lasting := context.WithoutCancel(ctx)
	if err := a.kv.Set(lasting, a.doneKey("ended", a.key, round), nil); err != nil {
		return End{}, a.storeError(err)
	}
	ready := a.doneKey("ready", "", round)
	begin := make(<-chan time.Time)
	if a.first {
		err := a.prepare(complete, round)
		if err != nil && complete.Err() == nil {
			return End{}, a.storeError(err)
		}
		if err == nil {
			begin = time.After(time.Until(began.Add(pause(round))))
		}
	}
	watching, cancel := context.WithCancel(lasting)
	defer cancel()
	go func() {
		var end End
		select {
		case <-begin:
		case <-ctx.Done():
			end = a.signalled(ctx)
		case <-complete.Done():
			end = lost(complete)
		case <-watching.Done():
			return
		}
		text, _ := json.Marshal(end)
		_, _, _ = a.kv.CompareAndSet(watching, ready, 0, text)
	}()
	text, err := a.kv.Get(watching, ready)
	if err != nil {
		return End{}, a.storeError(err)
	}
	return readEnd(text)
}

// prepare waits until the ranks of all machines have ended, and clears what they had in the store.
func (a *agent) prepare(ctx context.Context, round int) error {
	ctx, cancel := context.WithTimeout(ctx, a.stopTime())
	defer cancel()
	if err := a.all(ctx, "ended", round); err != nil {
		return err
	}
	return a.clear(ctx, func(key string) bool {
		return strings.HasPrefix(key, keys)
	})
}

// leave takes this machine from those of the job.
func (a *agent) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	_ = a.kv.Delete(ctx, a.key, 0) // it goes with the session as well
}

// awaitLeaving has the first machine keep the store until the others know how the job ended, as evidence of theirs or
// success shows, and have stopped their ranks. The others have answerTime: one that is lost would be missed later.
func (a *agent) awaitLeaving(round int, end End) {
	ctx, cancel := context.WithTimeout(context.Background(), a.stopTime())
	defer cancel()
	complete := func(present []store.Entry) bool {
		return !slices.ContainsFunc(present, func(e store.Entry) bool {
			_, planned := a.plan.First[e.Key]
			return planned && !slices.Contains(a.silent, e.Key)
		})
	}
	if end.Text != "" {
		bounded, cancel := context.WithTimeout(ctx, answerTime)
		_, _ = a.await(bounded, complete)
		cancel()
		listed, _ := a.kv.List(ctx, a.evidenceKey("", round))
		a.noteSilent(listed, round)
	}
	_, _ = a.await(ctx, complete)
}

// stop ends the ranks, and does not have them wait for a reader of the output meanwhile.
func (a *agent) stop(g *group, with syscall.Signal) {
	a.out.keepWaiting(false)
	a.err.keepWaiting(false)
	g.stop(with)
	a.out.keepWaiting(true)
	a.err.keepWaiting(true)
}

// stopTime is how long all machines take at most until nothing of their ranks is left.
func (a *agent) stopTime() time.Duration {
	return max(a.Grace, a.plan.Grace) + stopMargin
}

// Unread is the error of a job whose launcher has waited in vain for a reader of its errors: nobody else need wait.
type Unread struct{ error }

// Unwrap returns the error without that.
func (u *Unread) Unwrap() error { return u.error }

// flush writes what is left of the output of a job that has ended with an error or nil, for as long as it has a reader,
// and returns that error. One reader may have both the output and the errors: it is waited for once.
func flush(out, errs *outlet, err error) error {
	out.keepWaiting(false)
	errs.keepWaiting(false)
	left := patience
	if lost := out.close(patience - lastWord); lost > 0 {
		fmt.Fprintf(note{errs}, "tutti: nobody reads the output: the last %d bytes of it are lost\n", lost)
		left = lastWord
	}
	if errs.close(left) > 0 && err != nil {
		return &Unread{err}
	}
	return err
}

// recorded are the files of the flight records that this machine's ranks have written.
func (a *agent) recorded() (paths []string) {
	if a.Records == "" {
		return nil
	}
	return slices.DeleteFunc(diagnose.Files(a.Records), func(path string) bool {
		info, err := os.Stat(path)
		return err != nil || info.ModTime().Before(a.began)
	})
}

// sendDumps gives the flight records that this machine's ranks wrote to the first machine, in pieces.
func (a *agent) sendDumps() {
	ctx, cancel := context.WithTimeout(context.Background(), dumpTime)
	defer cancel()
	for _, path := range a.recorded() {
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(a.Records, path)
		i := 0
		for piece := range slices.Chunk(text, store.MaxValue) {
			err = cmp.Or(err, a.kv.Set(ctx, fmt.Sprintf("%s%s/%06d", dumps, filepath.ToSlash(name), i), piece))
			i++
		}
		if err != nil {
			fmt.Fprintf(a.notes, "tutti: the flight record %s stays on this machine: %v\n", path, err)
		}
	}
}
