// Package tcp is a backend of processes on any machines, over TCP and TLS 1.3, in pure Go: no
// MPI, no launcher's daemon, nothing to install.
//
//	c, err := tcp.FromEnv(ctx) // under `tutti launch`, torchrun, srun, mpirun
//
// Each pair of ranks has a connection, and several where the round trip is long. Both sides prove that they know the
// job's secret (package comm/store). Ranks find each other's addresses in the job's store, which is not needed
// afterwards. Collectives are those of comm/mpi: the same schedules, the same bits.
//
// # What is sent when
//
// Data goes from a tensor's memory into TLS records, and from these into the memory of the receive. A message whose
// receive is not posted yet is sent early within the window of its pair: 4 MiB less a sixteenth, unless the round
// trip is long. Its other bytes wait for the receive. Other messages arrive meanwhile, up to one announcement for
// each 256 bytes of that sixteenth, or more where the window is not full: the next one waits until one of these is
// received.
//
// # Ranks of one machine
//
// Ranks of one user on one Linux machine share memory, which package internal/segment hands over between them. Short
// collectives of a communicator that is wholly on the machine go over slots, and all messages between two of its ranks
// over two rings, with the frames, checks and credit of connections. The first connection of a pair stays, for aborts
// and signs of life. TUTTI_TCP_SHARED=off in the environment keeps a rank out.
//
// # When ranks fail
//
// A connection that closes is noticed at once, and a process or a link that is silent after
// [Config.Silence]. Waits that need the rank then fail with [comm.ErrPeerFailed]. A process that
// was stopped and goes on does not take the others for silent.
//
// # How it is written
//
// tcp.go makes communicators, connect.go and hello.go their connections. A connection is a lane (lane.go) that carries
// frames (frame.go) over a socket (link.go). The lanes to one rank are a pair, whose states are in pair.go: messages
// leave through its outbox and arrive in its inbox, within its credit. All pairs are a node (node.go). Ranks of one
// machine have memory (shared.go), over which a track (track.go) takes the place of lanes. wire.go is a
// communicator's part of them, on which comm/internal/schedule runs. locks.go has the order of the locks, timeouts.go
// all times with their reasons.
package tcp

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/fault"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/leak"
	thishost "github.com/tutti-go/tutti/internal/machine"
	"github.com/tutti-go/tutti/internal/segment"
	"github.com/tutti-go/tutti/internal/waiting"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// name is the name of this backend in errors.
const name = "tcp"

// Config is a rank's place in a world, and how it connects.
type Config struct {
	Rank      int // of this process, from 0
	WorldSize int // number of ranks, at least 1
	// TLS is the configuration of both sides of a connection, such as rendezvous.Job.TLS("comm/tcp"). A world of
	// several ranks needs it.
	TLS *tls.Config
	// World distinguishes worlds that share a store.
	World string
	// Network makes the connections, for example over a tailnet or the program's relay. All ranks need the same
	// Network. They share no memory: all data goes over the Network. nil is the system's TCP.
	Network store.Network
	// Listen is the address, with a port or without one, that other ranks connect to. By
	// default this rank listens on all interfaces and publishes their addresses.
	Listen string
	// Advertise replaces the addresses that are published: those of a network address
	// translation, or of a container's host. One without a port gets the port that this rank listens on.
	Advertise []string
	// Connections is the number of connections to each rank, at most 96. By default it
	// follows from the round trip, 1 up to 2 ms, 95 at 100 ms, and from the processors: up to 4 of
	// them encrypt what goes to a rank, in worlds of up to 16 ranks. Over a Network it is 1.
	Connections int
	// Silence is how long a rank may be silent, [DefaultSilence] by default, at least a second, and
	// the same on all ranks.
	Silence time.Duration
	// Patience is how long New waits for other ranks if its context has no deadline: by default TUTTI_CONNECT_TIMEOUT
	// ([Config.ReadEnv]), or 10 minutes.
	Patience time.Duration

	report   func([]fault.Report) // tells the launcher of lost ranks and stragglers, without locks; or nil
	takeBack func(come []int)     // takes reports of stragglers back; nil where there is none
}

// ReadEnv sets the fields for which the environment has variables: TUTTI_TCP_LISTEN, of which ranks of a machine take
// the port and the next ones, TUTTI_TCP_ADVERTISE, with commas, TUTTI_TCP_CONNECTIONS and TUTTI_TCP_SILENCE, such as
// 30s. localRank is the number of this rank on its machine. getenv is os.Getenv or a stand-in.
func (c *Config) ReadEnv(getenv func(string) string, localRank int) error {
	for _, v := range []struct {
		name string
		set  func(text string) error
	}{
		{env.TCPListen, func(text string) error { return c.readListen(text, localRank) }},
		{env.TCPAdvertise, func(text string) error {
			c.Advertise = strings.Split(text, ",")
			return nil
		}},
		{env.TCPConnections, func(text string) error {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 {
				return errors.New("want a number from 1 on")
			}
			c.Connections = n
			return nil
		}},
		{env.TCPSilence, func(text string) error {
			d, err := time.ParseDuration(text)
			if err != nil || d < time.Second {
				return errors.New("want a time of at least 1s, such as 30s")
			}
			c.Silence = d
			return nil
		}},
		{env.ConnectTimeout, func(text string) (err error) {
			c.Patience, err = waiting.ReadLimit(text)
			return err
		}},
	} {
		text := getenv(v.name)
		if text == "" {
			continue
		}
		if err := v.set(text); err != nil {
			return fmt.Errorf("%s: %w: %s=%q: %w", name, comm.ErrArgument, v.name, text, err)
		}
	}
	return nil
}

// readListen sets Listen. The ranks of a machine take the port, if there is one, and those behind it.
func (c *Config) readListen(text string, localRank int) error {
	c.Listen = text
	host, port, err := net.SplitHostPort(text)
	if err != nil || port == "0" {
		return nil // the system chooses one
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return err
	}
	c.Listen = net.JoinHostPort(host, strconv.Itoa(int(n)+localRank))
	return nil
}

// key is where a rank publishes its addresses.
func (c *Config) key(rank int) string { return c.keys() + strconv.Itoa(rank) }

// keys is what all keys of a world begin with.
func (c *Config) keys() string { return fmt.Sprintf("tcp/%s/", c.World) }

// reports is what the keys begin with by which other ranks report that they cannot reach a rank.
func (c *Config) reports(rank int) string {
	return fmt.Sprintf("%sreports/%d/", c.keys(), rank)
}

// FromEnv returns the communicator of the job that a launcher started (rendezvous.FromEnv), over
// the store that the process shares, as [Config.ReadEnv] says.
func FromEnv(ctx context.Context) (comm.Communicator, error) {
	return Config{}.FromEnv(ctx)
}

// FromEnv is the function FromEnv with the program's own settings, such as a Network. The environment provides Rank,
// WorldSize, TLS and World.
func (c Config) FromEnv(ctx context.Context) (comm.Communicator, error) {
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return nil, err
	}
	return c.join(ctx, job)
}

// join is FromEnv for a job.
func (c Config) join(ctx context.Context, job rendezvous.Job) (comm.Communicator, error) {
	job.Network = c.Network
	conf, err := job.TLS("comm/tcp")
	if err != nil {
		return nil, err
	}
	c.Rank = job.Rank
	c.WorldSize = job.WorldSize
	c.TLS = conf
	if job.OneHost() && c.Network == nil && c.Listen == "" {
		c.Listen = "localhost"
	}
	if err := c.ReadEnv(os.Getenv, job.LocalRank); err != nil {
		return nil, err
	}
	kv, err := job.Shared(ctx)
	if err != nil {
		return nil, err
	}
	if job.Hosted {
		r := reporterTo(kv)
		c.report = r.report
		c.takeBack = r.takeBack
	}
	var n *node
	err = job.Round(ctx, kv, "tcp", func(ctx context.Context, number string) (err error) {
		c.World = number
		n, err = newNode(ctx, kv, c)
		return err
	})
	if err != nil {
		c.reportAbsent(err)
		return nil, err
	}
	n.forgive(n.pairs)
	return n.form(ctx, kv, c)
}

// launcher is the session by which a reporter tells the launcher: a store.Client.
type launcher interface {
	Post(key string, value []byte, options ...store.Option)
	Set(ctx context.Context, key string, value []byte, options ...store.Option) error
	Drop(key string)
}

// reporter tells the launcher of other ranks.
type reporter struct {
	kv     launcher    // the launcher's store
	silent atomic.Bool // the launcher has not answered once

	mu   sync.Mutex           // guards told
	told map[int]fault.Report // what the launcher has been told, by rank that it is about; guarded by mu
}

// reporters are those of this process: a *reporter by session.
var reporters sync.Map

// reporterTo returns the reporter of a session.
func reporterTo(kv launcher) *reporter {
	shared, _ := reporters.LoadOrStore(kv, &reporter{kv: kv, told: map[int]fault.Report{}})
	return shared.(*reporter)
}

// report waits for the answer to the last report, which comes behind the others: the process may end with the error
// that follows. A launcher that has not answered once is told without a wait. The caller holds no lock.
func (r *reporter) report(list []fault.Report) {
	r.note(list)
	for i, f := range list {
		if i < len(list)-1 || r.silent.Load() {
			r.kv.Post(f.Key(), f.Value())
			continue
		}
		bounded, cancel := context.WithTimeout(context.Background(), reportTime)
		defer cancel()
		if r.kv.Set(bounded, f.Key(), f.Value()) != nil {
			r.silent.Store(true)
		}
	}
}

// note keeps reports, to take them back.
func (r *reporter) note(list []fault.Report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range list {
		r.told[f.About] = f
	}
}

// takeBack drops what the launcher was told of ranks that have come now, unless they were lost: it is not why the job
// fails later. It waits for nothing.
func (r *reporter) takeBack(come []int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rank := range come {
		if f, ok := r.told[rank]; ok && f.Kind != fault.Lost {
			delete(r.told, rank)
			r.kv.Drop(f.Key())
		}
	}
}

// reportAbsent tells the launcher which ranks have not come to a rendezvous, unless the connector has.
func (c *Config) reportAbsent(err error) {
	var missing interface{ MissingRanks() []int }
	known := errors.As(err, new(*incomplete)) || !errors.As(err, &missing)
	if known || c.report == nil || !errors.Is(err, comm.ErrTimeout) {
		return
	}
	var reports []fault.Report
	for _, rank := range missing.MissingRanks() {
		const reason = "it has not come to connect"
		reports = append(reports, fault.Report{Kind: fault.Unreached, By: c.Rank, About: rank, Reason: reason})
	}
	c.report(reports)
}

// New connects the ranks of a world, which publish their addresses in a store. It returns when this rank is connected
// to all others, or ctx ends. If ctx ends first, the error has a method MissingRanks() []int that returns the ranks
// to which this one was never connected. The store is not needed after that.
func New(ctx context.Context, kv store.Store, c Config) (comm.Communicator, error) {
	n, err := newNode(ctx, kv, c)
	if err != nil {
		return nil, err
	}
	return n.form(ctx, kv, c)
}

// newNode connects a rank to all others.
func newNode(ctx context.Context, kv store.Store, c Config) (*node, error) {
	if c.Silence == 0 {
		c.Silence = DefaultSilence
	}
	if _, err := sharing(); err != nil {
		return nil, c.fail(err)
	}
	n := &node{
		rank:     c.Rank,
		size:     c.WorldSize,
		tick:     c.Silence / beats,
		patience: beats,
		stop:     make(chan struct{}),
		wires:    map[uint64]*wire{},
		report:   c.report,
		takeBack: c.takeBack,
		isolated: c.Network != nil,
		run:      rand.Text(), // of a world of one
	}
	if c.WorldSize < 1 || c.Rank < 0 || c.Rank >= c.WorldSize || c.Silence < time.Second {
		return nil, c.fail(fmt.Errorf("%w: rank %d of %d, silence %v", comm.ErrArgument, c.Rank, c.WorldSize, c.Silence))
	}
	if c.WorldSize > 1 && (c.TLS == nil || kv == nil) {
		return nil, c.fail(fmt.Errorf("%w: several ranks need a store and TLS", comm.ErrArgument))
	}
	for rank := range c.WorldSize {
		n.pairs = append(n.pairs, newPair(n, rank))
	}
	if c.WorldSize > 1 {
		if err := connect(ctx, kv, c, n); err != nil {
			n.end()
			return nil, c.fail(err)
		}
	}
	return n, nil
}

// form makes the communicator of all ranks of a node that is connected. It returns when all ranks have come to it.
func (n *node) form(ctx context.Context, kv store.Store, c Config) (comm.Communicator, error) {
	all := make([]int, c.WorldSize)
	for r := range all {
		all[r] = r
	}
	world, err := n.communicator(worldID, c.Rank, all)
	if err != nil {
		return nil, c.fail(err)
	}
	n.start()
	err = n.meet(ctx, world.e)
	if kv != nil {
		kv.Drop(c.key(c.Rank)) // all ranks are here, so that nobody needs it
	}
	if err != nil {
		return nil, c.fail(errors.Join(err, world.Close()))
	}
	n.countSilence()
	world.e.Links = n.links(all)
	return world, nil
}

// meet finds out which ranks are on one host, and has those of one machine share memory.
func (n *node) meet(ctx context.Context, world *endpoint) error {
	ids, err := world.exchange(ctx, words(n.hostID()))
	if err != nil {
		return err
	}
	for _, id := range ids {
		n.hosts = append(n.hosts, hostID(id))
	}
	if err := n.meetNeighbors(ctx, world); err != nil {
		return err
	}
	return world.share(ctx)
}

// fail is the error of a rank that makes no communicator.
func (c *Config) fail(err error) error {
	check := backend.Check{Backend: name, Rank: c.Rank, WorldSize: c.WorldSize}
	return check.Fail("connect", err)
}

// communicator is a rank's handle.
type communicator struct {
	*backend.Base
	e *endpoint // the backend, which does not refer to it
}

// RunName tells the flight records of this run from those of others: by the name that the process has from a launcher
// or the ranks of its job, and otherwise by one of this world.
func (c *communicator) RunName() string { return cmp.Or(dump.RunName(os.Getenv), c.e.wire.node.run) }

// CheckDevice implements [backend.MemoryChecker].
func (c *communicator) CheckDevice(d runtime.Device) error {
	if d.Kind == runtime.CPU {
		return nil
	}
	const advice = "tcp sends the host's memory; stage through it (comm/staged), or use the nccl backend"
	return c.e.Check.Unreachable(d, advice)
}

// SharesMemory reports whether all ranks share memory, which package ddp asks.
func (c *communicator) SharesMemory() bool { return c.e.SharesMemory() }

// Close implements [comm.Communicator]. It may be the last to refer to c, which is not forgotten while Close drains.
func (c *communicator) Close() error {
	defer goruntime.KeepAlive(c)
	return c.Base.Close()
}

// endpoint is the [backend.Backend].
type endpoint struct {
	*schedule.Engine
	wire      *wire             // its part of the connections
	slots     []byte            // memory of short collectives; nil if the ranks share none
	leakAlarm goruntime.Cleanup // reports a communicator that was lost without Close, which stops it
}

// communicator makes a communicator of ranks of the world. From then on messages may come.
func (n *node) communicator(id uint64, rank int, ranks []int) (*communicator, error) {
	w := n.newWire(id, rank, ranks)
	check := backend.Check{Backend: name, Rank: rank, WorldSize: len(ranks)}
	w.engine = schedule.New(schedule.Config{Check: check, Wire: w, MaxTag: 1 << 62, Late: w.reportLate})
	e := &endpoint{Engine: w.engine, wire: w}
	c := &communicator{backend.New(&e.Check, &e.Life, e), e}
	if err := n.register(w); err != nil {
		return nil, err
	}
	// A communicator that is lost stays open: its last call may still be waiting, and needs the handle no more.
	mark := leak.NewMark(name, fmt.Sprintf("rank %d of %d", rank, len(ranks)))
	e.leakAlarm = goruntime.AddCleanup(c, (*leak.Mark).Report, mark)
	go w.drive()
	return c, nil
}

// hostID tells a rank's host from all others by its first two words. Ranks with the same third word may share memory,
// unless it is 0. The fourth is 1 of a rank with long links.
type hostID words

// hostID is what this rank tells the others, when it is connected.
func (n *node) hostID() hostID {
	long := int64(0)
	for _, p := range n.pairs {
		if len(p.lanes) > parallelLanes {
			long = 1
		}
	}
	sum := sha256.Sum256([]byte(thishost.Network()))
	id := hostID{
		int64(binary.LittleEndian.Uint64(sum[:])),
		int64(binary.LittleEndian.Uint64(sum[8:])),
		0,
		long,
	}
	if !n.isolated {
		id[2] = machine(n.rank)
	}
	return id
}

func (h hostID) host() [2]int64 { return [2]int64(h[:2]) }

func (h hostID) machine() int64 { return h[2] }

func (h hostID) long() bool { return h[3] != 0 }

// links returns what lies between ranks.
func (n *node) links(ranks []int) schedule.Links {
	elsewhere := func(r int) bool {
		return n.hosts[r].host() != n.hosts[ranks[0]].host()
	}
	long := func(r int) bool { return n.hosts[r].long() }
	switch {
	case n.hosts == nil:
		return schedule.ShortLinks
	case !slices.ContainsFunc(ranks, elsewhere):
		return schedule.OneHost
	case slices.ContainsFunc(ranks, long):
		return schedule.LongLinks
	}
	return schedule.ShortLinks
}

// Wait implements [backend.Backend].
func (e *endpoint) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	if w.Op != comm.OpSplit {
		return nil, e.Engine.Wait(ctx, w.Op)
	}
	child, err := e.split(ctx, w)
	if child == nil {
		return nil, err
	}
	return child, err
}

// split makes a sub-communicator. Its ID is the one that its rank 0 proposes. Behind the second barrier all
// ranks have it, so that no message comes too early. Where ranks share memory, behind the third all have that.
func (e *endpoint) split(ctx context.Context, wait comm.Wait) (*communicator, error) {
	if err := e.Barrier(ctx, wait.Op, true); err != nil {
		return nil, err
	}
	n := e.wire.node
	all, err := e.exchange(ctx, words{int64(wait.Color), int64(wait.Key), int64(n.propose())})
	if err != nil {
		return nil, err
	}
	n.forgive(e.wire.pairs)
	splits := make([]comm.Wait, len(all))
	for r, v := range all {
		splits[r] = comm.Wait{Op: wait.Op, Color: int(v[0]), Key: int(v[1])}
	}
	var child *communicator
	for _, group := range backend.SplitGroups(splits) {
		rank := slices.Index(group, e.wire.rank)
		if rank < 0 {
			continue
		}
		id := uint64(all[group[0]][2])
		for i, r := range group {
			group[i] = e.wire.pairs[r].rank
		}
		if child, err = n.subCommunicator(id, rank, group); err != nil {
			return nil, err
		}
	}
	if err := e.Barrier(ctx, wait.Op, false); err != nil || !n.neighborly() {
		return child, err
	}
	if child != nil {
		if err := child.e.share(ctx); err != nil {
			return child, e.Fail(wait.Op, err)
		}
	}
	return child, e.Barrier(ctx, wait.Op, false) // a rank that still shares is to see no end of the sub-communicator
}

// subCommunicator makes a communicator with an ID that its first rank has proposed.
func (n *node) subCommunicator(id uint64, rank int, ranks []int) (*communicator, error) {
	if err := n.checkProposal(id, ranks[0]); err != nil {
		return nil, err
	}
	c, err := n.communicator(id, rank, ranks)
	if err == nil {
		c.e.Links = n.links(ranks)
	}
	return c, err
}

// words are what a rank tells the others when they make a communicator.
type words [4]int64

// exchange returns what each rank passes.
func (e *endpoint) exchange(ctx context.Context, w words) ([]words, error) {
	const bytes = len(w) * 8
	size := e.Check.WorldSize
	memory, err := host.Allocate((1 + size) * bytes)
	if err != nil {
		return nil, err
	}
	defer host.Deallocate(memory) //nolint:errcheck // it is there
	values := hostmem.Slice[words](memory, 1+size)
	values[0] = w
	gather := comm.AllGatherCall(memory, memory+uintptr(bytes), len(w), dtype.I64)
	if err := e.SetUp(ctx, gather); err != nil {
		if e.Life.Broken() != nil {
			e.wire.Abandon()
		}
		return nil, err
	}
	return slices.Clone(values[1:]), nil
}

// host is where this package's own memory comes from.
var host = cpu.New()

// Release implements [backend.Backend].
func (e *endpoint) Release(ctx context.Context) error {
	e.leakAlarm.Stop()
	e.Leave(ctx)
	w := e.wire
	n := w.node
	close(w.closed)
	n.unregister(w) // so that nothing comes behind Abandon
	w.Abandon()
	e.Engine.Release()
	if e.slots != nil {
		n.neighbors.Load().unwatch(w)
		segment.Unmap(e.slots)
	}
	return n.leave(ctx)
}
