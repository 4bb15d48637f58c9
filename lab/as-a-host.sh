#!/bin/sh
# Runs the command of one process of a job as if its GPU were alone on its host. The process sees no other GPU. NCCL
# has no NVLink, PCIe or shared memory to the others, only sockets over the loopback interface.
#
#	torchrun --nproc-per-node 2 --no-python lab/as-a-host.sh tutti bench sparse --backend nccl
#	mpirun -n 2 lab/as-a-host.sh ./nccl.test -test.run OfProcesses
#
# With PER_HOST=2 two GPUs with consecutive numbers are on one host and see each other. With GPUS=1 all processes
# share the first GPU, which NCCL refuses on one host. Their results are right but slow, because they take turns,
# and without windows, which would be measured first. GPUS=2 puts two processes on each of two GPUs.
#
#	GPUS=1 mpirun -n 4 lab/as-a-host.sh ./nccl.test -test.run OfProcesses
rank=${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-${LOCAL_RANK:-${TUTTI_LOCAL_RANK:?no launcher started this}}}}
per=${PER_HOST:-1}
host=$((rank / per))
export NCCL_HOSTID="host$host" NCCL_SOCKET_IFNAME=lo
if [ "$per" = 1 ]; then
	export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
	CUDA_VISIBLE_DEVICES=$(echo "${CUDA_VISIBLE_DEVICES:-0,1,2,3,4,5,6,7}" | cut -d, -f$((rank % ${GPUS:-8} + 1)))
	export CUDA_VISIBLE_DEVICES
	[ -z "$GPUS" ] || export NCCL_LOCAL_REGISTER=0
fi
exec "$@"
