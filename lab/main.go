// Command lab is the laboratory of tutti: it makes the figures of the documents, and compares with what others have.
// It runs in its folder:
//
//	go run -C lab . overlap
//
// The commands share flags and tables with the tutti command. Commands that measure programs build tutti from
// ../cmd/tutti, or take the one that --tutti names.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newRoot().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

// newRoot makes the command tree.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "lab",
		Short: "Make the figures of tutti's documents, and compare with what others have",
		Example: `  go run -C lab . overlap
  go run -C lab . compare --ranks 4
  go build -C lab -o /tmp/lab . && torchrun --nproc-per-node 4 --no-python /tmp/lab overlap`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages", ".FlagUsagesWrapped 80"))
	root.AddCommand(newOverlap(), newPeerMemory(), newCompare(), newScoreboard(), newDeltas(), newTimeline())
	root.AddCommand(newPictures())
	return root
}

// program is the measured tutti command.
type program struct {
	path  string // "" for one that is built
	built string // directory of the built command
}

// register adds the flag for its path.
func (p *program) register(flags *pflag.FlagSet) {
	flags.StringVar(&p.path, "tutti", "", "`path` of the tutti command; without it one is built from ../cmd/tutti")
}

// prepare builds the program if there is no path, and makes the path absolute.
func (p *program) prepare(ctx context.Context) error {
	if p.path != "" {
		path, err := exec.LookPath(p.path)
		if err != nil {
			return console.Usagef("--tutti: %w", err)
		}
		p.path, err = filepath.Abs(path)
		return err
	}
	dir, err := os.MkdirTemp("", "tutti-lab-")
	if err != nil {
		return err
	}
	p.built = dir
	p.path = filepath.Join(dir, "tutti")
	out, err := exec.CommandContext(ctx, "go", "build", "-C", filepath.Join("..", "cmd", "tutti"), "-o", p.path,
		".").CombinedOutput()
	if err != nil {
		err = fmt.Errorf("building tutti from ../cmd/tutti, as in the folder lab (or use --tutti): %w\n%s", err, out)
		return errors.Join(err, p.remove())
	}
	return nil
}

// remove removes the program if it was built.
func (p *program) remove() error {
	if p.built == "" {
		return nil
	}
	return os.RemoveAll(p.built)
}
