package cli

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/sparsity"
)

// excluded returns an error with a reason if any of the named flags is set.
func excluded(cmd *cobra.Command, reason string, names ...string) error {
	for _, name := range names {
		if cmd.Flags().Changed(name) {
			return console.Usagef("--%s is %s", name, reason)
		}
	}
	return nil
}

// parseList parses numbers separated by commas.
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

// somePatterns returns the patterns that are measured by default.
func somePatterns() []string {
	return []string{sparse.Dense, sparse.TopkA, sparse.Oktopk}
}

// patternsFlag adds the flag that lists patterns.
func patternsFlag(flags *pflag.FlagSet, target *[]string) {
	flags.Var(namesFlag("pattern", target, sparsity.Patterns(), sparse.Auto), "pattern",
		"patterns, separated by commas: all, "+console.PatternNames())
}

// namesFlag is a list of names separated by commas: names in all, "all" for all of them, or names in extra.
func namesFlag(kind string, target *[]string, all []string, extra ...string) pflag.Value {
	parse := func(text string) (names []string, err error) {
		for name := range strings.SplitSeq(text, ",") {
			name = strings.TrimSpace(name)
			listed := all
			if !strings.EqualFold(name, "all") {
				if name, err = console.OneOf(kind, name, slices.Concat(all, extra), nil); err != nil {
					return nil, err
				}
				listed = []string{name}
			}
			for _, name := range listed {
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
	return console.Value[[]string]{
		Target: target,
		Parse:  parse,
		Format: format,
		Kind:   "names",
	}
}

// valuesFlag adds the flag that lists the codecs of values.
func valuesFlag(flags *pflag.FlagSet, target *[]string) {
	flags.Var(namesFlag("values", target, sparsity.Values()), "values",
		"codecs of values, separated by commas: all, "+strings.Join(sparsity.Values(), ", "))
}

// hostsFlag adds the flag that says which ranks share a host.
func hostsFlag(flags *pflag.FlagSet, hosts *int) {
	flags.IntVar(hosts, "hosts", 0,
		"`number` of hosts that the ranks are on, one after the other: reduce densely within a host "+
			"and use the pattern between hosts; 0 uses it between all ranks")
}
