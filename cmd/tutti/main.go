// Command tutti shows what this machine offers to package tutti, trains a
// small network with every communication pattern, and measures collectives.
//
//	tutti info
//	tutti train
//	tutti bench allreduce --ranks 2
//
// See tutti --help.
package main

import (
	"os"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/cli"
)

func main() {
	backend.ProbeMPI = os.Args[0]
	os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
}
