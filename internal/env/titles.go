package env

// LauncherTitle returns the name by which users know a launcher, which package rendezvous finds by its variables.
func LauncherTitle(name string) string {
	switch name {
	case "openmpi":
		return "Open MPI's mpirun"
	case "pmi":
		return "MPICH's mpirun (PMI)"
	case "mvapich":
		return "MVAPICH's mpirun"
	case "jsrun":
		return "IBM's jsrun"
	}
	return name
}
