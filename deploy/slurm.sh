#!/bin/bash
# A job on two nodes with four ranks each. tutti.Run makes the ranks from Slurm's tasks:
#
#	sbatch deploy/slurm.sh ./program --flags
#
# With GPUs, add --gpus-per-task=1 to srun and TUTTI_BACKEND=nccl to the environment.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail

# Without a secret, the job's and step's numbers serve as one, which everybody can see.
TUTTI_SECRET=$(head -c 24 /dev/urandom | base64)
export TUTTI_SECRET

# A failed rank ends the others, and all start again from their checkpoint: TUTTI_RESTART counts the restarts. If a
# node fails, Slurm starts this script again (--requeue).
for restart in 0 1 2 3; do
	status=0
	TUTTI_RESTART=$restart srun --kill-on-bad-exit=1 --label "$@" || status=$?
	if ((status == 0)); then
		exit
	fi
	echo "attempt $restart ended with exit status $status" >&2
done
exit "$status"
