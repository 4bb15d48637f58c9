// Command tutti-store serves the store of jobs to their launchers and members, on top of etcd: one in this process,
// or an external cluster. It keeps no state itself: if several processes serve a store, any of them may be lost.
//
//	tutti-store --data-dir DIR --name a --initial-cluster a=https://A:2380,b=https://B:2380,c=https://C:2380
//	tutti-store --endpoints https://etcd-1:2379,https://etcd-2:2379
//	tutti launch --join A:29400,B:29400,C:29400 --min 2 --job nightly ./program
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/distributed/elastic"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	cmd := newCommand()
	err := cmd.ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "tutti-store:", err)
		os.Exit(1)
	}
}

// config holds the command line's settings.
type config struct {
	listen     string        // address for launchers and members
	secretFile string        // of the job
	silence    time.Duration // until the lease of a silent process ends
	json       bool          // write lines of JSON
	outside    cluster       // external etcd
	embedded   member        // etcd in this process
}

func newCommand() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "tutti-store [flags]",
		Short: "Serve the store of jobs on top of etcd",
		Long: `tutti-store serves the store of jobs to tutti launch --join and to programs that
use package elastic. What is in it is etcd's: of one in this process (--data-dir,
and --initial-cluster for several), or of a cluster outside (--endpoints). Three on
three machines keep a job through the loss of any of them.

Launchers, members and servers know one secret: TUTTI_SECRET, or a file that only
its owner may read (--secret-file, TUTTI_SECRET_FILE, or tutti/secret in the user's
configuration directory). Members of an etcd in these processes prove it to each
other as well. Several jobs have a name each (tutti launch --job).`,
		Example: `  tutti-store --data-dir /var/lib/tutti
  tutti-store --data-dir /var/lib/tutti --name a \
    --initial-cluster a=https://A:2380,b=https://B:2380,c=https://C:2380
  tutti-store --endpoints https://etcd-1:2379,https://etcd-2:2379 \
    --cacert ca.pem --cert client.pem --key client-key.pem`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.check(cmd); err != nil {
				return err
			}
			return c.serve(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	c.flags(cmd.Flags())
	return cmd
}

// flags adds the command line's flags.
func (c *config) flags(f *pflag.FlagSet) {
	f.StringVar(&c.listen, "listen", ":29400", "`address` for launchers and members")
	f.StringVar(&c.secretFile, "secret-file", "", "`file` with the secret, of mode 0600")
	f.DurationVar(&c.silence, "silence", elastic.DefaultSilence,
		"`time` after which a process that says nothing is lost; etcd's leases take whole seconds, at least 2")
	f.BoolVar(&c.json, "json", false, "say in JSON where it serves, when it does")

	f.StringSliceVar(&c.outside.endpoints, "endpoints", nil, "`URLs` of a cluster outside, with commas between")
	f.StringVar(&c.outside.ca, "cacert", "", "`file` with the certificate authority of that cluster")
	f.StringVar(&c.outside.cert, "cert", "", "`file` with this process's certificate for that cluster")
	f.StringVar(&c.outside.key, "key", "", "`file` with its key")

	e := &c.embedded
	f.StringVar(&e.folder, "data-dir", "", "`folder` of an etcd in this process")
	f.StringVar(&e.name, "name", "default", "`name` of that member")
	f.StringVar(&e.cluster, "initial-cluster", "",
		"`members` of its cluster, as NAME=https://HOST:PORT with commas between; by default it is alone")
	f.StringVar(&e.state, "initial-cluster-state", "new",
		"new, or `existing` for a member that was added to a cluster that runs")
	f.StringVar(&e.peers, "listen-peer-urls", "",
		"`URLs` for the other members; by default this member's of --initial-cluster")
	f.StringVar(&e.clients, "listen-client-urls", "",
		"`URLs` for etcdctl and other clients; by default there are none, as anybody may use these")
	f.StringVar(&e.logLevel, "log-level", "error", "`level` of that etcd's log: debug, info, warn or error")
}

// check returns an error for flags that contradict each other.
func (c *config) check(cmd *cobra.Command) error {
	if _, _, err := net.SplitHostPort(c.listen); err != nil {
		return fmt.Errorf("--listen takes HOST:PORT or :PORT: %w", err)
	}
	if c.silence <= 0 {
		return errors.New("--silence must be more than 0s")
	}
	outside := len(c.outside.endpoints) > 0
	embedded := c.embedded.folder != ""
	if !outside && !embedded {
		return errors.New("where is the etcd? --data-dir is the folder of one in this process, " +
			"--endpoints are the URLs of one outside")
	}
	if outside && embedded {
		return errors.New("--data-dir is for an etcd in this process, --endpoints for one outside: choose one")
	}
	foreign := map[bool][]string{
		true:  {"name", "initial-cluster", "initial-cluster-state", "listen-peer-urls", "listen-client-urls", "log-level"},
		false: {"cacert", "cert", "key"},
	}
	for _, flag := range foreign[outside] {
		if cmd.Flags().Changed(flag) && outside {
			return fmt.Errorf("--%s is for an etcd in this process (--data-dir), not for one outside (--endpoints)", flag)
		}
		if cmd.Flags().Changed(flag) {
			return fmt.Errorf("--%s is for an etcd outside (--endpoints), not for one in this process (--data-dir)", flag)
		}
	}
	if outside {
		return nil
	}
	return c.embedded.check()
}
