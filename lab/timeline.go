package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/internal/trace"
	"github.com/tutti-go/tutti/cmd/tutti/lab/figure"
)

func newTimeline() *cobra.Command {
	var from, to float64
	var title, output string
	cmd := &cobra.Command{
		Use:   "timeline FILE",
		Short: "Draw a part of a timeline that tutti diagnose or train wrote with --trace",
		Example: `  tutti diagnose --trace timeline.json .
  lab timeline timeline.json --from 615 --to 705 -o ../docs/timeline.svg`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if to <= from {
				return console.Usagef("--to %g is not after --from %g", to, from)
			}
			text, err := os.ReadFile(args[0])
			if err != nil {
				return err
			}
			file := new(trace.File)
			if err := json.Unmarshal(text, file); err != nil {
				return fmt.Errorf("%s is no timeline: %w", args[0], err)
			}
			return figure.Trace(file, from, to, title, output)
		},
	}
	flags := cmd.Flags()
	flags.Float64Var(&from, "from", 0, "`milliseconds` of the file at the left")
	flags.Float64Var(&to, "to", 100, "`milliseconds` of the file at the right")
	flags.StringVar(&title, "title", "", "`text` above the picture")
	flags.StringVarP(&output, "output", "o", "timeline.svg", "`file` of the picture, .svg or .png")
	return cmd
}
