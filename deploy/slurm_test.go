package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// srun starts the tasks of a step on two nodes, which are both this machine, with Slurm's variables, and ends them
// when one fails.
const srun = `#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 && $2 == --label ]] || { echo "srun $*"; exit 2; }
shift 2
step=$(cat steps 2>/dev/null || echo 0)
echo $((step + 1)) > steps
echo "$TUTTI_SECRET" >> secrets
export SLURM_JOB_ID=7 SLURM_STEP_ID=$step SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NODELIST=localhost,other SLURM_STEP_NUM_NODES=2
for task in {0..7}; do
	SLURM_PROCID=$task SLURM_LOCALID=$((task % 4)) "$@" > >(sed "s/^/$task: /") &
done
worst=0
for task in {0..7}; do
	status=0
	wait -n || status=$?
	if ((status != 0 && worst == 0)); then
		worst=$status
		kill $(jobs -p) 2>/dev/null || true
	fi
done
exit $worst
`

// sbatch runs the script with a program.
func sbatch(t *testing.T, program ...string) (out, dir string, err error) {
	t.Helper()
	dir = t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "srun"), []byte(srun), 0o700))
	script, err := filepath.Abs("slurm.sh")
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "bash", append([]string{script}, program...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	text, err := cmd.CombinedOutput()
	return string(text), dir, err
}

// bash can parse the script, and sbatch knows its options.
func TestSlurmScript(t *testing.T) {
	out, err := exec.Command("bash", "-n", "slurm.sh").CombinedOutput()
	require.NoError(t, err, "%s", out)
	text, err := os.ReadFile("slurm.sh")
	require.NoError(t, err)
	head, body, _ := strings.Cut(string(text), "\nset -euo pipefail\n")
	assert.NotContains(t, body, "#SBATCH", "options behind the first command are no options")
	options := regexp.MustCompile(`(?m)^#SBATCH --(job-name|nodes|ntasks-per-node|cpus-per-task|time)=\S+$|^#SBATCH --requeue$`)
	assert.Len(t, options.FindAllString(head, -1), strings.Count(head, "#SBATCH"))
}

// Slurm's tasks are the ranks of one job, with a secret that nobody can guess.
func TestSlurm(t *testing.T) {
	out, dir, err := sbatch(t, filepath.Join(buildPrograms(t), "allreduce"))
	require.NoError(t, err, out)
	for rank := range 8 {
		assert.Contains(t, out, fmt.Sprintf("%d: rank %d has [1 2 3.5]\n", rank, rank))
	}
	assert.NotContains(t, out, "WARN")
	secret, err := os.ReadFile(filepath.Join(dir, "secrets"))
	require.NoError(t, err)
	assert.GreaterOrEqual(t, len(strings.TrimSpace(string(secret))), 32)
}

// A failed step starts again as a separate step and gets the number of restarts.
func TestSlurmRestarts(t *testing.T) {
	out, dir, err := sbatch(t, "sh", "-c", `[ $SLURM_PROCID = 3 ] || exec sleep 600; [ $TUTTI_RESTART = 2 ] || exit 7; exit 9`)
	require.Error(t, err, out)
	steps, err := os.ReadFile(filepath.Join(dir, "steps"))
	require.NoError(t, err)
	assert.Equal(t, "4\n", string(steps))
	for attempt, status := range []int{7, 7, 9, 7} {
		assert.Contains(t, out, fmt.Sprintf("attempt %d ended with exit status %d\n", attempt, status))
	}
	out, _, err = sbatch(t, "sh", "-c", "[ $TUTTI_RESTART = 1 ]")
	require.NoError(t, err, out)
	assert.Contains(t, out, "attempt 0 ended with exit status 1\n")
}
