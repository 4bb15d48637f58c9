package backend

import (
	"fmt"
	"strings"
)

// processes is how the launchers of package rendezvous are told a number of
// processes; mpirun stands for those that are not here.
var processes = map[string]string{
	"torchrun": "torchrun --nproc-per-node",
	"slurm":    "srun -n",
}

// checkRanks compares --ranks, 0 if it was left out, with the size of the job
// that a launcher started.
func checkRanks(backend, launcher string, asked, started int) error {
	if asked == 0 || asked == started {
		return nil
	}
	command, ok := processes[launcher]
	if !ok {
		command = "mpirun -n"
	}
	name, _, _ := strings.Cut(command, " ")
	return &OptionError{
		Backend: backend,
		Reason:  fmt.Sprintf("--ranks %d but %s started %d; leave --ranks out, or use %s %d", asked, name, started, command, asked),
	}
}
