#!/bin/bash
# Prints the hashes of sums for any number of ranks (bits -reproducible) by backend and number of ranks, and
# compares them with docs/same-bits.md. It covers goroutines, TCP and MPI, and GPUs over NCCL and peer memory, with
# one GPU per rank or several processes on one. It leaves out what the machine lacks.
#
#	go build ./.ci/bits && go build -C cmd/tutti -o ../../tutti . && lab/same-bits.sh
#	BITS=/tmp/bits TUTTI=/tmp/tutti LIMIT=60 lab/same-bits.sh	# other programs; seconds that a world may take
set -euo pipefail
cd "$(dirname "$0")/.."
bits=$(realpath "${BITS:-bits}")
tutti=$(realpath "${TUTTI:-tutti}")
readonly bits tutti limit=${LIMIT:-60}
documented=$(sed -n '/^| `any_ranks`/,/^$/p' docs/same-bits.md | grep -oE '\b[0-9a-f]{16}\b' | paste -sd' ')
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
status=0

# row NAME RANKS COMMAND… prints the hashes of a world.
row() {
	local hashes result=equal code=0 start=$SECONDS
	timeout -k 5 "$limit" "${@:3}" >"$scratch/out" 2>"$scratch/err" </dev/null || code=$?
	if ((code > 0)); then
		result="FAILED with $code"
		sed "s/^/$1, $2 ranks: /" "$scratch/err" >&2
	fi
	hashes=$(awk '/reproducible/ { print $NF }' "$scratch/out" | paste -sd' ')
	if [[ $result == equal && $hashes != "$documented" ]]; then
		result=DIFFERENT
	fi
	[[ $result == equal ]] || status=1
	printf '%-34s %5d  %-50s %4d s  %s\n' "$1" "$2" "$hashes" $((SECONDS - start)) "$result"
}

# launched NAME RANKS COMMAND… runs a world of processes.
launched() { row "$1" "$2" "$tutti" launch -n "$2" --no-prefix --grace 2s "${@:3}" -reproducible; }

# several NAME RANKS GPUS FLAGS… runs a world of processes on a number of GPUs, which NCCL connects by sockets.
several() { launched "$1" "$2" env TUTTI_BACKEND=nccl GPUS="$3" lab/as-a-host.sh "$bits" "${@:4}"; }

printf '%-34s %5s  %-50s\n' backend ranks "f32              f16              bf16"
printf '%-34s %5s  %s\n' documented '' "$documented"
for ranks in 1 2 3 4; do
	row local "$ranks" env TUTTI_BACKEND=local TUTTI_RANKS="$ranks" "$bits" -reproducible
	launched tcp "$ranks" env TUTTI_BACKEND=tcp "$bits"
done
if command -v mpirun >/dev/null; then
	export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
	for ranks in 2 4; do
		row mpi "$ranks" mpirun -n "$ranks" env TUTTI_BACKEND=mpi "$bits" -reproducible
		row 'mpi, native' "$ranks" mpirun -n "$ranks" env TUTTI_BACKEND=mpi TUTTI_MPI_COLLECTIVES=native \
			"$bits" -reproducible
	done
fi
if [[ -z ${CUDA_VISIBLE_DEVICES:-} ]]; then
	CUDA_VISIBLE_DEVICES=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)
	export CUDA_VISIBLE_DEVICES
fi
IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
readonly gpus=${#visible[@]}
if ((gpus == 0)); then
	echo 'no NVIDIA GPU: nccl and p2p are left out'
	exit "$status"
fi
row 'nccl' 1 env TUTTI_BACKEND=nccl TUTTI_RANKS=1 "$bits" -reproducible
for ranks in 2 3 4; do
	several 'nccl, sockets, one GPU' "$ranks" 1
	several 'p2p, one GPU' "$ranks" 1 -p2p
done
TUTTI_P2P_ORDER=fixed several 'p2p, fixed order, one GPU' 3 1 -p2p
if ((gpus < 2)); then
	echo 'one NVIDIA GPU: worlds of a GPU for each rank are left out'
	exit "$status"
fi
for ranks in 2 4 8; do
	((ranks <= gpus)) || break
	row 'nccl, goroutines, a GPU each' "$ranks" env TUTTI_BACKEND=nccl TUTTI_RANKS="$ranks" "$bits" -reproducible
	row 'p2p, goroutines, a GPU each' "$ranks" env TUTTI_BACKEND=nccl TUTTI_RANKS="$ranks" "$bits" -reproducible -p2p
	launched 'nccl, a GPU each' "$ranks" env TUTTI_BACKEND=nccl "$bits"
	launched 'p2p, a GPU each' "$ranks" env TUTTI_BACKEND=nccl "$bits" -p2p
	several 'nccl, sockets, a GPU each' "$ranks" "$ranks"
done
several 'nccl, sockets, two for each GPU' 4 2
exit "$status"
