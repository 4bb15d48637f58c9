package cli

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/internal/launch"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/printable"
)

func newLaunch() *cobra.Command {
	cfg := launch.Config{Version: version()}
	cmd := &cobra.Command{
		Use:   "launch [flags] COMMAND [ARGUMENT]...",
		Short: "Run a program as the ranks of a job, on one machine or several",
		Long: `launch starts the ranks of a program, or of one of tutti's own commands. Their
environment has what rendezvous.FromEnv reads: rank, the address of the job's
store, and the secret that keeps strangers out. Output lines begin with the
rank.

With --hosts, launch starts the ranks of all hosts by ssh, which must reach them
without a prompt, and they end when it ends. All hosts need this program at the
same path or in PATH. Ranks run in the directory with the same path, or else in
the home directory, with this machine's variables TUTTI_* and NCCL_*. Standard
input carries the secret.

With --machines, launch waits for that many launchers; the others --join the
first one, which has the lowest ranks. All need the same secret: TUTTI_SECRET,
or a file that the first machine creates and you copy to the others.

If a rank fails, all ranks on all machines end (SIGTERM, then SIGKILL after
--grace). The exit code is the rank's, or 128 plus the signal that killed
it. With --restarts, launch starts all ranks again, after pauses of up to 30 s;
TUTTI_RESTART is the number of restarts so far. A signal to any launcher goes to
all ranks, or in an elastic job to those of its machine; SIGUSR1 and SIGUSR2
always go to all that handle them. The first machine collects the flight records
of a job that failed or is elastic (TUTTI_RECORD).

A rank includes all processes that it starts, also in the background or in
another session (on Linux; elsewhere, its process group). All of them end with
the job or its launcher.

With --min, the job is elastic: a rank that fails is restarted alone and joins
again, and other machines can --join at any time.

With --join and either --machines or --min, separate servers keep the store
(tutti-store of adapters/etcd). All launchers then take the same options, and no
machine is special: when a server is lost, an elastic job continues with the
next address of --join, and each machine keeps its flight records. Other jobs
end when any of their launchers ends.`,
		Example: `  tutti launch -n 4 ./program
  tutti launch --hosts a:4,b:4 ./program
  tutti launch -n 4 --machines 2 ./program   # on the first of two machines
  tutti launch -n 4 --join HOST:29400 --secret-file F ./program   # the second
  tutti launch -n 4 --restarts 3 ./program
  tutti launch -n 4 --min 2 --max 8 --restarts 3 ./program
  tutti launch --min 2 --join A:29400,B:29400,C:29400 --job nightly ./program`,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Served = cfg.Join != nil && (cmd.Flags().Changed("machines") || cfg.Min > 0)
			if err := checkLaunch(cmd, cfg, args); err != nil {
				return err
			}
			cfg.Typed = args
			cfg.Out = cmd.OutOrStdout()
			cfg.Err = cmd.ErrOrStderr()
			cfg.Color = console.CanRedraw(cfg.Out) && os.Getenv("NO_COLOR") == ""
			if cfg.Slots != nil { // the program is looked up on each host
				return launch.Spread(cmd.Context(), cfg)
			}
			if err := onThisHost(cmd, &cfg); err != nil {
				return err
			}
			return launch.Run(cmd.Context(), cfg)
		},
	}
	launchFlags(cmd.Flags(), &cfg)
	return cmd
}

// onThisHost fills in this host's settings: the program, and the directory of flight records.
func onThisHost(cmd *cobra.Command, cfg *launch.Config) (err error) {
	if os.Getenv(env.Record) != "" {
		cfg.Records = cmp.Or(os.Getenv(env.RecordDir), ".")
	}
	cfg.Command, _, err = program(cmd, cfg.Typed)
	return err
}

// newLaunchInside makes the hidden command that launch --hosts starts on each host.
func newLaunchInside() *cobra.Command {
	return &cobra.Command{
		Use:     launch.Inside,
		Short:   "Run the ranks of this host, as the standard input says",
		Example: "  tutti launch --hosts a:4,b:4 ./program",
		Hidden:  true,
		Args:    noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg := launch.Config{Version: version(), Out: cmd.OutOrStdout(), Err: cmd.ErrOrStderr()}
			prepare := func(cfg *launch.Config) error { return onThisHost(cmd, cfg) }
			return launch.Attend(cmd.Context(), cfg, os.Stdin, prepare)
		},
	}
}

// checkLaunch returns an error for flags that exclude each other, and for a missing command.
func checkLaunch(cmd *cobra.Command, cfg launch.Config, args []string) error {
	if cfg.Slots != nil {
		const reason = "for launchers that are started one by one, without --hosts"
		if err := excluded(cmd, reason, "ranks", "machines", "join"); err != nil {
			return err
		}
	}
	if cfg.Join != nil {
		const reason = "for the first machine, which has no --join"
		if err := excluded(cmd, reason, "listen"); err != nil {
			return err
		}
		if !cfg.Served {
			const alone = reason + ", or beside --machines or --min for a store that tutti-store serves"
			if err := excluded(cmd, alone, "restarts", "max"); err != nil {
				return err
			}
		}
	}
	switch {
	case len(args) == 0 || args[0] == "":
		return console.Usagef("the program to run is missing, such as ./program")
	case cfg.Max > 0 && cfg.Min == 0:
		return console.Usagef("--max is for an elastic job, which --min makes")
	case cfg.Max > 0 && cfg.Max < cfg.Min:
		return console.Usagef("--max is %d, less than --min, %d", cfg.Max, cfg.Min)
	case cfg.Min > 0 && cfg.Machines > 1:
		return console.Usagef("--machines is not for an elastic job (--min), " +
			"which other machines join at any time, at --listen of the first")
	}
	return checkMembers(cfg)
}

// checkMembers returns an error for an elastic job that has too few ranks, and that no other machine can join.
func checkMembers(cfg launch.Config) error {
	if cfg.Join != nil || cfg.Listen != "" {
		return nil
	}
	total := cfg.Ranks
	place := "here"
	remedy := fmt.Sprintf("start %d (-n %[1]d)", cfg.Min)
	if cfg.Slots != nil {
		total = 0
		place = "on the hosts"
		remedy = "name more hosts"
	}
	for _, s := range cfg.Slots {
		total += s.Ranks
	}
	if cfg.Min <= total {
		return nil
	}
	noun := "ranks start"
	if total == 1 {
		noun = "rank starts"
	}
	return console.Usagef("--min is %d, but %d %s %s, and others need --listen to join them: %s, or give an address",
		cfg.Min, total, noun, place, remedy)
}

// launchFlags adds the flags of the launch command.
func launchFlags(flags *pflag.FlagSet, cfg *launch.Config) {
	flags.SetInterspersed(false) // flags after the command belong to the command
	flags.IntVarP(&cfg.Ranks, "ranks", "n", 1, "ranks on this machine")
	flags.Var(slotsFlag(&cfg.Slots), "hosts",
		"start the ranks on these `hosts` by ssh, such as a:4,b:4: names and numbers of ranks (1 without one)")
	flags.IntVar(&cfg.Machines, "machines", 1, "machines of the job, this one included")
	flags.Var(addresses(&cfg.Join), "join",
		"`addresses` of the first machine's launcher, or of servers of the store, separated by commas")
	flags.StringVar(&cfg.Job, "job", "",
		"`name` of the job, the same on all machines; without one, their commands are compared")
	flags.StringVar(&cfg.Listen, "listen", "",
		"`address` for the other machines ("+launch.DefaultListen+" if there are any)")
	flags.StringVar(&cfg.SecretFile, "secret-file", "",
		"`file` with the job's secret, of mode 0600 (default tutti/secret in the user's configuration directory)")
	flags.DurationVar(&cfg.Grace, "grace", launch.DefaultGrace,
		"time that ranks have between SIGTERM and SIGKILL")
	flags.IntVar(&cfg.Restarts, "restarts", 0, "how often to start all ranks again when one fails")
	flags.IntVar(&cfg.Min, "min", 0, "fewest members of an elastic job")
	flags.IntVar(&cfg.Max, "max", 0, "most members of an elastic job, 0 for any number")
	flags.BoolVar(&cfg.Bind, "bind", false,
		"give each rank its own share of this machine's processors (Linux); other jobs with --bind get the same ones")
	flags.BoolVar(&cfg.NoPrefix, "no-prefix", false, "print lines as ranks do, without the rank, for other programs")
	console.TCPFlags(flags)
	flags.DurationVar(&cfg.Wait, "wait", 10*time.Minute, "how long machines wait for each other at the start")
	console.Restrict(flags, "ranks", fmt.Sprint("a number from 1 to ", launch.MaxRanks), func() bool {
		return cfg.Ranks >= 1 && cfg.Ranks <= launch.MaxRanks
	})
	console.Restrict(flags, "machines", "1 or more", func() bool { return cfg.Machines >= 1 })
	console.Restrict(flags, "restarts", "0 or more", func() bool { return cfg.Restarts >= 0 })
	console.Restrict(flags, "min", "0 or more", func() bool { return cfg.Min >= 0 })
	console.Restrict(flags, "max", "0 or more", func() bool { return cfg.Max >= 0 })
	console.Restrict(flags, "grace", "more than 0s", func() bool { return cfg.Grace > 0 })
	console.Restrict(flags, "wait", "more than 0s", func() bool { return cfg.Wait > 0 })
	console.Restrict(flags, "join", "HOST:PORT, such as 192.168.1.5"+launch.DefaultListen, func() bool {
		missing := func(a string) bool { return !isAddress(a) || a[0] == ':' }
		return len(cfg.Join) > 0 && !slices.ContainsFunc(cfg.Join, missing)
	})
	console.Restrict(flags, "job", fmt.Sprintf("printable, and of at most %d bytes", printable.LongestName), func() bool {
		return printable.CheckName(cfg.Job) == nil
	})
	console.Restrict(flags, "listen", "HOST:PORT or :PORT, such as "+launch.DefaultListen, func() bool {
		return isAddress(cfg.Listen)
	})
}

// slotsFlag is a flag of hosts and their ranks.
func slotsFlag(target *[]launch.Slots) pflag.Value {
	return console.Value[[]launch.Slots]{
		Target: target,
		Parse:  launch.ParseSlots,
		Format: func(all []launch.Slots) string {
			var words []string
			for _, s := range all {
				words = append(words, fmt.Sprint(s.Host, ":", s.Ranks))
			}
			return strings.Join(words, ",")
		},
		Kind: "hosts",
	}
}

// addresses is a flag of addresses separated by commas.
func addresses(target *[]string) pflag.Value {
	return console.Value[[]string]{
		Target: target,
		Parse: func(text string) ([]string, error) {
			return strings.Split(text, ","), nil
		},
		Format: func(list []string) string {
			return strings.Join(list, ",")
		},
		Kind: "addresses",
	}
}

// isAddress reports whether text is a host, which may be empty, and a port.
func isAddress(text string) bool {
	_, port, err := net.SplitHostPort(text)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return err == nil
}
