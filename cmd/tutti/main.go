// Command tutti shows the communication hardware of this machine, trains a small network with every communication
// pattern, and measures collectives.
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
	"github.com/tutti-go/tutti/cmd/tutti/internal/launch"
)

func main() {
	launch.Keep()
	// "" if the system does not know: argv[0] may name another program.
	backend.ProbeMPI, _ = os.Executable()
	os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
}
