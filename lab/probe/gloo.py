#!/usr/bin/env python3
"""How many results one sum has in PyTorch's gloo: python3 gloo.py [RANKS...]

64 numbers of each rank are summed in messages of 64 to 4 Mi float32, at up to 4 places. With one result the sum of an
element depends neither on the count nor on its place; "chain" is the sum in the order of the ranks, which tutti gives.
mpi.c does the same with MPI_Allreduce, and .ci/bits -probe with tutti's backends.
"""
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WIDTH = 64
LENGTHS = [64, 65, 1000, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20]


def mix(x):
    """splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & (1 << 64) - 1
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & (1 << 64) - 1
    return x ^ x >> 31


def numbers(rank):
    """24 bits each, of 12 magnitudes."""
    hashes = [mix(1000 * rank + i) for i in range(WIDTH)]
    return torch.tensor([((h >> 40) / (1 << 23) - 1) * 2 ** (h % 12) for h in hashes], dtype=torch.float32)


def probe(rank, ranks, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    chain = numbers(0)
    for other in range(1, ranks):
        chain = chain + numbers(other)
    results = {}
    messages = 0
    for n in LENGTHS:
        for place in (0, n // 3 - 20, n // 2, n - WIDTH):
            if place < 0 or place + WIDTH > n:
                continue
            message = torch.zeros(n)
            message[place : place + WIDTH] = numbers(rank)
            dist.all_reduce(message)
            messages += 1
            key = bytes(message[place : place + WIDTH].numpy().tobytes())
            results.setdefault(key, f"{n} elements, at {place}")
    if rank == 0:
        kept = bytes(chain.numpy().tobytes()) in results
        print(f"gloo, torch {torch.__version__}, {ranks} ranks, {messages} messages: {len(results)} results, "
              f"the chain's {'among them' if kept else 'not among them'}")
        for key, where in list(results.items())[:8]:
            print("   first with", where)
    dist.destroy_process_group()


if __name__ == "__main__":
    for i, count in enumerate([int(a) for a in sys.argv[1:]] or [2, 3, 4, 5, 8]):
        mp.spawn(probe, args=(count, 29517 + i), nprocs=count)
