// Package launch starts the ranks of a job on one or several machines, and ends them together. The launchers meet in
// the job's store (comm/store) and agree there on how the job ended. The first machine's launcher keeps the store,
// unless other processes serve it. With a served store no machine is special, except that one launcher plans a job that
// is not elastic.
//
//	launch.go   a launcher from its beginning to its end
//	hosts.go    launchers on other hosts, by ssh
//	attend.go   the launcher on such a host
//	store.go    the choice of the store, and the terms that launchers share in it
//	bind*.go    the processors of ranks
//	bound*.go   the processes that the user may start
//	ranks.go    the processes of ranks
//	keeper*.go  the parent of a rank's processes, which tracks them all
//	guard*.go   the parent of all keepers, which ends the processes that a killed keeper or launcher leaves
//	relay*.go   user signals, to which the ranks' program gives the meaning
//	outlet.go   output whose reader may have stopped
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

// Config describes what to start.
type Config struct {
	Command    []string      // each rank's command; not empty
	Typed      []string      // the command in the user's words, for other machines; nil for Command
	Ranks      int           // on this machine
	Machines   int           // set by the first machine's launcher, or by each launcher of a served store
	Listen     string        // where the first machine keeps the store; "" for a port of the loopback address
	Join       []string      // addresses of the first machine, or of servers of the store; nil on the first machine
	Served     bool          // servers have the store, so all launchers are told Machines, Min, Max and Restarts
	Job        string        // the name of the job; "" if its command distinguishes it
	SecretFile string        // "" for the user's file, if there are several machines and TUTTI_SECRET is not set
	Restarts   int           // how often the ranks are restarted when one fails; the first machine's value counts
	Min, Max   int           // members of an elastic job, which restarts each rank alone; 0 for another job
	Wait       time.Duration // limit until all machines have joined
	Grace      time.Duration // between the signal that tells ranks to end and the kill; 0 for DefaultGrace
	Version    string        // of this program
	Records    string        // the directory of flight records, which the first machine collects; "" for none
	Hosts      []Host        // emulated hosts, in the order of ranks, with equal numbers of ranks; nil for this machine
	Slots      []Slots       // hosts of a job that Spread starts, in the order of their ranks; nil for Run
	Color      bool          // prefixes have colors
	Bind       bool          // each rank runs on processors that no other rank of the job has (bind*.go)
	Plain      bool          // ranks write to Out and Err themselves
	NoPrefix   bool          // lines do not begin with the rank
	Out, Err   io.Writer     // destinations of output, and of errors and the launcher's messages
	starter    *starter      // the launcher that has started this one; nil if a user has
}

// Host is a place where ranks run.
type Host struct {
	Name  string   // the host's name as ranks see it
	Enter []string // words before a command, which make it run there
}

// MaxRanks bounds how many ranks a launcher starts. Each rank takes one more process and four pipes of the launcher.
const MaxRanks = 4096

// DefaultListen is the address at which the first of several machines keeps the store.
const DefaultListen = ":29400"

// restartVariable is a variable of ranks that [rendezvous.FromEnv] does not read.
const restartVariable = "TUTTI_RESTART" // how often the ranks were started before

// Keys of the store.
const (
	keys       = "launch/"
	jobKey     = keys + "job"      // all launchers' terms; leased in a served store unless the job is elastic
	leaderKey  = keys + "leader"   // the launcher that begins a job in a served store; leased
	machines   = keys + "machine/" // by the number of ranks up to the machine; leased
	planKey    = keys + "plan"
	ranksKey   = keys + "ranks"     // number of ranks whose machines have joined
	dumps      = keys + "dump/"     // by file and piece of it
	successKey = keys + "succeeded" // set in an elastic job once a rank has succeeded
	relayed    = keys + "signal/"   // last user signal, by machine
	refusals   = keys + "refusal/"  // why a launcher does not take part; leased
	arrivals   = keys + "arrived/"  // hosts that have joined, by their place in the list, if a launcher has started them
)

// machine describes a machine that has joined.
type machine struct {
	Host  string        `json:"host"`  // its name
	Ranks int           `json:"ranks"` // ranks on it, 1 and up
	Grace time.Duration `json:"grace"` // its launcher's grace
	// Protocol is the version of the launchers' protocol that its launcher speaks.
	Protocol int `json:"protocol"`
	// ID identifies the machine.
	ID string `json:"id,omitempty"`
	// Address is the address by which the machine reaches the store. At a tunnel's end, it is the one by which others
	// most likely reach the machine.
	Address string   `json:"address,omitempty"`
	Hosts   []string `json:"hosts,omitempty"` // emulated hosts with equal numbers of ranks; nil for Host
}

// host returns the name of the host of one of the machine's ranks.
func (m machine) host(local int) string {
	if len(m.Hosts) == 0 || m.Ranks < len(m.Hosts) {
		return m.Host
	}
	return m.Hosts[min(local/(m.Ranks/len(m.Hosts)), len(m.Hosts)-1)]
}

// read reads a launcher's description of its machine.
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

// plan tells which machine runs which ranks.
type plan struct {
	Size     int                `json:"size"`     // ranks of the job; 0 before there is a plan
	First    map[string]int     `json:"first"`    // first rank, by the machine's key
	Restarts int                `json:"restarts"` // the first machine's value
	Grace    time.Duration      `json:"grace"`    // the longest of all machines
	Machines map[string]machine `json:"machines"` // all machines, by key
	Run      string             `json:"run"`      // name of the job's run, random
}

// End describes how a job ended. The launchers return it as their error. The zero value is success.
type End struct {
	Text   string         `json:"text,omitempty"`   // text of the error; "" for success
	Code   int            `json:"code,omitempty"`   // exit code
	Rank   bool           `json:"rank,omitempty"`   // a rank failed, so a restart may help
	Signal syscall.Signal `json:"signal,omitempty"` // signal that a user sent; 0 for none
}

// Error returns the text.
func (e *End) Error() string { return e.Text }

// readEnd reads a launcher's message about the job's end. Only an end without any content is success.
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
	kv      *store.Client // session of the store; nil before connect
	dialer  store.Dialer  // how to reach another process's store
	host    string        // this machine's name
	began   time.Time     // when Run was called
	address string        // of the store
	known   string        // how another machine learns the secret
	// copyName is the name of the copy of the secret's file. It is "" if the file lies at its default place, or if
	// there is no file.
	copyName   string
	key        string                // this machine's key in the store
	turnedAway refusalLog            // launchers that do not take part
	ranks      int                   // that have come up to this machine
	strangers  repeats.Log           // launchers of other versions
	running    atomic.Pointer[group] // nil while no ranks run
	outgoing   chan string           // user signals for the other launchers, by name; buffered
	posts      chan lastPost         // the last post while no session posts; room for one
	heard      atomic.Uint64         // store version of another launcher's last user signal; 0 for none
	silent     []string              // keys of machines whose launchers did not answer at the end
	first      bool                  // it makes the plan, on the first machine or as the leader of a served store
	plan       plan                  // zero before there is one
	env        []string              // of all ranks of this machine
	processors []int                 // processors to bind ranks to; nil if ranks are not bound
	out        *outlet               // of the ranks' output
	err        *outlet               // of the ranks' errors and the launcher's messages
	notes      io.Writer             // the launcher's messages
}

// lastPost records how far this launcher's user signals have reached the store.
type lastPost struct {
	unanswered string // signal whose post was not answered; "" for none
	version    uint64 // store version of the post before it; 0 for none
}

// newAgent returns the launcher of a job before it connects.
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

// Run starts the ranks of this machine and returns when the job has ended on all machines. It returns nil, or an *[End]
// if a rank failed. When ctx ends, ranks get its [Signal].
func Run(ctx context.Context, cfg Config) (err error) {
	if err := checkProcesses(cfg.Ranks); err != nil { // before any goroutine, which may need a thread
		return fmt.Errorf("launch: %w", err)
	}
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
	defer func() { _ = a.kv.Close() }() // this may be a later session
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

// arrive takes the next place among the machines. The first machine, which keeps the store, gets the lowest place: the
// others wait until it has set the job's terms, which it does after it has its place.
func (a *agent) arrive(ctx context.Context) error {
	if a.key == "" { // an earlier session may have taken a place
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

// takePlace returns the number of ranks on all machines up to this one, in the order in which they join or in which the
// user has listed them.
func (a *agent) takePlace(ctx context.Context) (int64, error) {
	if a.starter == nil {
		return a.kv.Add(ctx, ranksKey, int64(a.Ranks))
	}
	if a.first { // machines that join later get the ranks after the listed ones
		if _, err := a.kv.Add(ctx, ranksKey, int64(a.starter.total)); err != nil {
			return 0, err
		}
	}
	return int64(a.starter.through), nil
}

// machine returns this machine's description for the others.
func (a *agent) machine() machine {
	m := machine{Host: a.host, Ranks: a.Ranks, Grace: a.Grace, Protocol: protocol, ID: hardware.Network()}
	m.Address, _, _ = net.SplitHostPort(a.address)
	if local := a.kv.LocalAddr(); local != nil {
		m.Address, _, _ = net.SplitHostPort(local.String())
	}
	if isLoopback(m.Address) { // a tunnel's end: other machines do not know it
		m.Address = cmp.Or(reachableAddress(), m.Address)
	}
	for _, host := range a.Hosts {
		m.Hosts = append(m.Hosts, host.Name)
	}
	return m
}

// elastic runs the ranks of this machine in a job whose machines come and go. It ends when all of them have ended, with
// success if one has succeeded. A first machine keeps the store until the other machines have left.
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
		_ = a.kv.Close() // follow replaces a lost session
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
	case a.Served: // records stay on their machines, because none is special
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
		a.sendDumps() // a job that succeeds may have records of lost members
		a.leave()
	}
	if end.Text != "" {
		return cmp.Or(err, error(&end))
	}
	return err
}

// arrivalKey returns the key that a host sets when it has joined.
func arrivalKey(index int) string { return fmt.Sprint(arrivals, index) }

// awaitOthers keeps the store of an elastic job until the other machines have left. A signal is for this machine alone,
// unless a launcher has started all hosts. Then the others get the signal too, and must join before they leave.
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

// othersSucceeded reports whether a rank of an elastic job has succeeded on a machine that has joined.
func (a *agent) othersSucceeded() bool {
	listed, err := a.kv.List(context.Background(), successKey)
	return err == nil && len(listed) > 0
}

// succeeded reports whether a rank of this machine has succeeded.
func (a *agent) succeeded(g *group) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.seen.Succeeded) > 0
}

// follow waits until this machine's ranks have ended in an elastic job, and returns how. When the session of the store
// is lost, it connects again, for up to Config.Wait each time.
func (a *agent) follow(ctx context.Context, g *group, failures <-chan End) End {
	ended := make(chan struct{})
	go func() {
		g.ended.Wait()
		close(ended)
	}()
	seeking, cancel := context.WithCancel(ctx)
	type session struct {
		kv  *store.Client // nil if err is set
		err error         // why there is no session
	}
	found := make(chan session, 1)
	lost := a.kv.Done() // nil during a search for a session
	looking := false
	defer func() {
		cancel()
		if !looking {
			return
		}
		if next := <-found; next.err == nil { // the store would refuse another session of this name
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
		case <-lost: // members reconnect themselves
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

// reconnect connects to the store again if the session is lost, within reconnectTime. The bound is short because the
// ranks have ended and the other machines go on without this one.
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

// perHost returns the number of ranks on each host.
func (a *agent) perHost() int { return a.Ranks / len(a.Hosts) }

// Signaled is the cause of a context that a signal ended.
type Signaled syscall.Signal

// Error names the effect of the signal.
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

// Signal returns the signal that ended a context, SIGTERM if something else did.
func Signal(ctx context.Context) syscall.Signal {
	s := Signaled(syscall.SIGTERM)
	errors.As(context.Cause(ctx), &s)
	return syscall.Signal(s)
}

// signalled returns the end of a job whose context has ended.
func (a *agent) signalled(ctx context.Context) End {
	sig := Signal(ctx)
	end := End{Text: fmt.Sprintf("%v on %s", context.Cause(ctx), a.host), Code: 128 + int(sig), Signal: sig}
	if errors.Is(context.Cause(ctx), errDetached) {
		end.Code = 1
	}
	return end
}

// gather waits until all machines have joined. The first machine makes the plan, and all read it.
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

// makePlan assigns ranks to the machines that have joined.
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

// sameVersion returns the machines whose launchers speak this one's protocol version. A launcher that does not compare
// versions itself is left out, with one message.
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

// await waits until enough machines are present, and returns them. It also returns them when ctx ends.
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

// endKey returns the key for the end of a round.
func endKey(round int) string { return fmt.Sprintf("%send/%d", keys, round) }

// doneKey returns the key that tells that a machine's ranks have reached a stage of a round.
func (a *agent) doneKey(stage, machine string, round int) string {
	return fmt.Sprintf("%s%s/%d/%s", keys, stage, round, machine)
}

// finish records how a round ended, unless another launcher has recorded it.
func (a *agent) finish(ctx context.Context, round int, end End) {
	text, _ := json.Marshal(end)
	_, _, err := a.kv.CompareAndSet(ctx, endKey(round), 0, text)
	a.abandon(ctx, err)
}

// abandon ends the session after the store has refused a write that the other launchers wait for, such as when it is
// full. The others then see the session end.
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
	_ = a.kv.Close() // the end of the session is the message
}

// attend returns a context that ends when the launcher of a planned machine has left, during a round or between two.
// Its cause is then an [*End]. The context outlasts ctx. The store is watched until its session ends.
func (a *agent) attend(ctx context.Context) (context.Context, error) {
	lasting := context.WithoutCancel(ctx)
	if !a.first && !a.Served { // this session ends with the first launcher, which watches the others
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
	for _, key := range a.plan.keys() { // a launcher may have left since it joined
		if !slices.ContainsFunc(present, func(e store.Entry) bool { return e.Key == key }) {
			lose(key)
		}
	}
	return complete, nil
}

// lost returns the end of a job that has lost a machine.
func lost(complete context.Context) End {
	end := &End{}
	errors.As(context.Cause(complete), &end)
	return *end
}

// storeError names the store's keeper in an error.
func (a *agent) storeError(err error) error {
	if len(a.Join) == 0 {
		return err
	}
	return fmt.Errorf("%s: %w", a.keeper(), err)
}

// round runs the ranks once. It returns when all launchers know how they ended.
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
		go func() { // the round succeeds when all machines have
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
			go a.testify(lasting, g, round) // the others learn that this launcher knows of the end
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

// stopFor is stop for a reason other than a rank's end, such as an interrupt or the loss of another machine. It prints
// the reason if ranks take time to end. Without a reason, all ranks have ended.
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

// announce prints why ranks are told to end, if they take longer than linger. The subject ends with the ranks.
func announce(notes io.Writer, subject string, grace time.Duration, stopped <-chan struct{}) {
	select {
	case <-stopped:
	case <-time.After(linger):
		fmt.Fprintf(notes, "tutti: %s have %v to end\n", subject, grace)
	}
}

// awaitEnd waits until a launcher reports how a round has ended. If a rank of this machine has failed and no launcher
// reports within answerTime, it returns that failure.
func (a *agent) awaitEnd(ctx context.Context, round int, failures <-chan End) (End, error) {
	type word struct {
		text []byte // the job's end as JSON
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

// alone returns the job's end for a launcher that has lost contact with the others after a rank failed.
func (a *agent) alone(failed End) End {
	if len(a.Join) == 0 {
		return failed
	}
	_ = a.kv.Close() // nothing can be reported any more
	failed.Text = fmt.Sprintf("%s does not answer at %s: is it down, or the network to it cut? Here, %s",
		a.keeper(), a.joined(), failed.Text)
	failed.Rank = false
	return failed
}

// all waits until the ranks of all machines have reached a stage of a round.
func (a *agent) all(ctx context.Context, stage string, round int) error {
	var waited []string
	for m := range a.plan.First {
		waited = append(waited, a.doneKey(stage, m, round))
	}
	return a.kv.Wait(ctx, waited...)
}

// restart waits until all ranks have ended, clears their keys in the store, and pauses until the first machine begins
// the next round. The job ends with a non-zero end if a launcher gets a user's signal meanwhile, or if a machine is
// lost.
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

// prepare waits until the ranks of all machines have ended, and clears their keys in the store.
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

// leave removes this machine from the job.
func (a *agent) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	_ = a.kv.Delete(ctx, a.key, 0) // the key also ends with the session
}

// awaitLeaving has the first machine keep the store until the other machines have stopped their ranks and know how the
// job ended. Their evidence, or success, shows that they know. After a failure they have answerTime to show it, so that
// a lost machine does not delay the end.
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

// stop ends the ranks. Meanwhile they do not wait for a reader of the output.
func (a *agent) stop(g *group, with syscall.Signal) {
	a.out.keepWaiting(false)
	a.err.keepWaiting(false)
	g.stop(with)
	a.out.keepWaiting(true)
	a.err.keepWaiting(true)
}

// stopTime bounds how long all machines take until nothing of their ranks is left.
func (a *agent) stopTime() time.Duration {
	return max(a.Grace, a.plan.Grace) + stopMargin
}

// Unread is the error of a job whose launcher has waited in vain for a reader of its errors. Nobody else needs to wait
// for one.
type Unread struct{ error }

// Unwrap returns the job's error.
func (u *Unread) Unwrap() error { return u.error }

// flush writes the remaining output of an ended job, as long as it has a reader, and returns err. One reader may have
// both output and errors. If output is lost, the errors therefore wait for lastWord only.
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

// recorded returns the files of the flight records that this machine's ranks have written.
func (a *agent) recorded() (paths []string) {
	if a.Records == "" {
		return nil
	}
	return slices.DeleteFunc(diagnose.Files(a.Records), func(path string) bool {
		info, err := os.Stat(path)
		return err != nil || info.ModTime().Before(a.began)
	})
}

// sendDumps sends this machine's flight records to the first machine, in pieces.
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
