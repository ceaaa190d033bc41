"""Compares the speed of CPU offload: our strategies, raw ``CPUOffloadPolicy``, DeepSpeed's own offload, and the limit.

    python benchmarks/offload_speed.py --shape gpt-1b --steps 10 --rounds 3     # one GPU; writes benchmarks/results/
    python benchmarks/offload_speed.py --shape tiny --steps 2 --rounds 1        # the same without one, in seconds

Every contender trains the same GPT in bf16 with fp32 master weights from the same seed. Each run is a separate process,
and rounds interleave the contenders. The plan gives the bytes that must cross PCIe, and the measured bandwidth of
pinned copies gives the least time for them. ZeRO-Offload's own minimum is 2 bytes per parameter each way
(arXiv:2101.06840, section 4). A Chrome trace of our last steps shows which copies overlapped with kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import contenders
from benchmarks.contenders import SHAPES, WARMUP_STEPS, Job, Shape

RESULTS = Path(__file__).parent / "results"
SHAPES |= {
    "gpt-1b": Shape(num_layers=24, width=1792, num_heads=14, vocab_size=32_000, batch_size=8, length=1024),
    "gpt-7b": Shape(num_layers=32, width=4096, num_heads=32, vocab_size=32_000, batch_size=4, length=1024),
}
COPY_BYTES = 256 * 2**20


# -- contenders ----------------------------------------------------------------------------------------------------


def _raw(job: Job, reshard_after_forward: bool) -> None:
    """``fully_shard(offload_policy=CPUOffloadPolicy())`` in the plainest loop, with PyTorch's fused CPU AdamW."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    contenders._join(job)
    model = job.model()
    contenders._shard(
        model,
        reshard_after_forward,
        mesh=init_device_mesh(job.device, (job.ranks,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=job.device != "cpu"),
    )
    contenders._train(job, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def _deepspeed(job: Job, stage: int) -> None:
    """``deepspeed.initialize`` with its CPU offload and, beside a GPU, its CPU Adam, which takes a while to compile."""
    moved = {"device": "cpu", "pin_memory": job.device != "cpu"}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": moved, "overlap_comm": True}
    if stage == 3:
        zero["offload_param"] = moved
    config: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": zero}
    if job.device == "cpu":
        config["zero_force_ds_cpu_optimizer"] = False
        make_optimizer = job.optimizer
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        make_optimizer = partial(DeepSpeedCPUAdam, lr=1e-3, weight_decay=1e-2)
    contenders._deepspeed_loop(job, make_optimizer, config)


def _zero(job: Job, **settings: Any) -> None:
    """Our strategy under a Trainer."""
    trace = os.environ.get("OFFLOAD_TRACE")

    def make() -> Any:
        from lightning_zero.strategy import ZeroStrategy

        units = {"units": ["model.blocks.*"]} if settings.get("engine", "fsdp2") == "fsdp2" else {}
        return ZeroStrategy(offload="cpu", after_fit="sharded", **units, **settings)

    with _traced(job, trace) if trace else contextlib.nullcontext():
        contenders._lightning(job, make, precision="bf16-mixed")


@contextlib.contextmanager
def _traced(job: Job, path: str) -> Any:
    """Records from the end of the warm-up to the last step."""
    import torch
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.device == "cuda" else [])]
    profiler = torch.profiler.profile(activities=kinds)
    tick = job.tick

    def tick_and_record(loss: Any) -> None:
        tick(loss)
        if job.ticks == WARMUP_STEPS:
            profiler.start()
        elif job.ticks == WARMUP_STEPS + job.steps:
            profiler.stop()

    job.tick = tick_and_record  # type: ignore[method-assign]
    yield
    profiler.export_chrome_trace(path)


def pcie(job: Job) -> None:
    """Pinned copies alone: the bandwidth that limits everybody. Its "losses" are bytes per second up and down."""
    import torch

    device = torch.device(job.device)
    pinned = job.device != "cpu"
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    speeds = []
    for target, source in ((there, host), (host, there)):
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            target.copy_(source, non_blocking=pinned)
            if pinned:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        speeds.append(COPY_BYTES / min(seconds))
    for speed in [speeds[0], speeds[1], *[0.0] * (job.steps + WARMUP_STEPS - 2)]:
        job.tick(torch.tensor(speed))


OURS = "zero2_offload"
CONTENDERS: dict[str, tuple[str, Callable[[Job], None]]] = {
    "raw-2": ("fully_shard, CPUOffloadPolicy, reshard_after_forward=False", lambda job: _raw(job, False)),
    "raw-3": ("fully_shard, CPUOffloadPolicy", lambda job: _raw(job, True)),
    "deepspeed-2": ("DeepSpeed, stage 2, optimizer offload", lambda job: _deepspeed(job, 2)),
    "deepspeed-3": ("DeepSpeed, stage 3, optimizer and parameter offload", lambda job: _deepspeed(job, 3)),
    OURS: ("**lightning_zero, zero2_offload**", lambda job: _zero(job, stage=2)),
    "zero3_offload": ("**lightning_zero, zero3_offload**", lambda job: _zero(job, stage=3)),
    "zero2_offload_deepspeed": (
        "**lightning_zero, zero2_offload_deepspeed**",
        lambda job: _zero(job, stage=2, engine="deepspeed"),
    ),
}


def _with_all_cores(run_it: Callable[[Job], None], job: Job) -> None:
    """The step is the CPU's, so it gets every core; the other benchmarks count on one."""
    import torch

    torch.set_num_threads(max((os.cpu_count() or 1) // job.ranks, 1))
    run_it(job)


contenders.CONTENDERS |= {
    f"offload:{name}": (text, partial(_with_all_cores, run_it)) for name, (text, run_it) in CONTENDERS.items()
}
contenders.CONTENDERS["offload:pcie"] = ("pinned copies alone", pcie)


# -- what has to cross PCIe -------------------------------------------------------------------------------------------


def planned(shape: str, ranks: int, accumulate: int) -> dict[str, dict[str, float]]:
    """Bytes that our strategies copy per step, and ZeRO-Offload's floor for the same module."""
    import torch
    from lightning.pytorch import LightningModule

    from lightning_zero import ZeroConfig, plan

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = contenders.make_model(SHAPES[shape])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    with torch.device("meta"):
        module = Module()
    made = plan(
        module,
        world_size=ranks,
        device="cuda",
        precision="bf16-mixed",
        micro_batches=accumulate,
        config=ZeroConfig(units=["model.blocks.*"]),
    )
    floor = 4.0 * made.num_parameters / ranks
    rows = (made.row("zero2_offload"), 1), (made.row("zero3_offload"), 2)  # gathers of each shard per step
    return {
        row.name: {"pcie_bytes": gathers * row.parameters + row.gradients, "floor_bytes": floor}
        for row, gathers in rows
    }


# -- the run ---------------------------------------------------------------------------------------------------------


def run(shape: str, names: list[str], steps: int, rounds: int, ranks: int, trace: str | None) -> dict[str, Any]:
    """Step times of every contender over all rounds, interleaved; losses of the first."""
    launch = partial(contenders.launch, script=__file__)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, Any] = {}
    for index in range(rounds):
        for name in names:
            job = Job(contender=f"offload:{name}", shape=shape, ranks=ranks, steps=steps)
            results = launch(job, timeout_seconds=3600)
            seconds[name] += [max(each) for each in zip(*(r["seconds"] for r in results), strict=True)]
            if not index:
                found[name] = {"losses": results[0]["losses"], "peak_device_bytes": results[0]["peak_bytes"]}
            print(f"round {index + 1}: {name} {statistics.median(seconds[name]):.4g} s", file=sys.stderr, flush=True)
    for name in names:
        values = sorted(seconds[name])
        found[name] |= {"median_seconds": statistics.median(values), "spread_seconds": values[-1] - values[0]}
    up, down, *_ = launch(Job(contender="offload:pcie", ranks=1, steps=2), timeout_seconds=600)[0]["losses"]
    for name, bytes_ in planned(shape, ranks, 1).items():
        if name in found:
            # No schedule moves more at a time than both directions together
            found[name] |= bytes_ | {"pcie_limit_seconds": bytes_["pcie_bytes"] / (up + down)}
    if trace is not None and OURS in names:
        os.environ["OFFLOAD_TRACE"] = os.path.abspath(trace)
        launch(Job(contender=f"offload:{OURS}", shape=shape, ranks=ranks, steps=2), timeout_seconds=3600)
    return {"bytes_per_second": {"up": up, "down": down}, "contenders": found}


def hardware() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "lightning", "deepspeed")}
        | {"cuda": torch.version.cuda},
        "python": platform.python_version(),
    }


def table(found: dict[str, Any]) -> str:
    lines = ["| | seconds per step | spread | over the PCIe limit |", "|---|---|---|---|"]
    for name, each in found["contenders"].items():
        limit = each.get("pcie_limit_seconds")
        over = f"{each['median_seconds'] / limit:.2f}" if limit else "–"
        lines.append(
            f"| {CONTENDERS[name][0]} | {each['median_seconds']:.4g} | {each['spread_seconds']:.2g} | {over} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt-1b")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs")
    parser.add_argument("--trace", help="chrome trace of our run is written here")
    parser.add_argument("--out", type=Path, help="JSON; by default under benchmarks/results/")
    options = parser.parse_args(arguments)
    found = run(options.shape, options.contenders, options.steps, options.rounds, options.ranks, options.trace)
    found |= {"shape": options.shape, "ranks": options.ranks, "hardware": hardware()}
    out = options.out or RESULTS / f"offload-{options.shape}-{options.ranks}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        contenders._run_rank(sys.argv[2])
    else:
        main()
