package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
)

// flagValue is a flag of any type that has a parser.
type flagValue[T any] struct {
	target *T
	parse  func(string) (T, error)
	format func(T) string
	kind   string // shown in the help
}

// Set implements [pflag.Value].
func (f flagValue[T]) Set(text string) error {
	v, err := f.parse(text)
	if err == nil {
		*f.target = v
	}
	return err
}

// String implements [pflag.Value]. The flag package calls it on a zero value.
func (f flagValue[T]) String() string {
	if f.target == nil {
		return ""
	}
	return f.format(*f.target)
}

// Type implements [pflag.Value].
func (f flagValue[T]) Type() string { return f.kind }

// restricted is a flag that takes some values of its type only.
type restricted struct {
	pflag.Value
	accepts func() bool // the value that was set
	want    string
}

// Set implements [pflag.Value].
func (r restricted) Set(text string) error {
	err := r.Value.Set(text)
	if err == nil && !r.accepts() {
		err = errors.New("must be " + r.want)
	}
	return err
}

// restrict has a flag take only what accepts does, which its error calls want.
func restrict(flags *pflag.FlagSet, name, want string, accepts func() bool) {
	f := flags.Lookup(name)
	f.Value = restricted{f.Value, accepts, want}
}

// excluded is an error if one of some flags is set, which says why it may not be.
func excluded(cmd *cobra.Command, why string, names ...string) error {
	for _, name := range names {
		if cmd.Flags().Changed(name) {
			return usagef("--%s is %s", name, why)
		}
	}
	return nil
}

// sizeFlag is a number of bytes, such as 8, 64K, 1.5M or 1G (powers of 1024).
func sizeFlag(target *int) pflag.Value {
	return flagValue[int]{target: target, parse: parseSize, format: formatSize, kind: "size"}
}

var sizeUnits = []struct {
	suffix string
	bytes  int
}{{"G", 1 << 30}, {"M", 1 << 20}, {"K", 1 << 10}}

func parseSize(text string) (int, error) {
	number, unit := strings.ToUpper(strings.TrimSpace(text)), 1
	number = strings.TrimSuffix(strings.TrimSuffix(number, "B"), "I")
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, unit = rest, u.bytes
			break
		}
	}
	v, err := strconv.ParseFloat(number, 64)
	bytes := v * float64(unit)
	if err != nil || !(bytes >= 0 && bytes < math.MaxInt64) || bytes != math.Trunc(bytes) {
		return 0, fmt.Errorf("%q is not a size (want bytes such as 8, 64K, 16M or 1G)", text)
	}
	return int(bytes), nil
}

func formatSize(bytes int) string {
	for _, u := range sizeUnits {
		if bytes >= u.bytes && bytes%u.bytes == 0 {
			return strconv.Itoa(bytes/u.bytes) + u.suffix
		}
	}
	return strconv.Itoa(bytes)
}

// parseList reads numbers that are separated by commas.
func parseList(text string) ([]float64, error) {
	var list []float64
	for number := range strings.SplitSeq(text, ",") {
		v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if err != nil {
			return nil, fmt.Errorf("%q is not a number", number)
		}
		list = append(list, v)
	}
	return list, nil
}

func formatList(list []float64) string {
	var numbers []string
	for _, v := range list {
		numbers = append(numbers, strconv.FormatFloat(v, 'g', -1, 64))
	}
	return strings.Join(numbers, ",")
}

// nameFlag is a name, in the form that parse gives it.
func nameFlag(target *string, parse func(string) (string, error)) pflag.Value {
	return flagValue[string]{target: target, parse: parse, format: func(name string) string { return name }, kind: "name"}
}

// dtypeFlag adds the flag that names an element type.
func dtypeFlag(flags *pflag.FlagSet, target *dtype.DType, of ...dtype.DType) {
	flags.Var(flagValue[dtype.DType]{target: target, parse: dtype.Parse, format: dtype.DType.String, kind: "name"},
		"dtype", "element type: "+joinNames(of))
}

// patternNames are what a flag of a pattern takes.
func patternNames() string {
	return sparse.Auto + " (the fastest here), " + strings.Join(sparse.Patterns(), ", ")
}

// somePatterns are those that are measured unless others are asked for.
func somePatterns() []string {
	return []string{sparse.Dense, sparse.TopkA, sparse.Oktopk}
}

// patternsFlag adds the flag that lists patterns.
func patternsFlag(flags *pflag.FlagSet, target *[]string) {
	flags.Var(namesFlag("pattern", target, sparse.Patterns()), "pattern", "patterns, separated by commas: all, "+patternNames())
}

func parsePattern(name string) (string, error) {
	return oneOf("pattern", name, append(sparse.Patterns(), sparse.Auto), nil)
}

// namesFlag is a list of names that are separated by commas: some of those in all, which "all" stands for, and auto.
func namesFlag(what string, target *[]string, all []string) pflag.Value {
	parse := func(text string) (names []string, err error) {
		for name := range strings.SplitSeq(text, ",") {
			name = strings.TrimSpace(name)
			some := all
			if !strings.EqualFold(name, "all") {
				if name, err = oneOf(what, name, append(slices.Clone(all), sparse.Auto), nil); err != nil {
					return nil, err
				}
				some = []string{name}
			}
			for _, name := range some {
				if !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
		return names, nil
	}
	format := func(names []string) string {
		if slices.Equal(names, all) {
			return "all"
		}
		return strings.Join(names, ",")
	}
	return flagValue[[]string]{target: target, parse: parse, format: format, kind: "names"}
}

// valuesFlag adds the flag that lists as what values travel.
func valuesFlag(flags *pflag.FlagSet, target *[]string) {
	flags.Var(namesFlag("values", target, sparse.Values()), "values",
		"as what values travel, separated by commas: all, "+strings.Join(sparse.Values(), ", ")+", or with pattern auto also auto")
}

// hostsFlag adds the flag that says which ranks share a host.
func hostsFlag(flags *pflag.FlagSet, hosts *int) {
	flags.IntVar(hosts, "hosts", 0, "`number` of hosts that the ranks are on, one after the other: reduce densely within a host and use the pattern between hosts; 0 uses it between all ranks")
}

// joinNames lists named things.
func joinNames[T fmt.Stringer](all []T) string {
	var names []string
	for _, v := range all {
		names = append(names, v.String())
	}
	return strings.Join(names, ", ")
}

// oneOf finds a name in a list, in any case; where there is none it suggests
// what it is an alias of, or the nearest.
func oneOf(what, name string, names []string, aliases map[string]string) (string, error) {
	if i := slices.IndexFunc(names, func(n string) bool { return strings.EqualFold(n, name) }); i >= 0 {
		return names[i], nil
	}
	hint := ""
	near, ok := aliases[strings.ToLower(name)]
	if !ok {
		near = nearest(name, names)
	}
	if near != "" {
		hint = fmt.Sprintf("; did you mean %q?", near)
	}
	return "", fmt.Errorf("unknown %s %q (want one of %s)%s", what, name, strings.Join(names, ", "), hint)
}

// nearest returns the first name that is two letters from text or begins with it, and best one
// with its first letter, "" if there is none.
func nearest(text string, names []string) string {
	c := cobra.Command{SuggestionsMinimumDistance: 2}
	for _, name := range names {
		c.AddCommand(&cobra.Command{Use: name, Run: func(*cobra.Command, []string) {}})
	}
	if near := c.SuggestionsFor(text); text != "" && len(near) > 0 {
		return near[max(0, slices.IndexFunc(near, func(name string) bool { return name[0] == text[0] }))]
	}
	return ""
}

// world are the flags that say on which ranks a command runs.
type world struct {
	backend string
	gpus    bool // it runs on GPUs only
	ranks   int
	timeout time.Duration
	p2p     bool
}

// register adds the flags.
func (w *world) register(flags *pflag.FlagSet) {
	ranks := "4 for local (at most 1024), 1 for noop, what mpirun started for mpi, and for nccl what a launcher started or all GPUs"
	if w.gpus {
		ranks = "what a launcher started, or all GPUs"
	}
	flags.Var(nameFlag(&w.backend, func(text string) (string, error) { return oneOf("backend", text, backend.Names(), backend.Aliases) }),
		"backend", "what makes the ranks: "+strings.Join(backend.Names(), ", "))
	flags.IntVar(&w.ranks, "ranks", 0, "number of `ranks`; without it "+ranks)
	flags.BoolVar(&w.p2p, "p2p", false, "let GPUs of this machine write into each other's memory where that is faster (nccl)")
	flags.DurationVar(&w.timeout, "timeout", 0, "how long a rank waits for the others before it aborts, such as 30s; 0 for ever")
	restrict(flags, "ranks", "1 or more", func() bool { return w.ranks >= 1 })
	restrict(flags, "timeout", "0 or more", func() bool { return w.timeout >= 0 })
	if w.gpus {
		_ = flags.MarkHidden("backend")
	} else {
		tcpFlags(flags)
	}
}

// tcpFlags adds a flag for each variable of package tcp. It sets the variable, for this process and for ranks that it
// starts.
func tcpFlags(flags *pflag.FlagSet) {
	for _, f := range []struct{ name, variable, usage string }{
		{"tcp-listen", tcp.ListenVariable, "`address` on which ranks of tcp listen, the first rank of a machine at its port, if it has one, the others at the next ones"},
		{"tcp-advertise", tcp.AdvertiseVariable, "`addresses` that others are told instead, with commas between, as behind a network address translation"},
		{"tcp-connections", tcp.ConnectionsVariable, "`number` of connections between two ranks of tcp, which otherwise follows from the round trip"},
		{"tcp-silence", tcp.SilenceVariable, "`time` after which a silent rank of tcp is lost, the same on all machines; otherwise " + tcp.DefaultSilence.String()},
	} {
		flags.Func(f.name, f.usage+" ("+f.variable+")", func(text string) error {
			getenv := func(name string) string { return map[string]string{f.variable: text}[name] }
			return cmp.Or(new(tcp.Config).ReadEnv(getenv, 0), os.Setenv(f.variable, text))
		})
	}
}

// newWorld is the world of a command without flags.
func newWorld() world { return world{backend: cmp.Or(os.Getenv(backend.DefaultVariable), "local")} }

// newGPUWorld is that of a command for GPUs.
func newGPUWorld() world { return world{backend: "nccl", gpus: true} }

// run runs body on every rank of this process, after prepare (nil for nothing)
// in the process of rank 0.
func (w *world) run(cmd *cobra.Command, prepare func() error, body func(ctx context.Context, r backend.Rank) error) error {
	b, err := backend.Find(w.backend)
	if err != nil {
		return usageError{err}
	}
	if w.p2p && b.Name != "nccl" {
		return backend.Needs(b.Name, "--p2p", "GPUs")
	}
	note := func(text string) { fmt.Fprintf(cmd.ErrOrStderr(), "tutti: %s\n", text) }
	if text := backend.SeparateWorlds(b); text != "" {
		note(text)
	}
	opts := backend.Options{Ranks: w.ranks, Timeout: w.timeout, PeerMemory: w.p2p, Note: note, Prepare: prepare}
	return b.Run(cmd.Context(), opts, func(ctx context.Context, r backend.Rank) error {
		return instrument.Run(ctx, r.Runtime, r.Comm, func(ctx context.Context, c comm.Communicator) error {
			r.Comm = c // examined as the environment asks for
			return body(ctx, r)
		})
	})
}
