package cli

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/cluster"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
)

func newCluster() *cobra.Command {
	cfg := cluster.Default()
	var mpi string
	cmd := &cobra.Command{
		Use:   "cluster [flags] COMMAND [ARGUMENT]...",
		Short: "Run a command on an emulated cluster with slow links",
		Long: `cluster makes hosts out of namespaces on this Linux machine, and connects them
by links of the given rate, delay and loss. It runs a command on them as a job
of Open MPI or MPICH, or without MPI as tutti launch does. The command is a
program, or one of tutti's own (bench, train, info). These use the backend mpi,
or tcp without MPI, unless told otherwise. MPI's ranks on one host share memory;
hosts communicate over TCP.

The hosts share this machine's processors, so ranks that compute slow the others
down. Everything except the files that the command writes is gone when it ends,
however it ends. You need permission to make namespaces, which root has, and on
many systems every user (sudo searches other directories for programs: give it
the path of tutti). You also need the programs ip, tc, unshare and nsenter, and
the kernel's queueing discipline tbf. With --delay or --loss tutti forwards the
hosts' packets itself, for which it needs /dev/net/tun. The last line, on
standard error, says how much the links carried, and how well the forwarder kept
up. The exit code is the job's.`,
		Example: `  tutti cluster bench sparse --min 16M --max 16M
  tutti cluster --rate 100mbit --hosts 2 --per-host 2 train --pattern oktopk
  tutti cluster --rate 10mbit --delay 50ms --loss 0.1% bench allreduce
  sudo $(which tutti) cluster hostname`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := cfg.Validate(); err != nil {
				return console.UsageError{Err: err}
			}
			if len(args) == 0 || args[0] == "" {
				return console.Usagef("the command to run on the cluster is missing, such as bench sparse")
			}
			args, self, err := program(cmd, args)
			if err != nil {
				return err
			}
			return cluster.Run(cmd.Context(), cfg, mpi, self, args, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	clusterFlags(cmd.Flags(), &cfg, &mpi)
	return cmd
}

// clusterFlags adds the flags of the cluster command.
func clusterFlags(flags *pflag.FlagSet, cfg *cluster.Config, mpi *string) {
	flags.SetInterspersed(false) // flags after the command belong to the command
	flags.IntVar(&cfg.Hosts, "hosts", cfg.Hosts, "number of hosts")
	flags.IntVar(&cfg.PerHost, "per-host", cfg.PerHost, "ranks on each host")
	rate := console.Value[cluster.Rate]{
		Target: &cfg.Rate,
		Parse:  cluster.ParseRate,
		Format: cluster.Rate.String,
		Kind:   "bits/s",
	}
	flags.Var(rate, "rate", "bandwidth of each link in each direction, such as 100mbit or 10gbit")
	flags.DurationVar(&cfg.Delay, "delay", 0, "time that packets take from one host to another, such as 50us")
	loss := console.Value[float64]{
		Target: &cfg.Loss,
		Parse:  parsePercent,
		Format: formatPercent,
		Kind:   "percent",
	}
	flags.Var(loss, "loss", "share of packets that are lost, such as 0.1%")
	library := console.NameFlag(mpi, func(text string) (string, error) {
		return console.OneOf("MPI library", text, cluster.MPIs(), nil)
	})
	flags.Var(library, "mpi", strings.Join(cluster.MPIs(), " or ")+" (default the first one installed)")
}

func formatPercent(v float64) string {
	return fmt.Sprint(v, "%")
}

func parsePercent(text string) (float64, error) {
	v, err := strconv.ParseFloat(strings.TrimSuffix(text, "%"), 64)
	if err != nil {
		return 0, fmt.Errorf("%q is not a percentage (want a number such as 0.1%%)", text)
	}
	return v, nil
}

// program returns the command line of args: a subcommand of tutti, or a program. self is the path of tutti.
func program(cmd *cobra.Command, args []string) (command []string, self string, err error) {
	if self, err = os.Executable(); err != nil {
		return nil, "", fmt.Errorf("finding tutti's own file (is /proc mounted?): %w", err)
	}
	if found, _, err := cmd.Root().Find(args); args[0] == cmd.Root().Name() {
		return append([]string{self}, args[1:]...), self, nil
	} else if err == nil && found.HasParent() {
		return append([]string{self}, args...), self, nil
	}
	if _, err := exec.LookPath(args[0]); err != nil {
		err = fmt.Errorf("%s is neither a command of tutti nor a program: %w", args[0], err)
		return nil, self, console.UsageError{Err: err}
	}
	return args, self, nil
}

// newClusterInside makes the hidden command that the cluster command starts in its namespaces.
func newClusterInside() *cobra.Command {
	return &cobra.Command{
		Use:     cluster.Inside + " JOB",
		Short:   "Make the cluster that JOB describes around this process, and run its job",
		Example: "  tutti cluster --hosts 2 hostname",
		Hidden:  true,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return cluster.RunInside(args[0], os.Stdin, os.Stdout, os.Stderr)
		},
	}
}
