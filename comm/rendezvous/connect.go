package rendezvous

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/inquiry"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/waiting"
)

// ports is the number of ports that rank 0 tries to listen on, beginning with the port of its address.
const ports = 4

// Connect connects this process to the job's store, which rank 0 keeps until it closes its client, unless the
// launcher keeps it. It ends with an error when ctx does, or after Patience if ctx has no deadline.
//
// Strangers are refused and logged, and delay no rank at another address. A rank that knows the secret is refused if
// another process has the same rank, or if the job's size differs. That rank gets an error wrapping [store.ErrRefused]
// at once, as does a rank that finds all ports where the store could be taken by others.
func (j Job) Connect(ctx context.Context) (*store.Client, error) {
	ctx, cancel := waiting.Bounded(ctx, j.Patience)
	defer cancel()
	defer j.waits(func() string { return "connecting to the job's store" })()
	kv, err := j.connect(ctx)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: rank %d: %w", j.Rank, err)
	}
	if j.Hosted || j.WorldSize <= 1 { // the launcher names the run, and members of an elastic job have none
		return kv, nil
	}
	if err := j.nameRun(ctx, kv); err != nil {
		return nil, errors.Join(fmt.Errorf("rendezvous: rank %d: %w", j.Rank, err), kv.Close())
	}
	return kv, nil
}

// runKey has the name of the run of a job, which rank 0 has made.
const runKey = "run"

// nameRun has the flight records of all ranks name one run, so that those of earlier runs are left out.
func (j Job) nameRun(ctx context.Context, kv *store.Client) error {
	if j.Rank == 0 {
		name := rand.Text()
		dump.Agree(name)
		return kv.Set(ctx, runKey, []byte(name))
	}
	name, err := kv.Get(ctx, runKey)
	if err != nil {
		return err
	}
	if len(name) == len(rand.Text()) && printable.Text(string(name)) == string(name) {
		dump.Agree(string(name))
	}
	return nil
}

// waits begins a wait of this rank.
func (j Job) waits(text func() string) (end func()) {
	return inquiry.Begin(inquiry.Wait{Rank: j.Rank, Size: j.WorldSize, Text: text})
}

// connections are those that this process shares: a *connection by job and rank.
var connections sync.Map

type connection struct {
	turn chan struct{} // has a value while a caller looks, or connects
	kv   *store.Client // nil before the first call; of the caller whose turn it is
}

// Shared is [Job.Connect] with one connection for the whole process, which stays open until the process ends.
func (j Job) Shared(ctx context.Context) (*store.Client, error) {
	key := fmt.Sprintf("%s %q %q %q %d %d", j.Address, j.Stores, j.Name, j.Secret, j.WorldSize, j.Rank)
	shared, _ := connections.LoadOrStore(key, &connection{turn: make(chan struct{}, 1)})
	c := shared.(*connection)
	ctx, cancel := waiting.Bounded(ctx, j.Patience)
	defer cancel()
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		const format = "rendezvous: rank %d: %w, while another caller connects to the job's store"
		return nil, fmt.Errorf(format, j.Rank, comm.ContextError(ctx))
	}
	defer func() { <-c.turn }()
	if c.kv != nil && c.kv.Err() == nil {
		return c.kv, nil
	}
	kv, err := j.Connect(ctx)
	c.kv = kv
	return kv, err
}

func (j Job) connect(ctx context.Context) (*store.Client, error) {
	name := fmt.Sprint("rank ", j.Rank)
	if j.WorldSize <= 1 && !j.Hosted {
		return store.NewServer(store.Options{}).Owner(name), nil
	}
	host, _, err := net.SplitHostPort(j.Address)
	if err != nil {
		return nil, err
	}
	if j.Rank < 0 || j.Rank >= j.WorldSize {
		return nil, fmt.Errorf("%w: rank %d in a job of %d", ErrEnvironment, j.Rank, j.WorldSize)
	}
	j.useFile()
	if len(j.Secret) == 0 && (j.Network != nil || !isLoopback(host)) {
		return nil, fmt.Errorf("%w: rank 0 would listen to the network at %s, but nothing keeps strangers out; "+
			"set %s to something random, the same for all processes, or %s to a file with it",
			ErrEnvironment, j.Address, env.Secret, env.SecretFile)
	}
	conf, err := j.TLS("store")
	if err != nil {
		return nil, err
	}
	addresses, err := j.addresses(host)
	if err != nil {
		return nil, err
	}
	d := store.Dialer{TLS: conf, Name: name, Size: j.WorldSize, Job: j.Name, Addresses: addresses}
	if j.Hosted {
		return d.Dial(ctx)
	}
	d.Network = j.Network
	if j.Rank > 0 {
		kv, err := d.Dial(ctx)
		if errors.Is(err, store.ErrRefused) {
			err = fmt.Errorf("%w (if other programs use these ports, set %s to a free one)", err, portVariable)
		}
		return kv, err
	}
	l, err := j.listen(ctx, d)
	if err != nil {
		return nil, err
	}
	options := store.Options{Size: j.WorldSize}
	if j.Network != nil {
		options.Silence = gate.CutOff // its connections have no keep-alive of the system's
	}
	server := store.NewServer(options)
	kv := server.Owner(name)
	server.Serve(l, conf)
	return kv, nil
}

// TLS is the configuration of connections between the processes of this job for a purpose ([store.TLS]). A secret of
// fewer than 16 bytes is [comm.ErrArgument].
func (j Job) TLS(purpose string) (*tls.Config, error) {
	j.useFile()
	secret, err := j.strongSecret()
	if err != nil {
		return nil, err
	}
	if !j.Hosted { // two jobs may have one secret, and ports next to each other
		_, port, _ := net.SplitHostPort(j.Address)
		purpose += " " + port
	}
	return store.TLS(secret, purpose)
}

// addresses are those of host where the store can be: at the port of rank 0 and, unless the launcher keeps it, the
// next ones.
func (j Job) addresses(host string) ([]string, error) {
	if len(j.Stores) > 0 {
		return j.Stores, nil
	}
	_, text, err := net.SplitHostPort(j.Address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, err
	}
	count := ports
	if j.Hosted {
		count = 1
	}
	var all []string
	for i := range count {
		all = append(all, net.JoinHostPort(host, strconv.Itoa(portAfter(int(port), i))))
	}
	return all, nil
}

// listen listens on the first port that is free, of those that ranks try. The name by which other ranks know rank
// 0's host may be no address of that host (behind a network address translation), or another one here: Debian
// resolves the host's own name to 127.0.1.1. So rank 0 listens on all addresses, unless j.Address is a loopback
// address.
func (j Job) listen(ctx context.Context, d store.Dialer) (net.Listener, error) {
	host, _, _ := net.SplitHostPort(j.Address)
	reach := "every user of this host"
	if j.Network != nil || !isLoopback(host) {
		host = ""
		reach = "the network"
	}
	if j.Guessable || len(j.Secret) == 0 {
		const format = "rendezvous: %s can connect to rank 0, and the job has no secret but its name; " +
			"set %s to something random, the same for all processes"
		slog.Warn(fmt.Sprintf(format, reach, env.Secret), "launcher", env.LauncherTitle(j.Launcher))
	}
	addresses, err := j.addresses(host)
	if err != nil {
		return nil, err
	}
	var inUse []error
	for i, address := range addresses {
		l, err := gate.Listen(ctx, j.Network, address)
		if err == nil {
			if i > 0 {
				const text = "rendezvous: the port of rank 0 is in use by others; listening on another one"
				slog.Warn(text, "at", address, "err", inUse[0])
			}
			return l, nil
		}
		inUse = append(inUse, err)
		// If it is this job's, there are two processes of rank 0.
		if err := d.Occupied(ctx, address); err != nil {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w; %w", context.Cause(ctx), errors.Join(inUse...))
		}
	}
	return nil, errors.Join(inUse...)
}
