"""Predicts time, traffic and start-up of a run on many GPUs from a few published figures.

Symbols (docs/scaling.md): Psi parameters, N ranks, S ranks that share one copy (N, or ``shard_size``), A micro-batches
per optimizer step, p and g bytes of a gathered parameter and of a reduced gradient. All results are lower bounds:
perfect overlap, plus what cannot overlap. None is a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_zero.host import files_of_a_run

STATE_BYTES_PER_PARAMETER = 12
"""fp32 master weights and Adam's two moments (Rajbhandari et al. 2020, section 3.1)."""
FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Forward 2, backward 4 (Kaplan et al. 2020, section 2.1)."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Capabilities of a GPU and its links; the defaults are an 8-GPU H100 host with one 400 Gbit/s adapter per GPU."""

    gpus_per_node: int = 8
    flops_per_second: float = 495e12
    """Half of the 989.4e12 dense bf16 FLOP/s of the H100 SXM datasheet: what good training reaches."""
    node_bytes_per_second: float = 450e9
    """One direction of NVLink 4: 900 GB/s both ways (H100 datasheet)."""
    network_bytes_per_second: float = 50e9
    """One direction of one 400 Gbit/s InfiniBand NDR adapter (ConnectX-7 datasheet)."""
    node_latency_seconds: float = 3.4e-6
    """One hop of a ring over NVLink: NCCL's own model, ``hwLat`` in ``src/graph/tuning.cc`` (NVLINK, Ring, Simple)."""
    network_latency_seconds: float = 14e-6
    """One hop of a ring over the network, from the same table (NET, Ring, Simple)."""
    storage_bytes_per_second_per_node: float = 2e9
    """Write bandwidth of one host to a parallel file system; an assumption, replace it by your own measurement."""
    storage_bytes_per_second: float = 100e9
    """Write bandwidth of the entire file system; an assumption as well."""
    connect_seconds_per_rank: float = 1e-3
    """One rank's registration with the store that rank 0 keeps (one TCP round trip and one thread): an assumption."""
    host_latency_seconds: float = 25e-6
    """One small message between two hosts' CPUs over TCP: an assumption."""
    import_seconds: float = 10.0
    """Starting Python and importing torch and lightning: an assumption, minutes on a cold network file system."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value!r}: use a number above 0.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train one model."""

    parameters: float
    """Psi, elements."""
    num_layers: int
    """Units that are gathered one after the other."""
    gpus: int
    """N."""
    stage: int = 3
    """ZeRO stage; 0 is DDP."""
    shard_size: int | None = None
    """S; ``None`` is all ranks."""
    tokens_per_gpu: float = 8192
    """Tokens of one micro-batch on one GPU."""
    micro_batches: int = 1
    """A."""
    param_bytes: int = 2
    """p."""
    grad_bytes: int = 2
    """g."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage={self.stage!r}: use 0 (DDP), 1, 2 or 3.")
        if self.shard_size is not None and (self.shard_size < 1 or self.gpus % self.shard_size):
            raise ValueError(f"shard_size={self.shard_size!r}: use a divisor of gpus={self.gpus}.")

    @property
    def shards(self) -> int:
        """S."""
        return self.shard_size or self.gpus


def sent_bytes(run: Run) -> dict[str, float]:
    """Bytes that one rank sends per optimizer step, by axis: ``shard`` (gathers, reduce-scatters), ``replicate``.

    A ring sends ``(n - 1) / n`` of the data for a gather or a reduce-scatter over n ranks, twice that for an all-reduce
    (Patarasuk and Yuan 2009). Stage 1 and 2 gather once and scatter once or A times, stage 3 gathers 2A times
    (Rajbhandari et al. 2020, section 7); replicas all-reduce their shards of gradients once per reduction.
    """
    psi, a, p, g = run.parameters, run.micro_batches, run.param_bytes, run.grad_bytes
    if run.stage == 0:
        return {"shard": 0.0, "replicate": 2 * g * psi * (run.gpus - 1) / run.gpus}
    gathers = {1: 1, 2: 1, 3: 2 * a}[run.stage]
    reductions = 1 if run.stage == 1 else a
    along = (gathers * p + reductions * g) * psi * (run.shards - 1) / run.shards
    replicas = run.gpus // run.shards
    across = reductions * 2 * g * psi / run.shards * (replicas - 1) / replicas
    return {"shard": along, "replicate": across}


def messages(run: Run) -> dict[str, int]:
    """Collectives per optimizer step, by axis."""
    units, a = run.num_layers, run.micro_batches
    if run.stage == 0:
        return {"shard": 0, "replicate": units}
    gathers = units * (2 * a if run.stage == 3 else 1)
    reductions = units * (1 if run.stage == 1 else a)
    return {"shard": gathers + reductions, "replicate": reductions if run.gpus > run.shards else 0}


def _ranks_per_node(ranks: int, stride: int, cluster: Cluster) -> int:
    """Number of ranks on one host, of ``ranks`` ranks that are ``stride`` apart."""
    return max(1, min(ranks, cluster.gpus_per_node // stride))


def _bandwidth(ranks: int, stride: int, cluster: Cluster) -> float:
    """Bytes per second of one rank in a ring: across hosts it runs over the adapters of all its ranks at once (NCCL
    makes one ring for each), so what limits is the smaller of NVLink and their sum."""
    local = _ranks_per_node(ranks, stride, cluster)
    if local == ranks:
        return cluster.node_bytes_per_second
    return min(cluster.node_bytes_per_second, local * cluster.network_bytes_per_second)


def communication_seconds(run: Run, cluster: Cluster) -> float:
    """Bytes over bandwidth plus hops times latency, both axes, one after the other.

    A ring over n ranks takes n - 1 hops (2(n - 1) for an all-reduce). NCCL's trees take fewer for small messages, so
    the latency part is an upper bound from a few hundred ranks on. A ring across hosts pays the network once per host
    and NVLink for its other hops.
    """
    sent, count = sent_bytes(run), messages(run)
    total = 0.0
    for axis, ranks, stride in (
        ("shard", run.shards if run.stage else 1, 1),
        ("replicate", run.gpus // run.shards if run.stage else run.gpus, run.shards if run.stage else 1),
    ):
        if ranks < 2:
            continue
        across = math.ceil(ranks / _ranks_per_node(ranks, stride, cluster))
        hops = (ranks - across) * cluster.node_latency_seconds
        hops += across * (cluster.network_latency_seconds if across > 1 else cluster.node_latency_seconds)
        latency = count[axis] * hops * (2 if axis == "replicate" else 1)
        total += sent[axis] / _bandwidth(ranks, stride, cluster) + latency
    return total


def compute_seconds(run: Run, cluster: Cluster) -> float:
    """``6 Psi`` FLOP per token."""
    tokens = run.tokens_per_gpu * run.micro_batches
    return FLOPS_PER_PARAMETER_AND_TOKEN * run.parameters * tokens / cluster.flops_per_second


def step_seconds(run: Run, cluster: Cluster) -> float:
    """The longer of computing and communicating, plus the first gather and the last reduction, which nothing hides."""
    communicating = communication_seconds(run, cluster)
    exposed = communicating / max(1, sum(messages(run).values())) * 2 if run.stage else 0.0
    return max(compute_seconds(run, cluster), communicating) + exposed


def state_bytes_per_gpu(run: Run) -> float:
    """Parameters, gradients and optimizer states between steps (Rajbhandari et al. 2020, figure 1)."""
    psi, s = run.parameters, run.shards
    kept = run.param_bytes + run.grad_bytes + STATE_BYTES_PER_PARAMETER
    full = {0: kept, 1: run.param_bytes + run.grad_bytes, 2: run.param_bytes, 3: 0}[run.stage]
    return psi * (full + (kept - full) / s)


def best_shard_size(run: Run, cluster: Cluster, memory_bytes: float) -> int | None:
    """The ``shard_size``, in whole hosts, of the shortest step whose states fit into ``memory_bytes`` per GPU; ``None``
    if none does."""
    sizes = [s for s in range(cluster.gpus_per_node, run.gpus + 1, cluster.gpus_per_node) if run.gpus % s == 0]
    fitting = [s for s in sizes if state_bytes_per_gpu(_with_size(run, s)) <= memory_bytes]
    return min(fitting, key=lambda s: (step_seconds(_with_size(run, s), cluster), s), default=None)


def _with_size(run: Run, shard_size: int) -> Run:
    return Run(**{**vars(run), "shard_size": shard_size})


def checkpoint_seconds(run: Run, cluster: Cluster, sharded: bool) -> float:
    """Writing parameters and optimizer states: by all hosts at once, or whole by rank 0's host alone."""
    size = run.parameters * STATE_BYTES_PER_PARAMETER
    nodes = math.ceil(run.gpus / cluster.gpus_per_node) if sharded else 1
    return size / min(nodes * cluster.storage_bytes_per_second_per_node, cluster.storage_bytes_per_second)


def start_seconds(run: Run, cluster: Cluster) -> float:
    """Imports, then each rank's registration at one store, then rank 0's weights to everybody.

    The broadcast goes over a ring in fp32: ``4 Psi`` bytes at the slowest link.
    """
    broadcast = 4 * run.parameters / _bandwidth(run.gpus, 1, cluster)
    return cluster.import_seconds + run.gpus * cluster.connect_seconds_per_rank + broadcast


def tokens_that_hide_the_traffic(run: Run, cluster: Cluster) -> float:
    """Tokens per GPU and micro-batch from which computing takes longer than communicating."""
    per_token = FLOPS_PER_PARAMETER_AND_TOKEN * run.parameters / cluster.flops_per_second
    return communication_seconds(run, cluster) / run.micro_batches / per_token


def host_sockets(ranks: int, rank: int, strategy: str = "zero3", shard_size: int | None = None) -> int:
    """Number of sockets of one CPU rank's process during a run, fitted to the measured table of docs/scaling.md.

    There are ``3 log2(N) + 2`` for the tree of the agreements and the start of a run, one to the store for reads by one
    rank alone, and one to each rank. Rank 0 serves the store, with two to each rank. DDP has two groups. HSDP adds a
    listener for each of two more groups, the connections inside a group of ``shard_size`` and its tree, and the
    neighbours in gloo's ring of replicas.
    """
    if strategy == "ddp":
        return 2 * ranks + 2
    of_groups = 0
    if shard_size is not None:
        of_groups = 2 + shard_size - 1 + tree_levels(shard_size) + min(ranks // shard_size - 1, 2)
    of_store = 2 * ranks if rank == 0 else 0
    return 3 * tree_levels(ranks) + 3 + ranks + of_store + of_groups


def accelerator_sockets(ranks: int, communicators: int = 1) -> int:
    """Number of host sockets of one accelerator rank's process, if data uses NVLink and InfiniBand. The store of
    torch.distributed, in rank 0 or in torchrun's agent, has two more for each rank.

    There are two to the store, one gloo listener for each of two groups (the default group and the agreements'), two
    neighbours in the ring of the default group (norms of offloaded gradients), and the agreements' tree. Each NCCL
    communicator adds, assumed from its design: the two neighbours of its bootstrap ring, three listeners, and
        connections
    in both directions between each rank's proxy and each rank of its host, at most 8.
    """
    return 2 + 2 + 2 + tree_levels(ranks) + communicators * (5 + 2 * 8)


def tree_levels(ranks: int) -> int:
    """The binomial tree of the agreements: most connections of a rank, and hops of half a round."""
    return (ranks - 1).bit_length()


HOST_THREADS, HOST_THREADS_OF_GROUPS = 10, 16
"""Threads of one CPU rank's process during a run, for any number of ranks; the second with HSDP. From the same
table."""


def host_agreement_seconds(ranks: int, cluster: Cluster) -> float:
    """One round of small messages between hosts' CPUs, up and down the tree (``lightning_zero/comm/tree.py``): the step
    sync before each batch, or a checkpoint's agreement."""
    return 2 * tree_levels(ranks) * cluster.host_latency_seconds


def host_messages(ranks: int) -> int:
    """The most that a rank sends in a round, rank 0: to each of its children. On average a rank sends two."""
    return tree_levels(ranks)


RANKS_PER_HOST = 8
SIZES = (8, 64, 512, 4096)
"""GPUs of the tables."""


def tables(cluster: Cluster | None = None) -> str:
    """The tables of docs/scaling.md as Markdown."""
    cluster = cluster or Cluster()
    models = {"7 B": (7e9, 32), "70 B": (70e9, 80)}
    parts = []
    for name, (parameters, layers) in models.items():

        def run(gpus: int, shard_size: int | None = None, p: float = parameters, n: int = layers) -> Run:
            return Run(parameters=p, num_layers=n, gpus=gpus, shard_size=shard_size)

        parts.append(f"### {name} parameters, stage 3, {Run.tokens_per_gpu} tokens per GPU and step\n")
        parts.append(_table(run, cluster))
    parts.append("### On the host, any model\n")
    parts.append(_host_table(cluster))
    return "\n".join(parts)


def _host_table(cluster: Cluster) -> str:
    return _lines(
        [
            ("sockets of rank 0, CPU ranks", lambda n: f"{host_sockets(n, 0):,}"),
            ("– of the others", lambda n: f"{host_sockets(n, 1):,}"),
            (
                f"– with HSDP in groups of {RANKS_PER_HOST}: rank 0; others",
                lambda n: (
                    "; ".join(f"{host_sockets(n, rank, 'zero3', RANKS_PER_HOST):,}" for rank in (0, 1))
                    if n > RANKS_PER_HOST
                    else "–"
                ),
            ),
            ("– of each, DDP", lambda n: f"{host_sockets(n, 0, 'ddp'):,}"),
            ("– of each, accelerators; with HSDP", lambda n: f"{accelerator_sockets(n)}; {accelerator_sockets(n, 2)}"),
            ("– the store beside them, in rank 0 or torchrun's agent", lambda n: f"{2 * n:,}"),
            ("open files that a start asks the system for", lambda n: f"{files_of_a_run(n):,}"),
            ("threads, CPU ranks; with HSDP", lambda n: f"{HOST_THREADS}; {HOST_THREADS_OF_GROUPS}"),
            ("registration at the store, s", lambda n: f"{n * cluster.connect_seconds_per_rank:.2f}"),
            (
                "step sync (beside the forward) or a checkpoint's agreement, ms",
                lambda n: f"{host_agreement_seconds(n, cluster) * 1e3:.1f}",
            ),
            ("– messages that a rank sends in it: the most", lambda n: f"{host_messages(n)}"),
        ],
        "ranks",
    )


def _table(run: Callable[..., Run], cluster: Cluster) -> str:
    return _lines(
        [
            ("sent per GPU and step, GB", lambda n: f"{sum(sent_bytes(run(n)).values()) / 1e9:.0f}"),
            ("– by each adapter, GB/s of the step", lambda n: f"{_network_rate(run(n), cluster) / 1e9:.0f}"),
            ("computing, s", lambda n: f"{compute_seconds(run(n), cluster):.2f}"),
            ("communicating, all ranks sharing, s", lambda n: f"{communication_seconds(run(n), cluster):.2f}"),
            ("step, all ranks sharing, s", lambda n: f"{step_seconds(run(n), cluster):.2f}"),
            ("shortest step's `shard_size` in 60 GB", lambda n: str(best_shard_size(run(n), cluster, 60e9) or "–")),
            ("step with it, s", lambda n: _best_step(run, n, cluster)),
            ("states per GPU, all ranks sharing, GB", lambda n: f"{state_bytes_per_gpu(run(n)) / 1e9:.2f}"),
            ("start-up, s", lambda n: f"{start_seconds(run(n), cluster):.0f}"),
            ("checkpoint, sharded, s", lambda n: f"{checkpoint_seconds(run(n), cluster, True):.0f}"),
            ("checkpoint, one whole file, s", lambda n: f"{checkpoint_seconds(run(n), cluster, False):.0f}"),
        ]
    )


def _lines(rows: list[tuple[str, Callable[[int], str]]], heading: str = "GPUs") -> str:
    lines = [f"| {heading} | " + " | ".join(f"{n:,}" for n in SIZES) + " |", "|---|" + "---|" * len(SIZES)]
    lines += [f"| {text} | " + " | ".join(cell(n) for n in SIZES) + " |" for text, cell in rows]
    return "\n".join(lines) + "\n"


def _network_rate(run: Run, cluster: Cluster) -> float:
    local = _ranks_per_node(run.shards, 1, cluster)
    return sent_bytes(run)["shard"] / local / step_seconds(run, cluster) if run.shards > local else 0.0


def _best_step(run: Callable[..., Run], gpus: int, cluster: Cluster) -> str:
    size = best_shard_size(run(gpus), cluster, 60e9)
    return "–" if size is None else f"{step_seconds(run(gpus, size), cluster):.2f}"


if __name__ == "__main__":
    print(tables())
