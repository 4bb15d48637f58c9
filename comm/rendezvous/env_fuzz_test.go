package rendezvous

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzFromEnv reads any environment: a job that makes sense, or an error.
func FuzzFromEnv(f *testing.F) {
	for _, env := range []string{
		"", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500 TUTTI_SECRET=s", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=[::1] MASTER_PORT=1",
		"SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_JOB_ID=7 SLURM_STEP_NODELIST=n[01-04] SLURM_LOCALID=1", "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=a[",
		"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1", "PMI_RANK=1 PMI_SIZE=3 MPI_LOCALRANKID=1",
		"MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_SIZE=2", "JSM_NAMESPACE_RANK=4 JSM_NAMESPACE_SIZE=4", "ALPS_APP_PE=0",
		"RANK=-1 WORLD_SIZE=2", "RANK=2 WORLD_SIZE=2", "RANK=0 WORLD_SIZE=99999999999999999999", "LOCAL_RANK=-5 RANK=0 WORLD_SIZE=1",
	} {
		f.Add(env)
	}
	f.Fuzz(func(t *testing.T, env string) {
		values := map[string]string{}
		for field := range strings.FieldsSeq(env) {
			name, value, _ := strings.Cut(field, "=")
			values[name] = value
		}
		job, err := FromEnv(func(name string) string { return values[name] })
		if err != nil {
			require.ErrorIs(t, err, ErrEnvironment)
			return
		}
		require.GreaterOrEqual(t, job.Rank, 0, "%q", env)
		require.Less(t, job.Rank, job.WorldSize, "%q", env)
		require.GreaterOrEqual(t, job.LocalRank, 0, "%q", env)
	})
}
