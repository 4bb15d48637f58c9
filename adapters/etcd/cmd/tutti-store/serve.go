package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tutti-go/tutti/adapters/etcd"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/gate"
)

// Prefixes of a job's keys.
const (
	root    = "/tutti/"
	unnamed = root + "unnamed/"
	named   = root + "named/"
)

var jobName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// prefix returns the prefix of a job's keys.
func prefix(job string) (string, error) {
	if job == "" {
		return unnamed, nil
	}
	if !jobName.MatchString(job) {
		return "", fmt.Errorf(
			"%w: %.100q is no name of a job: it takes 1 to 64 letters, digits, dots, dashes and underscores",
			comm.ErrArgument,
			job,
		)
	}
	return named + job + "/", nil
}

// splitList splits a list at commas.
func splitList(text string) []string { return strings.Split(text, ",") }

// serve serves the store until ctx ends, or the etcd in this process fails.
func (c *config) serve(ctx context.Context, out, log io.Writer) error {
	secret, err := c.secret()
	if err != nil {
		return err
	}
	conf, err := storeTLS(secret, "store")
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", c.listen)
	if err != nil {
		return fmt.Errorf("%w; --listen takes another address", err)
	}
	defer l.Close() //nolint:errcheck // the proxy may have closed it already
	if len(c.outside.endpoints) > 0 {
		client, err := c.outside.open(ctx, c.silence)
		if err != nil {
			return ended(ctx, err)
		}
		defer client.Close() //nolint:errcheck // nothing is lost
		return c.proxy(ctx, client, l, conf, nil, out)
	}
	e, err := c.embedded.start(secret)
	if err != nil {
		return err
	}
	defer c.embedded.stop(e)
	client, err := c.embedded.ready(ctx, e, log)
	if err != nil {
		return ended(ctx, err)
	}
	defer client.Close() //nolint:errcheck // nothing is lost
	return c.proxy(ctx, client, l, conf, e.Err(), out)
}

// ended returns err unless a signal has ended the program.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// proxy serves an etcd to clients.
func (c *config) proxy(
	ctx context.Context, client *clientv3.Client, l net.Listener, conf *tls.Config, failed <-chan error, out io.Writer,
) error {
	p := store.NewProxy(c.silence, func(ctx context.Context, job string) (store.Backend, error) {
		keys, err := prefix(job)
		if err != nil {
			return nil, err
		}
		return etcd.Dial(ctx, etcd.Config{Client: client, Prefix: keys, Silence: c.silence})
	})
	p.Serve(l, conf)
	if err := c.announce(l, out); err != nil {
		return errors.Join(err, p.Close())
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		err = fmt.Errorf("the etcd in %s: %w", c.embedded.folder, err)
	}
	return errors.Join(err, p.Close())
}

// announce prints the address of the store.
func (c *config) announce(l net.Listener, out io.Writer) error {
	addresses := gate.Addresses(l)
	if c.json {
		return json.NewEncoder(out).Encode(map[string]any{"addresses": addresses})
	}
	_, err := fmt.Fprintf(out, "tutti-store: serving at %s\n", strings.Join(addresses, ", "))
	return err
}

// storeTLS returns the configuration of connections for a purpose; "store" is for connections of launchers and ranks.
func storeTLS(secret, purpose string) (*tls.Config, error) {
	env := map[string]string{
		"TUTTI_RANK": "0", "TUTTI_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
		env.Secret: secret,
	}
	job, err := rendezvous.FromEnv(func(name string) string { return env[name] })
	if err != nil {
		return nil, err
	}
	return job.TLS(purpose)
}

// secret returns TUTTI_SECRET or the contents of the secret file. A single server creates the file.
func (c *config) secret() (string, error) {
	if secret := os.Getenv(env.Secret); secret != "" && c.secretFile == "" {
		return secret, nil
	}
	path := c.secretFile
	if path == "" {
		path = os.Getenv(env.SecretFile)
	}
	if path == "" {
		var err error
		if path, err = rendezvous.UserSecretFile(); err != nil {
			return "", err
		}
	}
	several := c.embedded.cluster != "" || len(c.outside.endpoints) > 0
	secret, err := rendezvous.ReadSecret(path, !several)
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("%w: write something random there, with mode 0600, and the same on all machines", err)
	}
	return secret, err
}
