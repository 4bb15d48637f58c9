"""What a user of PyTorch has, one process a GPU: allreduces, and averages of the largest 1 % with error feedback.

Prints what lab scoreboard reads, a line of JSON for each median of the GPU's time of a call.
"""
import json
import statistics
import sys

import torch
import torch.distributed as dist

mode = sys.argv[1]  # eager, or graph
allreduces, gradients = (json.loads(a) for a in sys.argv[2:4])  # sizes in bytes
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)


def microseconds(call, calls, rounds=7):
    """Of calls that are queued one after the other, the slowest rank, the median over rounds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        run = lambda: [call() for _ in range(calls)]
        if mode == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                run()
            run = graph.replay
        times = []
        for i in range(rounds + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.barrier()
            begin.record(stream)
            run()
            end.record(stream)
            end.synchronize()
            if i > 0:  # the first one loads graphs
                times.append(begin.elapsed_time(end) * 1e3 / calls)
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def say(**line):
    if rank == 0:
        print(json.dumps(line), flush=True)


def calls(nbytes):
    return 20 if nbytes <= 16 << 20 else 4


for nbytes in allreduces:
    x = torch.randn(nbytes // 4, device="cuda")
    # An average stays what it is, call after call.
    say(bytes=nbytes, place="in-place", time_us=microseconds(lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG), calls(nbytes)))

for nbytes in gradients:
    n = nbytes // 4
    k = n // 100
    gradient = torch.randn(n, device="cuda")
    residual, average = torch.zeros_like(gradient), torch.zeros_like(gradient)
    values = torch.empty(size * k, device="cuda")
    indices = torch.empty(size * k, device="cuda", dtype=torch.int64)

    def dense():
        dist.all_reduce(average, op=dist.ReduceOp.AVG)

    def largest():
        residual.add_(gradient)
        own = torch.topk(residual.abs(), k, sorted=False).indices
        sent = residual[own]
        residual[own] = 0
        dist.all_gather_into_tensor(values, sent)
        dist.all_gather_into_tensor(indices, own)
        average.zero_()
        average.index_add_(0, indices, values)
        average.div_(size)

    say(bytes=nbytes, pattern="dense", values="f32", time_us=microseconds(dense, calls(nbytes)))
    if mode == "eager":
        say(bytes=nbytes, pattern="topkA", values="f32", time_us=microseconds(largest, 4))
dist.destroy_process_group()
