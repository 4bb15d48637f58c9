// Package cli is the command line of tutti: flags, tables, progress and exit codes. Sibling packages do the commands'
// work.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/cluster"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/internal/launch"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/sparsity"
)

// Exit codes. The exit code of a signal is 128 plus its number, as in shells.
const (
	exitOK      = 0
	exitFailure = 1 // something went wrong
	exitUsage   = 2 // the command line is wrong; nothing was done
	exitPipe    = 128 + int(syscall.SIGPIPE)
)

// tooLarge is SIGXFSZ, which a write beyond the file-size limit raises in addition to its error. Windows has no such
// signal.
const tooLarge = syscall.Signal(25)

// Main runs the command line and returns the exit code. The first signal ends the command cleanly; a signal that
// insists ends it at once.
func Main(args []string, stdout, stderr io.Writer) int {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	// By default these would end the process at once, and ranks without their grace period. Writes return errors for
	// both.
	signal.Notify(make(chan os.Signal, 1), tooLarge, syscall.SIGPIPE)
	if !signal.Ignored(syscall.SIGHUP) { // ignored under nohup
		signal.Notify(signals, syscall.SIGHUP)
	}
	go func() {
		received := received{}
		for got := range signals {
			cancel(launch.Signaled(got.(syscall.Signal))) // only the first counts
			if received.insists(got, time.Now()) {
				die(got.(syscall.Signal), stderr)
			}
		}
	}()
	return run(ctx, args, stdout, stderr)
}

// received holds the time of each signal's first arrival.
type received map[os.Signal]time.Time

// impatience is the time after which a repeated signal insists: terminals, shells and timeout send theirs twice.
const impatience = time.Second

// insists records a signal and reports whether the command must end at once: a person has interrupted twice, or a
// signal has come again later. A closing terminal may hang up any number of times.
func (r received) insists(s os.Signal, now time.Time) bool {
	before, repeated := r[s]
	if !repeated {
		r[s] = now
	}
	switch s {
	case syscall.SIGHUP:
		return false
	case os.Interrupt:
		return repeated
	}
	return repeated && now.Sub(before) >= impatience
}

// die ends this process by a signal or, where that is impossible, with the signal's exit code. Ranks die with it.
func die(s syscall.Signal, stderr io.Writer) {
	say(stderr, fmt.Sprintf("tutti: %v again: killing the ranks", launch.Signaled(s)))
	signal.Reset(s)
	if self, err := os.FindProcess(os.Getpid()); err == nil {
		_ = self.Signal(s) // fails on Windows
	}
	os.Exit(128 + int(s))
}

// lastWord bounds the time that a finished command waits for a reader of its last line, such as a stopped terminal.
const lastWord = 3 * time.Second

// say prints a command's last line.
func say(stderr io.Writer, text string) {
	said := make(chan struct{})
	go func() {
		fmt.Fprintln(stderr, text)
		close(said)
	}()
	select {
	case <-said:
	case <-time.After(lastWord):
	}
}

// run is Main without signals.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := console.NewOutput(stdout, cancel)
	root, started := newRoot()
	root.SetArgs(append([]string{}, args...)) // cobra replaces nil with os.Args
	root.SetOut(out)
	root.SetErr(console.NewErrors(stderr, cancel))
	cmd, err := root.ExecuteContextC(ctx)
	var usage console.UsageError
	var options *backend.OptionError
	var stopped launch.Signaled
	var ended *launch.End
	if errors.As(err, new(*launch.Unread)) {
		stderr = io.Discard // its reader had its chance
	}
	switch {
	case errors.Is(out.Err(), syscall.EPIPE): // the reader has seen enough
		return exitPipe
	case out.Err() != nil: // the command itself may not have noticed
		say(stderr, fmt.Sprint("tutti: ", out.Err()))
		return exitFailure
	case err == nil:
		return exitOK
	case errors.Is(context.Cause(ctx), syscall.EPIPE): // nobody reads the errors any more
		return exitPipe
	case errors.As(context.Cause(ctx), &stopped):
		say(stderr, fmt.Sprint("tutti: ", stopped))
		return 128 + int(stopped)
	case errors.As(err, &ended):
		if ended.Text != "" {
			say(stderr, fmt.Sprint("tutti: ", ended))
		}
		return ended.Code
	case !*started || errors.As(err, &usage) || errors.As(err, &options):
		// Cobra's errors come before a command has started.
		say(stderr, fmt.Sprintf("%s\nRun '%s --help' for usage.",
			console.Wrapped(stderr, "tutti: "+message(err)), cmd.CommandPath()))
		return exitUsage
	default:
		say(stderr, console.Wrapped(stderr, "tutti: "+message(err)))
		return exitFailure
	}
}

// description is the help of the command.
const description = `tutti shows what this machine offers for collective communication, trains a
small network with every gradient exchange pattern, and measures collectives.

Exit codes: 0 success, 1 failure, 2 wrong usage, 129 hung up (SIGHUP), 130
interrupted (SIGINT), 143 terminated (SIGTERM); cluster and launch exit with
the code of their job.

Environment:
  TUTTI_BACKEND          backend of tutti.Run, and default of --backend
  TUTTI_RANKS            number of ranks that tutti.Run runs in one process, as
                         goroutines or on GPUs
  TUTTI_CHECK            1: ranks compare every collective before it runs;
                         10s: they also wait at most 10 seconds for each other
  TUTTI_RECORD           number of calls that each rank records, for diagnose
  TUTTI_RECORD_DIR       directory for the records (default the current one)
  TUTTI_SECRET           the job's secret, the same for all processes; it keeps
                         strangers out
  TUTTI_SECRET_FILE      file with the secret, which only its owner may read
  TUTTI_RANK, TUTTI_WORLD_SIZE, TUTTI_LOCAL_RANK, TUTTI_LOCAL_WORLD_SIZE,
  TUTTI_RESTART, TUTTI_RUN, TUTTI_MIN, TUTTI_MAX, TUTTI_STORE, TUTTI_JOB,
  TUTTI_KEEPER
                         set by launch for its ranks
  TUTTI_TCP_LISTEN, TUTTI_TCP_ADVERTISE, TUTTI_TCP_CONNECTIONS,
  TUTTI_TCP_SILENCE      defaults of --tcp-listen and so on
  TUTTI_CONNECT_TIMEOUT  how long ranks wait for others to start (default 10m)
  TUTTI_CUDA_LIB, TUTTI_NCCL_LIB, TUTTI_MPI_LIB
                         library files to use instead of those found
  TUTTI_TCP_SHARED, TUTTI_MPI_SHARED
                         off: ranks of one host do not share memory
  TUTTI_MPI_COLLECTIVES  native: use the MPI library's own collectives
  TUTTI_P2P_ORDER        fixed: sums over peer memory only, in rank order
  TUTTI_NETWORK          name of the network in results; set by cluster
Programs that use the library read the TUTTI_* variables of libraries, jobs and
MPI. Without a launcher, each process needs RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT, as torchrun sets them. TUTTI_CHECK and TUTTI_RECORD
need tutti.Run, instrument.Run or an elastic job.`

// newRoot makes the command tree. started becomes true when a command's code begins to run.
func newRoot() (root *cobra.Command, started *bool) {
	started = new(bool)
	root = &cobra.Command{
		Use:   "tutti",
		Short: "Collective communication and sparse gradient exchange in Go",
		Long:  description,
		Example: `  tutti info
  tutti train --pattern dense,topkA,oktopk
  tutti bench allreduce --ranks 2 --max 16M
  tutti cluster --rate 100mbit bench sparse --min 16M --max 16M`,
		Version:          version(),
		SilenceErrors:    true,
		SilenceUsage:     true,
		PersistentPreRun: func(*cobra.Command, []string) { *started = true },
	}
	root.SetVersionTemplate("tutti {{.Version}}\n")
	root.SetFlagErrorFunc(suggestFlag)
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages", ".FlagUsagesWrapped 80"))
	addGroup(root, "Run:", newTrain(), newBench(), newDelta(), newLaunch(), newCluster())
	addGroup(root, "Inspect:", newInfo(), newDiagnose(), newPlot())
	root.AddCommand(newVersion(), newProbe(), newClusterInside(), newLaunchInside())
	onlySubcommands(root, "command")
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, sub := range root.Commands() {
		switch sub.Name() {
		case "help":
			sub.Args = func(_ *cobra.Command, args []string) error {
				if about, _, _ := root.Find(args); about != root {
					return nil
				}
				return root.Args(root, args)
			}
		case "completion":
			onlySubcommands(sub, "shell")
		}
	}
	completeNames(root)
	return root, started
}

// addGroup adds subcommands under a heading of the help.
func addGroup(cmd *cobra.Command, title string, subs ...*cobra.Command) {
	if !cmd.ContainsGroup(title) {
		cmd.AddGroup(&cobra.Group{ID: title, Title: title})
	}
	for _, sub := range subs {
		sub.GroupID = title
		cmd.AddCommand(sub)
	}
}

// suggestFlag adds the most similar flag to the error of an unknown flag.
func suggestFlag(cmd *cobra.Command, err error) error {
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		names = append(names, f.Name)
	})
	if unknown := new(pflag.NotExistError); errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "" {
		if near := console.Nearest(unknown.GetSpecifiedName(), names); near != "" {
			return fmt.Errorf("%w; did you mean --%s?", err, near)
		}
	}
	return err
}

// toggle is a flag without a value. pflag's help appends "[=true|false]" to flags that report themselves as booleans.
type toggle struct{ pflag.Value }

// completeNames lets shells complete the names that flags accept, after a comma too. It makes the help list flags in
// the order of their addition.
func completeNames(cmd *cobra.Command) {
	cmd.Flags().SortFlags = false
	cmd.InitDefaultHelpFlag()
	cmd.InitDefaultVersionFlag()
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Value.Type() == "bool" {
			f.Value = toggle{f.Value}
		}
	})
	for flag, names := range map[string][]string{
		"backend": backend.Names(),
		"mpi":     cluster.MPIs(),
		"dtype":   strings.Split(console.JoinNames(dtype.All()), ", "),
		"op":      strings.Split(console.JoinNames(reductions.All()), ", "),
		"pattern": append(sparsity.Patterns(), sparse.Auto),
		"values":  sparsity.Values(),
	} {
		if cmd.Flags().Lookup(flag) == nil {
			continue
		}
		complete := func(_ *cobra.Command, _ []string, text string) ([]string, cobra.ShellCompDirective) {
			begun := text[:strings.LastIndexByte(text, ',')+1] // the names before the last comma
			var all []string
			for _, name := range names {
				all = append(all, begun+name)
			}
			return all, cobra.ShellCompDirectiveNoFileComp
		}
		_ = cmd.RegisterFlagCompletionFunc(flag, complete)
	}
	for _, sub := range cmd.Commands() {
		completeNames(sub)
	}
}

// noArguments returns an error if there are arguments.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return console.Usagef("%s takes no arguments, but got %q", cmd.CommandPath(), args[0])
	}
	return nil
}

// onlySubcommands makes a command without arguments show its help, and an unknown subcommand an error that suggests
// one.
func onlySubcommands(cmd *cobra.Command, kind string) {
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return cmd.Help()
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		var names []string
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() {
				names = append(names, sub.Name())
			}
		}
		_, err := console.OneOf(kind, args[0], names, nil)
		return err
	}
}
