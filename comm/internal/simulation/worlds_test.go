//go:build simulated

package simulation

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/internal/sim"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// playLocal runs the ranks of one process.
func playLocal(p *play) {
	node := p.NewNode("all")
	nodes := slices.Repeat([]*sim.Node{node}, 1+p.IntN(5))
	g := p.newProgram(len(nodes), 200_000, "stall", "idle", "abort", "leave", "mismatch")
	world, err := local.New(len(nodes))
	if err != nil {
		p.fail("%v", err)
	}
	g.run(p, nodes, world)
}

// run plays a program on existing communicators.
func (g *program) run(p *play, nodes []*sim.Node, world []comm.Communicator) {
	outcomes := make([]outcome, len(nodes))
	p.together(nodes, func(rank int) {
		outcomes[rank] = g.play(p, context.Background(), world[rank], rank)
		outcomes[rank].finish(p, g, rank, false)
	})
	sim.Sleep(time.Second)
	for rank, o := range outcomes {
		o.checkMemory(p, rank)
	}
	g.judge(p, outcomes, false, nil)
}

// playChecked wraps them in a recorder and Checked.
func playChecked(p *play) {
	node := p.NewNode("all")
	nodes := slices.Repeat([]*sim.Node{node}, 2+p.IntN(2))
	g := p.newProgram(len(nodes), 600, "stall", "idle", "abort", "leave", "mismatch")
	world, err := local.New(len(nodes))
	if err != nil {
		p.fail("%v", err)
	}
	rt := cpu.New()
	p.together(nodes, func(rank int) {
		if p.Seed%3 > 0 {
			world[rank] = record.New(world[rank], 16, p.t.TempDir())
		}
		c, err := checked.New(context.Background(), world[rank], rt, 0)
		if err != nil {
			p.fail("rank %d: %v", rank, err)
		}
		world[rank] = c
	})
	g.run(p, nodes, world)
	if err := rt.Close(); err != nil {
		p.fail("%v", err)
	}
}

// Both ends of all connections know this secret.
var (
	secret  = mustTLS("comm/tcp")
	secret2 = mustTLS("store")
)

func mustTLS(purpose string) *tls.Config {
	conf, err := store.TLS([]byte("a secret of tests"), purpose)
	if err != nil {
		panic(err)
	}
	return conf
}

// storeAt is the store's address.
const storeAt = "10.0.0.1:29500"

// serve starts a store on a separate node.
func (p *play) serve(options store.Options) (server *store.Server) {
	p.store = p.NewNode("store")
	p.together([]*sim.Node{p.store}, func(int) {
		server = store.NewServer(options)
		l, err := sim.Listen("tcp", storeAt)
		if err != nil {
			p.fail("%v", err)
		}
		server.Serve(l, secret2)
	})
	return server
}

// playTCP connects ranks over the simulated network, and runs a program on them.
func playTCP(p *play) {
	size := 2 + p.IntN(3)
	server := p.serve(store.Options{Size: size})
	nodes := p.nodes(size)
	if p.Chance(4) {
		p.Least, p.Most = 5*time.Millisecond, 9*time.Millisecond // several lanes
	}
	connections, silence := p.IntN(4), time.Duration(1+p.IntN(5))*time.Second
	g := p.newProgram(size, 1_200_000, "stall", "idle", "abort", "leave", "mismatch", "kill", "kill", "gone", "cut", "half", "hang up", "hiccup", "late", "pause")
	f := g.fault
	if f.kind == "late" {
		silence = 20 * time.Second
	}
	a, b := nodes[f.rank], nodes[(f.rank+1+p.IntN(size-1))%size]
	connected := 0
	broken, named, dead := true, []int{f.rank}, false
	at := time.Duration(p.Between(time.Microsecond, 100*time.Millisecond))
	if p.Chance(2) {
		at >>= p.IntN(8)
	}
	other := slices.Index(nodes, b)
	act := func() {}
	switch f.kind {
	case "kill":
		act, dead = func() { p.Kill(a, false) }, true
	case "gone":
		act, dead = func() { p.Kill(a, true) }, true
	case "cut":
		act, named = func() { p.Cut(a, b, sim.Never); p.Cut(b, a, sim.Never) }, []int{f.rank, other}
	case "half":
		act, named = func() { p.Cut(a, b, sim.Never) }, []int{f.rank, other}
	case "hang up":
		act, named = func() {
			p.Hangup(func(from, to *sim.Node) bool { return from == a && to == b || from == b && to == a })
		}, []int{f.rank, other}
	case "hiccup": // shorter than the ranks' timeouts
		broken = false
		act = func() {
			until := time.Now().Add(p.Between(time.Millisecond, silence/2))
			p.Cut(a, b, until)
			p.Cut(b, a, until)
		}
	case "late": // longer than an address may take to answer, and shorter than Close waits
		broken, at = false, p.Between(0, 30*time.Millisecond)>>p.IntN(3)
		act = func() {
			if until := time.Now().Add(p.Between(2*time.Second, 4*time.Second)); connected < size {
				p.Cut(a, b, until)
				p.Cut(b, a, until)
			}
		}
	case "pause": // a process is stopped for a while, which may exceed its silence
		act = func() { a.Freeze(); sim.AfterFunc(f.wait, a.Thaw) }
		g.pause = f.wait
		broken = f.wait > silence*3/4
	default:
		broken = false
	}
	if slices.Contains([]string{"kill", "gone", "cut", "half", "hang up", "hiccup", "late", "pause"}, f.kind) {
		g.fault.kind = ""
		if f.kind == "hiccup" || f.kind == "late" {
			g.fault.kind = "stall"
		}
		g.timeout = 0
	}
	ended, buried := make([]bool, size), false
	sim.AfterFunc(at, func() {
		if dead && (ended[f.rank] || buried) {
			return // nothing would bury it
		}
		if connected < size {
			named = nil // ranks that lack a connection leave, and others name these
		}
		act()
	})
	outcomes := make([]outcome, size)
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
	defer cancel()
	p.together([]*sim.Node{p.NewNode("world")}, func(int) {
		done := make(chan int, size)
		for rank := range nodes {
			sim.GoOn(nodes[rank], func() {
				defer func() { done <- rank }()
				outcomes[rank] = p.rankOfTCP(ctx, nodes, rank, tcp.Config{Rank: rank, WorldSize: size, TLS: secret, World: "w", Listen: nodes[rank].Host(),
					Connections: connections, Silence: silence}, g, broken, &connected)
			})
		}
		late := time.After(limit)
		survivors := size
		if dead {
			survivors-- // the rank may have ended already; the wait is below
		}
		for n := 0; n < size; {
			select {
			case r := <-done:
				ended[r] = true
				n++
			case <-late:
				p.fail("ranks have not ended after %v: ended are %v", limit, ended)
			}
			if alive := n; dead && !ended[f.rank] && alive == survivors && !buried {
				buried = true
				p.Event("the dead rank is buried")
				p.Bury(a)
			}
		}
	})
	p.within(20*time.Second, "Close of the store", func() {
		if err := server.Close(); err != nil {
			p.fail("%v", err)
		}
	})
	sim.Sleep(20 * time.Second)
	for rank, o := range outcomes {
		o.checkMemory(p, rank)
	}
	if dead {
		outcomes[f.rank].err = nil
	}
	g.judge(p, outcomes, broken, named)
}

// rankOfTCP runs a rank.
func (p *play) rankOfTCP(ctx context.Context, nodes []*sim.Node, rank int, conf tcp.Config, g *program, broken bool, connected *int) (o outcome) {
	kv, err := store.Dialer{Addresses: []string{storeAt}, TLS: secret2, Name: strconv.Itoa(rank), Size: len(nodes)}.Dial(ctx)
	if err != nil {
		return outcome{err: fmt.Errorf("%w: %w", comm.ErrPeerFailed, err)}
	}
	defer kv.Close() //nolint:errcheck // nobody needs it
	c, err := tcp.New(ctx, kv, conf)
	if err != nil {
		p.Event("not connected: %v", err)
		return outcome{err: err}
	}
	*connected++
	p.Event("connected")
	o = g.play(p, ctx, c, rank)
	o.finish(p, g, rank, broken)
	return o
}

// playStore has processes use a store that may end, be lost or be silent.
func playStore(p *play) {
	size := 2 + p.IntN(3)
	var silence time.Duration
	if p.Chance(2) {
		silence = 4 * time.Second
	}
	server := p.serve(store.Options{Size: size, Silence: silence})
	nodes := p.nodes(size)
	kind, victim := []string{"", "", "kill", "gone", "hang up", "pause", "close"}[p.IntN(7)], p.IntN(size)
	if kind == "gone" && silence == 0 {
		kind = "" // the system's keep-alive finds those
	}
	at := p.Between(0, 30*time.Millisecond)
	rounds, late := 1+p.IntN(8), make([]bool, size) // late: they have ended or been buried, too late to kill
	sim.AfterFunc(at, func() {
		if late[victim] {
			return
		}
		switch p.Event("store: %s of %d", kind, victim); kind {
		case "kill", "gone":
			p.Kill(nodes[victim], kind == "gone")
		case "hang up":
			p.Hangup(func(from, to *sim.Node) bool { return from == nodes[victim] || to == nodes[victim] })
		case "pause":
			nodes[victim].Freeze()
			sim.AfterFunc(2*time.Second, nodes[victim].Thaw)
		case "close":
			_ = server.Close()
		}
	})
	dead, bound := kind == "kill" || kind == "gone", 5*time.Second
	if kind == "" {
		bound = 400 * time.Millisecond // less than Close waits for a lost store
	}
	counts, errs := make([]int64, size), make([]error, size)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	left := make(chan int, size)
	finished := make(chan struct{})
	sim.Go(func() {
		defer close(finished)
		for n := range size {
			if n == size-1 && dead {
				late[victim] = true
				p.Bury(nodes[victim])
			}
			select {
			case <-left:
			case <-time.After(limit):
				p.fail("clients have not ended")
			}
		}
	})
	for rank := range nodes {
		sim.GoOn(nodes[rank], func() {
			defer func() { late[rank] = true; left <- rank }()
			counts[rank], errs[rank] = p.clientOfStore(ctx, rank, size, rounds, bound)
			p.Event("client ends: %v", errs[rank])
		})
	}
	<-finished
	p.within(20*time.Second, "Close of the store", func() { _ = server.Close() })
	sim.Sleep(15 * time.Second)
	for rank, err := range errs {
		switch {
		case err == nil && kind == "" && counts[rank] != int64(size*rounds):
			p.fail("client %d counted %d, expected %d", rank, counts[rank], size*rounds)
		case err != nil && kind == "":
			p.fail("client %d failed, though nothing went wrong: %v", rank, err)
		case err != nil && kind == "pause" && silence == 0:
			p.fail("client %d failed, though it was only stopped: %v", rank, err)
		case err != nil && !slices.ContainsFunc([]error{comm.ErrPeerFailed, comm.ErrTimeout, store.ErrRefused, errGone}, func(s error) bool { return errors.Is(err, s) }):
			p.fail("client %d: an error of another kind: %v", rank, err)
		case errors.Is(err, comm.ErrTimeout) && (kind == "pause" || kind == "close" && !errors.Is(err, errUnreached)):
			p.fail("client %d waited in vain: %v", rank, err)
		}
	}
}

var (
	errGone      = errors.New("another client is gone")    // its lease has vanished
	errUnreached = errors.New("the store was not reached") // it may have closed before
)

// clientOfStore counts to the same number as other clients, in rounds, and notices when one of them ends. Its Close
// takes at most bound.
func (p *play) clientOfStore(ctx context.Context, rank, size, rounds int, bound time.Duration) (sum int64, err error) {
	kv, err := store.Dialer{Addresses: []string{storeAt}, TLS: secret2, Name: strconv.Itoa(rank), Size: size}.Dial(ctx)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errUnreached, err)
	}
	defer func() { p.within(bound, "Close of a client", func() { err = errors.Join(err, kv.Close()) }) }()
	if err := kv.Set(ctx, fmt.Sprint("alive/", rank), nil, store.Lease); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var last uint64
	var watching atomic.Bool // existing keys have been reported in the order of their names
	finished := 0            // clients
	stop, err := kv.Watch(ctx, "", func(e store.Event) {
		if watching.Load() && e.Version <= last && !e.Deleted {
			p.fail("client %d: version %d of %s comes behind %d", rank, e.Version, e.Key, last)
		}
		last = max(last, e.Version)
		var other int
		if n, _ := fmt.Sscanf(e.Key, "alive/%d", &other); n == 1 && e.Deleted && other != rank && finished < size {
			cancel(errGone)
		}
		if e.Key == "finished" {
			finished, _ = strconv.Atoi(string(e.Value))
		}
	})
	if err != nil {
		return 0, err
	}
	watching.Store(true)
	defer stop()
	if p.Chance(6) {
		sim.Sleep(6 * time.Second) // longer than a session may be silent
	}
	fail := func(err error) error {
		if all, listErr := kv.List(context.Background(), "alive/"); errors.Is(err, comm.ErrTimeout) && listErr == nil && len(all) == size {
			p.fail("client %d waits in vain, and the lease of the one that is gone is still there: %v", rank, err)
		}
		if cause := context.Cause(ctx); errors.Is(cause, errGone) {
			return cause
		}
		return err
	}
	for round := range rounds {
		key := fmt.Sprint("round/", round)
		n, err := kv.Add(ctx, key, 1)
		if err != nil {
			return sum, fail(err)
		}
		sum++
		done := fmt.Sprint("done/", round)
		if n == int64(size) {
			if err := kv.Set(ctx, done, []byte(strconv.Itoa(round))); err != nil {
				return sum, fail(err)
			}
		}
		value, err := kv.Get(ctx, done)
		if err != nil {
			return sum, fail(err)
		}
		if string(value) != strconv.Itoa(round) {
			p.fail("client %d got %q in round %d", rank, value, round)
		}
		// All clients of the previous round have come to this one.
		all, err := kv.List(ctx, "round/")
		if err != nil {
			return sum, fail(err)
		}
		if len(all) < round+1 || string(all[round].Value) != strconv.Itoa(size) {
			p.fail("client %d: round %d of %v", rank, round, all)
		}
	}
	if _, err := kv.Add(ctx, "finished", 1); err != nil {
		return sum, fail(err)
	}
	for { // no client leaves before all have finished
		e, err := kv.List(ctx, "finished")
		if err != nil {
			return sum, fail(err)
		}
		if n, _ := strconv.Atoi(string(e[0].Value)); n == size {
			return sum * int64(size), nil
		}
		if ctx.Err() != nil {
			return sum, fail(comm.ContextError(ctx))
		}
		sim.Sleep(time.Millisecond)
	}
}
