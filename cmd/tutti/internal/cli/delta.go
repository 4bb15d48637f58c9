package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/delta/checkpoint"
)

const (
	diffExample  = "  tutti delta diff 1000.safetensors 1010.safetensors -o 1010.delta"
	applyExample = "  tutti delta apply 1000.safetensors 1010.delta -o 1010.safetensors"
	statExample  = "  tutti delta stat 1010.delta --json | jq .changed"

	importExample = "  tutti delta import model/ weight_v000012/ -o 12.delta"
	exportExample = "  tutti delta export model/ 12.delta -o weight_v000012"
)

func newDelta() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "delta",
		Short: "Store checkpoints as their differences",
		Long: `delta stores a checkpoint (a file in the safetensors format, or shards and their
model.safetensors.index.json) as its difference to an earlier one, without loss:
apply makes the same files, byte for byte. Where 1 to 3 % of the weights have
changed, that takes 0.8 to 0.9 bytes for each of them.

A path names a file, an index, or a folder that holds one.`,
		Example: diffExample + "\n" + applyExample + "\n" + importExample + "\n" + exportExample + "\n" + statExample,
	}
	cmd.AddCommand(
		newDeltaWrite("diff OLD NEW -o FILE", "Write the delta from one checkpoint to another", diffExample,
			"which file is the old one, and which the new one?",
			"`file` to write; - is the standard output", checkpoint.Diff),
		newDeltaWrite("apply OLD DELTA -o FILE", "Write the checkpoint that a delta makes of an older one", applyExample,
			"which file is the old one, and which the delta?",
			"`file` to write, or an empty folder for shards", checkpoint.Apply),
		newDeltaWrite("import OLD SOURCE -o FILE", "Convert a delta of slime, SGLang or others", importExample,
			"which file is the old one, and which the folder or URL of the delta?",
			"`file` to write; - is the standard output", checkpoint.Import),
		newDeltaExport(),
		newDeltaStat())
	onlySubcommands(cmd, "command")
	return cmd
}

// writer writes a file from two others.
type writer func(ctx context.Context, base, second, out string, progress checkpoint.Progress) (delta.Stat, error)

// newDeltaWrite makes a command from a writer.
func newDeltaWrite(use, short, example, question, outUsage string, write writer) *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:     use,
		Short:   short,
		Example: example,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case len(args) != 2:
				return console.Usagef("%s", question)
			case out == "":
				return console.Usagef("-o is missing, the file to write")
			}
			bar := &console.Bars{Out: cmd.ErrOrStderr(), Pieces: 1}
			const steps = 1000
			name := "delta " + cmd.Name()
			s, err := write(cmd.Context(), args[0], args[1], out, func(done, total int) {
				bar.Set(name, min(done*steps/total, steps-1), steps)
			})
			if err == nil {
				bar.Set(name, steps, steps)
			}
			bar.Stop()
			if err == nil {
				printStat(cmd.ErrOrStderr(), s) // the file may be standard output
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&out, "out", "o", "", outUsage)
	return cmd
}

// newDeltaExport makes the command that writes another format.
func newDeltaExport() *cobra.Command {
	var f checkpoint.Format
	cmd := newDeltaWrite("export OLD DELTA -o FOLDER", "Write a delta, or one to NEW, as slime, SGLang and others do",
		exportExample,
		"which file is the old one, and which the delta or the new one?", "`folder` to make",
		func(ctx context.Context, base, change, out string, progress checkpoint.Progress) (delta.Stat, error) {
			return checkpoint.Export(ctx, base, change, out, f, progress)
		})
	flags := cmd.Flags()
	flags.StringVar(&f.Version, "version", "", "version of the delta (default the folder's, of weight_v000012 000012)")
	flags.StringVar(&f.Base, "base", "", "version that the delta applies to (default the one before the folder's)")
	flags.StringVar(&f.Encoding, "encoding", "xor", "xor, or overwrite, which can be applied twice")
	flags.StringVar(&f.Checksum, "checksum", "xxh3-128", "xxh3-128, blake3, or adler32, which modelexpress wants")
	return cmd
}

func newDeltaStat() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "stat DELTA",
		Short:   "Say how many weights a delta changes, in how many bytes",
		Example: statExample,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return console.Usagef("which delta?")
			}
			d, err := checkpoint.Read(args[0])
			if err != nil {
				return err
			}
			if asJSON {
				console.WriteJSON(cmd.OutOrStdout(), d.Stat())
			} else {
				printStat(cmd.OutOrStdout(), d.Stat())
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object: weights, changed, bytes")
	return cmd
}

func printStat(to io.Writer, s delta.Stat) {
	suffix := ""
	if s.Changed > 0 {
		suffix = fmt.Sprintf(", %.3g a changed weight", float64(s.Bytes)/float64(s.Changed))
	}
	fmt.Fprintf(to, "%d of %d weights changed (%.3g %%): %d bytes%s\n",
		s.Changed, s.Weights, 100*float64(s.Changed)/float64(max(s.Weights, 1)), s.Bytes, suffix)
}
