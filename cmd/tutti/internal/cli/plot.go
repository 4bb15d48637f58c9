package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
	"github.com/tutti-go/tutti/cmd/tutti/internal/plot"
)

// plotCommand has the flags of the plot command.
type plotCommand struct {
	x, y   string   // names of axes
	title  string   // "" for none
	only   []string // names of trainings; nil for all
	output string   // file of the picture
}

func newPlot() *cobra.Command {
	p := plotCommand{x: "bytes", y: "accuracy", output: "plot.svg"}
	cmd := &cobra.Command{
		Use:   "plot [flags] FILE.jsonl...",
		Short: "Draw accuracy or loss against bytes, seconds or steps",
		Long: `plot draws trainings from files of JSON lines, "-" for the standard input, into
a picture that is readable at a width of 600 pixels: at most five lines, on
linear axes. A line of a file is what train --json prints, or a point that your
program prints. "name" says to which training it belongs (default the file's):

  {"name": "mine", "step": 40, "s": 1.5, "sent_bytes": 81920,
   "accuracy": 91.2, "loss": 0.31}

(on one line). One of step, s (seconds) and sent_bytes (by each rank) and one of
accuracy (in percent) and loss are enough.`,
		Example: `  tutti train --pattern dense,oktopk --json > train.jsonl
  tutti plot train.jsonl
  tutti plot train.jsonl mine.jsonl --x seconds --y loss -o loss.png
  tutti cluster --rate 100mbit ./program | tutti plot - --x seconds`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return console.Usagef("the files to draw are missing, such as train.jsonl")
			}
			if !slices.Contains(picture.Formats(), filepath.Ext(p.output)) {
				return console.Usagef("-o %s is no %s", p.output, strings.Join(picture.Formats(), " or "))
			}
			if err := p.run(cmd.InOrStdin(), args); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "wrote %s\n", p.output)
			return nil
		},
	}
	p.register(cmd.Flags())
	return cmd
}

// register adds the flags.
func (p *plotCommand) register(flags *pflag.FlagSet) {
	axis := func(target *string, names []string) pflag.Value {
		return console.NameFlag(target, func(text string) (string, error) {
			return console.OneOf("axis", text, names, nil)
		})
	}
	flags.Var(axis(&p.x, plot.Across()), "x", "horizontal axis: "+strings.Join(plot.Across(), ", "))
	flags.Var(axis(&p.y, plot.Upward()), "y", "vertical axis: "+strings.Join(plot.Upward(), ", "))
	flags.StringVar(&p.title, "title", "", "`text` above the picture")
	only := console.Value[[]string]{
		Target: &p.only,
		Parse: func(text string) ([]string, error) {
			return append(p.only, text), nil
		},
		Format: func(names []string) string {
			return strings.Join(names, ",")
		},
		Kind: "names",
	}
	flags.Var(only, "only", "trainings to draw, separated by commas")
	flags.StringVarP(&p.output, "output", "o", p.output, "`file` of the picture, .svg or .png")
}

// run draws a picture from files.
func (p *plotCommand) run(stdin io.Reader, files []string) error {
	var all []plot.Curve
	var errs []error
	for _, name := range files {
		curves, err := readCurves(stdin, name)
		errs = append(errs, err)
		for _, c := range curves {
			if slices.ContainsFunc(all, func(known plot.Curve) bool { return known.Name == c.Name }) {
				c.Name = fmt.Sprintf("%s (%s)", c.Name, filepath.Base(name))
			}
			all = append(all, c)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	only, err := chosen(p.only, all)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(c plot.Curve) bool {
		return only != nil && !slices.Contains(only, c.Name)
	})
	if len(all) == 0 {
		return fmt.Errorf("%s: %w", strings.Join(files, ", "), picture.ErrNothingToDraw)
	}
	return plot.Draw(all, p.x, p.y, p.title, p.output)
}

// chosen returns the names of curves in texts. Each text is one name, which may contain commas, or several.
func chosen(texts []string, all []plot.Curve) (names []string, err error) {
	known := func(name string) bool {
		return slices.ContainsFunc(all, func(c plot.Curve) bool { return c.Name == name })
	}
	for _, text := range texts {
		if known(text) {
			names = append(names, text)
			continue
		}
		for name := range strings.SplitSeq(text, ",") {
			name = strings.TrimSpace(name)
			if !known(name) {
				return nil, console.Usagef("--only %s: there is no such training", name)
			}
			names = append(names, name)
		}
	}
	return names, nil
}

// readCurves reads a file, or the standard input for "-".
func readCurves(stdin io.Reader, name string) ([]plot.Curve, error) {
	if name == "-" {
		return plot.Read("stdin", stdin)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // it was only read
	return plot.Read(name, f)
}
