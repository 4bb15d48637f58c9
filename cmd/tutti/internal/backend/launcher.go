package backend

import (
	"fmt"
	"os"
	"strings"

	"github.com/tutti-go/tutti/comm/rendezvous"
)

// processes maps the launchers of package rendezvous to their option for the number of processes. mpirun stands for
// launchers that are not listed.
var processes = map[string]string{
	"torchrun": "torchrun --nproc-per-node",
	"slurm":    "srun -n",
	"jsrun":    "jsrun -n",
	"tutti":    "tutti launch -n",
	"none":     "tutti launch -n",
}

// Default is the backend if the user names none: one that joins the launched processes into one world, except for
// processes of mpirun, which may belong to another MPI library.
func Default() string {
	job, _ := rendezvous.FromEnv(os.Getenv)
	switch job.Launcher {
	case "tutti", "torchrun", "slurm", "flux", "jsrun":
		if job.WorldSize > 1 {
			return tcpBackend.Name
		}
	}
	return localBackend.Name
}

// separateWorlds says that every process of a job is a separate world. It returns "" if there is no such job or
// another process says it.
func separateWorlds(b Backend, job rendezvous.Job) string {
	if b.Jobs || job.WorldSize < 2 || job.Rank > 0 {
		return ""
	}
	name, _, _ := strings.Cut(processOption(job.Launcher), " ")
	return fmt.Sprintf(
		"%s started %d processes, and with --backend %s each of them is a world of its own; "+
			"--backend mpi, tcp and nccl make one of all",
		name,
		job.WorldSize,
		b.Name,
	)
}

// SeparateWorlds returns a note for the user if a launcher started this process with others that b does not know.
// Otherwise it returns "".
func SeparateWorlds(b Backend) string {
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil && job.WorldSize == 0 && !b.Jobs {
		return fmt.Sprintf("with --backend %s this process is a world of its own: %v", b.Name, err)
	}
	return separateWorlds(b, job) // rank and size are known even if the rest of the environment is wrong
}

// alone says that there is only one rank because no launcher started others, and names a command that would. It
// returns "" if a launcher started the process.
func alone(command string, job rendezvous.Job) string {
	if job.Launcher != "none" {
		return ""
	}
	return fmt.Sprintf("one rank, as no launcher started it; %s 4 tutti … starts four", command)
}

// processOption is the launcher's option for the number of processes.
func processOption(launcher string) string {
	if command, ok := processes[launcher]; ok {
		return command
	}
	return "mpirun -n"
}

// checkRanks compares --ranks, 0 if it was left out, with the size of the job that a launcher started.
func checkRanks(backend, launcher string, asked, started int) error {
	if asked == 0 || asked == started {
		return nil
	}
	command := processOption(launcher)
	name, _, _ := strings.Cut(command, " ")
	launched := fmt.Sprintf("%s started %d", name, started)
	if launcher == "none" {
		launched = "no launcher started others"
	}
	return &OptionError{
		Backend: backend,
		Reason:  fmt.Sprintf("--ranks %d but %s; leave --ranks out, or use %s %d", asked, launched, command, asked),
	}
}
