#!/bin/bash
# Runs a command twice, as two processes of a job on two hosts with one GPU each, in network namespaces joined by a
# cable with a rate. NCCL has sockets between them. Without a second GPU, both use the first.
#
#	lab/two-hosts.sh 10gbit tutti bench sparse --backend nccl --pattern dense,topkA,oktopk --max 100M
#	lab/two-hosts.sh 0 COMMAND	# as fast as the machine is
#
# It needs Linux, root, and iproute2. It shows the output of process 0 and the errors of process 1.
set -euo pipefail
[ $# -ge 2 ] || {
	echo "usage: $0 RATE COMMAND..." >&2
	exit 2
}
rate=$1
shift
name=tutti-$$
remove() { # the cable ends with the namespaces
	for host in 0 1; do ip netns delete "$name-$host" 2>/dev/null || true; done
}
trap remove EXIT
trap 'exit 143' TERM # or bash ends without the above
trap 'exit 130' INT
for host in 0 1; do
	ip netns add "$name-$host"
	ip -n "$name-$host" link set lo up
done
ip -n "$name-0" link add eth0 type veth peer name eth0 netns "$name-1"
for host in 0 1; do
	ip -n "$name-$host" address add "10.78.0.$((host + 1))/24" dev eth0
	ip -n "$name-$host" link set eth0 up
	[ "$rate" = 0 ] || tc -n "$name-$host" qdisc add dev eth0 root tbf rate "$rate" burst 4mb latency 50ms
done
# NCCL ignores an interface that is up but not running yet, and the kernel may report that a second late.
for host in 0 1; do
	for ((tries = 0; tries < 200; tries++)); do
		[[ $(ip -n "$name-$host" -oneline link show dev eth0) == *'state UP'* ]] && continue 2
		sleep 0.05
	done
	echo "$0: the end of the cable on host $host does not run" >&2
	exit 1
done
export WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.78.0.1 MASTER_PORT=29500
export NCCL_SOCKET_IFNAME=eth0 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0
export TUTTI_SECRET=${TUTTI_SECRET:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}"
[ "${#gpus[@]}" -gt 0 ] || gpus=(0)
on() { # HOST COMMAND...
	local host=$1
	shift
	RANK=$host NCCL_HOSTID=$name-$host CUDA_VISIBLE_DEVICES=${gpus[$((host % ${#gpus[@]}))]} ip netns exec "$name-$host" "$@"
}
on 1 "$@" >/dev/null &
other=$!
status=0
on 0 "$@" || status=$?
wait "$other" || status=$?
exit "$status"
