"""Times one agreement of all ranks in several implementations, in microseconds.

    python benchmarks/agreements.py                  # 2, 4, 8, 16, 32 ranks on this machine
    python benchmarks/agreements.py --ranks 16

Ranks are forked after importing and outnumber the cores, so compare times only within a row. Columns with "peers" use
the connections of ``comm.peer_memory``, as ranks of one host do. The others use gloo's sockets, as ranks of several
hosts do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.comm.agree import IN_STEP, Agreement
from lightning_zero.comm.peer_memory import PeerMemory

RANKS = (2, 4, 8, 16, 32)
ROUNDS, CALLS = 7, 30


def _gather_and_broadcast(message: torch.Tensor, group: Any) -> None:
    """Gloo's own gather and broadcast, another way to avoid the ring."""
    all_of_them = [torch.empty_like(message) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(message, all_of_them, group_dst=0, group=group)
    if all_of_them is not None:
        torch.amax(torch.stack(all_of_them), 0, out=message)
    dist.broadcast(message, group_src=0, group=group)


def _ways(near: PeerMemory) -> dict[str, Callable[[], Any]]:
    group: Any = dist.group.WORLD
    message = torch.tensor([group.rank(), 1, 2])
    everyones: list[Any] = [None] * group.size()
    agreement = Agreement(60.0)
    return {
        "gloo's ring": lambda: dist.all_reduce(message, dist.ReduceOp.MAX),
        "gloo's gather and broadcast": lambda: _gather_and_broadcast(message, group),
        "tree": lambda: agreement.all_reduce(message, dist.ReduceOp.MAX, IN_STEP).wait(),
        "tree, peers": lambda: agreement.all_reduce(message, dist.ReduceOp.MAX, IN_STEP, near).wait(),
        "gloo's all_gather_object": lambda: dist.all_gather_object(everyones, None),
        "tree, any object": lambda: agreement.gather(None),
    }


def _rank(rank: int, ranks: int, store: str, results: Connection) -> None:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    ways = _ways(PeerMemory(dist.group.WORLD, 60.0))  # type: ignore[arg-type]
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS):
        for name, way in ways.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(CALLS if round_ else 2):
                way()
            if round_:  # the first one connects
                seen[name].append((time.perf_counter() - begun) / CALLS * 1e6)
    dist.barrier()
    if rank == 0:
        results.send({name: statistics.median(each) for name, each in seen.items()})
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int) -> dict[str, float]:
    """Microseconds per call, as the median of rank 0's rounds."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        each = [context.Process(target=_rank, args=(r, ranks, f"{folder}/store", sender)) for r in range(ranks)]
        for process in each:
            process.start()
        found: dict[str, float] = receiver.recv() if receiver.poll(300) else {}
        for process in each:
            process.join(30)
            if process.is_alive():
                process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    heading = None
    for ranks in parser.parse_args().ranks:
        found = measure(ranks)
        if heading is None:
            heading = f"| ranks | {' | '.join(found)} |"
            print(heading + "\n|" + "---|" * (len(found) + 1), flush=True)
        print(f"| {ranks} | " + " | ".join(f"{value:.0f}" for value in found.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
