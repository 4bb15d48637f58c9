package rendezvous

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/gate"
)

// ports is the number of ports that rank 0 tries to listen on, beginning with that of its address.
const ports = 4

// Connect connects this process to the job's store, which rank 0 keeps until it closes its client, unless the
// launcher keeps it. It ends with an error when ctx does.
//
// Strangers are refused and logged, and delay no rank at another address. A rank that knows the secret is refused if
// another process has the same rank, or if the job's size differs. That rank gets an error wrapping [store.ErrRefused] at once, as
// does a rank that finds all ports where the store could be taken by others.
func (j Job) Connect(ctx context.Context) (*store.Client, error) {
	kv, err := j.connect(ctx)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: rank %d: %w", j.Rank, err)
	}
	return kv, nil
}

// connections are those that this process shares, by job and rank.
var connections sync.Map

type connection struct {
	sync.Mutex
	kv *store.Client
}

// Shared is [Job.Connect] for whatever in a process needs the job's store: one connection, which stays open until the
// process ends.
func (j Job) Shared(ctx context.Context) (*store.Client, error) {
	key := fmt.Sprintf("%s %q %q %q %d %d", j.Address, j.Stores, j.Name, j.Secret, j.WorldSize, j.Rank)
	shared, _ := connections.LoadOrStore(key, new(connection))
	c := shared.(*connection)
	c.Lock()
	defer c.Unlock()
	var err error
	if c.kv == nil || c.kv.Err() != nil {
		c.kv, err = j.Connect(ctx)
	}
	return c.kv, err
}

func (j Job) connect(ctx context.Context) (*store.Client, error) {
	name := fmt.Sprint("rank ", j.Rank)
	if j.WorldSize <= 1 && !j.Hosted {
		return store.NewServer(store.Options{}).Owner(name), nil
	}
	host, _, err := net.SplitHostPort(j.Address)
	switch {
	case err != nil:
		return nil, err
	case j.Rank < 0 || j.Rank >= j.WorldSize:
		return nil, fmt.Errorf("%w: rank %d in a job of %d", ErrEnvironment, j.Rank, j.WorldSize)
	}
	j.useFile()
	if len(j.Secret) == 0 && !isLoopback(host) {
		return nil, fmt.Errorf("%w: rank 0 would listen to the network at %s, but nothing keeps strangers out; set %s to something random, the same for all processes, or %s to a file with it",
			ErrEnvironment, j.Address, SecretVariable, SecretFileVariable)
	}
	conf, err := j.TLS("store")
	if err != nil {
		return nil, err
	}
	d := store.Dialer{TLS: conf, Name: name, Size: j.WorldSize, Job: j.Name}
	if d.Addresses, err = j.addresses(host); err != nil {
		return nil, err
	}
	if j.Rank > 0 || j.Hosted {
		kv, err := d.Dial(ctx)
		if errors.Is(err, store.ErrRefused) && !j.Hosted {
			err = fmt.Errorf("%w (if other programs use these ports, set %s to a free one)", err, portVariable)
		}
		return kv, err
	}
	l, err := j.listen(ctx, d)
	if err != nil {
		return nil, err
	}
	server := store.NewServer(store.Options{Size: j.WorldSize})
	kv := server.Owner(name)
	server.Serve(l, conf)
	return kv, nil
}

// TLS is the configuration of connections between the processes of this job for a purpose ([store.TLS]).
func (j Job) TLS(purpose string) (*tls.Config, error) {
	j.useFile()
	if _, port, _ := net.SplitHostPort(j.Address); !j.Hosted { // two jobs may have one secret, and ports next to each other
		purpose += " " + port
	}
	return store.TLS(j.Secret, purpose)
}

// useFile adds the user's secret to one that others can guess, where all ranks find the same file.
func (j *Job) useFile() {
	if !j.OneHost() || len(j.Secret) > 0 && !j.Guessable {
		return
	}
	path, err := UserSecretFile()
	if err == nil {
		var secret string
		if secret, err = ReadSecret(path, true); err == nil {
			j.Secret, j.Guessable = []byte(secret+"\x00"+string(j.Secret)), false
		}
	}
	if err != nil && j.Rank == 0 {
		slog.Warn("rendezvous: no file with the user's secret", "err", err)
	}
}

// UserSecretFile is where the user's secret is: tutti/secret in the directory of configurations.
func UserSecretFile() (string, error) {
	dir, err := os.UserConfigDir()
	return filepath.Join(dir, "tutti", "secret"), err
}

// ReadSecret reads a secret from a file that only its owner may read. It may make the file, with a random secret.
func ReadSecret(path string, make bool) (string, error) {
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) && make {
		if err = makeSecret(path); err == nil {
			info, err = os.Stat(path)
		}
	}
	if err != nil {
		return "", err
	}
	if runtime.GOOS != "windows" && info.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("others can read the secret in %s, whose mode is %v: chmod 600 it", path, info.Mode().Perm())
	}
	const longest = 4 << 10
	text, err := os.ReadFile(path)
	for i := 0; i < 100 && runtime.GOOS == "windows" && errors.Is(err, sharingViolation); i++ {
		time.Sleep(10 * time.Millisecond)
		text, err = os.ReadFile(path)
	}
	secret := strings.TrimSpace(string(text))
	if err == nil && (secret == "" || len(secret) > longest) {
		err = fmt.Errorf("%s has %d bytes; a secret has some, at most %d", path, len(secret), longest)
	}
	return secret, err
}

// sharingViolation is Windows' error for a file that another process is removing a name of, as makeSecret does.
const sharingViolation = syscall.Errno(32)

// makeSecret makes a file of mode 0600, whole or not at all, unless another process is faster.
func makeSecret(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".secret")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // it has another name then
	_, err = io.WriteString(f, rand.Text()+rand.Text()+"\n")
	if err = cmp.Or(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err = os.Link(f.Name(), path); errors.Is(err, os.ErrExist) {
		return nil
	}
	return err
}

// addresses are those of host where the store can be: at the port of rank 0 and, unless the launcher keeps it, the
// next ones.
func (j Job) addresses(host string) (all []string, err error) {
	if len(j.Stores) > 0 {
		return j.Stores, nil
	}
	_, text, err := net.SplitHostPort(j.Address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	for i := range ports {
		if i == 0 || !j.Hosted {
			all = append(all, net.JoinHostPort(host, strconv.Itoa(portAfter(int(port), i))))
		}
	}
	return all, err
}

// listen listens on the first port that is free, of those that ranks try. The name by which other ranks know rank
// 0's host may be no address of that host (behind a network address translation), or another one here: Debian
// resolves the host's own name to 127.0.1.1. So rank 0 listens on all addresses, unless j.Address is a loopback
// address.
func (j Job) listen(ctx context.Context, d store.Dialer) (net.Listener, error) {
	host, _, _ := net.SplitHostPort(j.Address)
	reach := "every user of this host"
	if !isLoopback(host) {
		host, reach = "", "the network"
	}
	if j.Guessable || len(j.Secret) == 0 {
		slog.Warn("rendezvous: "+reach+" can connect to rank 0, and the job has no secret but its name; set "+SecretVariable+
			" to something random, the same for all processes", "launcher", j.Launcher)
	}
	addresses, err := j.addresses(host)
	if err != nil {
		return nil, err
	}
	var inUse []error
	for i, address := range addresses {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
		if err == nil {
			if i > 0 {
				slog.Warn("rendezvous: the port of rank 0 is in use by others; listening on another one", "at", address, "err", inUse[0])
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

// Invitation tells processes that have another way to be told where a store is. It contains the secret, so no one
// else may see it.
type Invitation struct {
	Addresses []string `json:"addresses"`
	Secret    []byte   `json:"secret"`
}

// Invite keeps a store, on this host's loopback address or on all addresses, until its client is closed.
func Invite(thisHost bool) (*store.Client, Invitation, error) {
	in := Invitation{Secret: []byte(rand.Text() + rand.Text())}
	at := ":0"
	if thisHost {
		at = "127.0.0.1:0"
	}
	conf, err := store.TLS(in.Secret, "invitation")
	if err != nil {
		return nil, in, err
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		return nil, in, err
	}
	in.Addresses = gate.Addresses(l)
	server := store.NewServer(store.Options{})
	server.Serve(l, conf)
	return server.Owner("rank 0"), in, nil
}

// Accept connects a rank to the store.
func (in Invitation) Accept(ctx context.Context, rank int) (*store.Client, error) {
	conf, err := store.TLS(in.Secret, "invitation")
	if err != nil {
		return nil, err
	}
	return store.Dialer{Addresses: in.Addresses, TLS: conf, Name: fmt.Sprint("rank ", rank)}.Dial(ctx)
}
