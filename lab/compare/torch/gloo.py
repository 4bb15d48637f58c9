"""Float32 all_reduce of processes on this machine over gloo, as a user of PyTorch has it.

    gloo.py RANKS SIZES     (bytes, as a list in JSON)

Measured as `tutti bench allreduce` measures: after a barrier as many calls as take about 20 ms, the time of the slowest
rank, the median of seven rounds; in place, as all_reduce is. Prints a line of JSON for each size.
"""
import json
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROUNDS = 7
ROUND_SECONDS = 0.02


def calls(x, count):
    """The seconds that so many calls take on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(x)
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(size):
    x = torch.zeros(max(size // 4, 1))
    count = 2
    took = calls(x, count)
    while took < ROUND_SECONDS / 16 and count < 20000:
        count *= 8
        took = calls(x, count)
    count = min(max(int(count * ROUND_SECONDS / took), 3), 20000)
    return statistics.median(calls(x, count) / count for _ in range(ROUNDS)) * 1e6


def main(rank, ranks, sizes, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for size in sizes:
        took = measure(size)
        if rank == 0:
            print(json.dumps({"bytes": size, "place": "in-place", "time_us": round(took, 3)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    ranks = int(sys.argv[1])
    mp.spawn(main, (ranks, json.loads(sys.argv[2]), free), nprocs=ranks)
