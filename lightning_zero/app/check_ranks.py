"""The ranks' side of ``lightning-zero check``: ``python -m lightning_zero.app.check_ranks PART JOB``.

A job is the world of ranks that runs one part of the check. Each part yields the lines of the report; rank 0 prints
each as soon as it is known, so that a later crash does not lose it. :mod:`lightning_zero.app.check` describes the
parts, starts them, reads their output and makes the report.

A single GPU is shared by two ranks over gloo. On CUDA tensors gloo lacks some collectives and the mean, so
:func:`stage_through_host` moves these through host memory. Values and memory are right then, but times are not, so
``fast`` uses one rank and NCCL.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_zero.callbacks import ZeroMonitor
from lightning_zero.callbacks.zero_monitor import of_every_rank
from lightning_zero.launch.launcher import LaunchedDDP
from lightning_zero.private.torch import functional_collectives as functional
from lightning_zero.recipes.gpt import GPT
from lightning_zero.strategy import ZeroStrategy

FP32 = "32-true"
STAGES = ("zero1", "zero2", "zero3")
MICRO_BATCHES, HALF = 12, 6
ACCUMULATE = 2
CLIP = 1.0
WARMUP_STEPS, TIMED_STEPS, ROUNDS = 2, 6, 3
RAISES_AT_STEP = 2
ON_PURPOSE = "raised on purpose by lightning-zero check"
LINE = "line of lightning-zero check: "
"""What precedes a line in the output of a part."""
TIMEOUT_SECONDS = 60.0
"""Timeout of a collective."""
MIB = 2**20
FULL_TOLERANCES = 1e-4, 1e-3
"""In full precision. Losses: largest relative difference. Weights: norm of the difference over the norm of the change
since initialization. Sums over ranks round in another order (1e-7), which AdamW amplifies if gradients are near 0."""
LOW_TOLERANCES = 3e-2, 0.2
"""In low precision. Each gather rounds the sharded weights once, and their gradients are rounded as well. Autocast
rounds weights in each operator and keeps gradients in fp32. A missing reduction makes a larger difference."""
TOLERANCES = dict.fromkeys(("parameters", "gradients", "optimizer", "sent per step"), (0.02, 1024))
"""Kind of bytes -> relative and absolute difference from the plan, which does not count the ranks' agreements."""
TOLERANCES["memory peak"] = 0.1, 64 * MIB
"""cuBLAS keeps workspaces (32 MiB on Hopper), and the allocator rounds blocks up."""
BOUNDS = {"ddp": 3.0, "fully_shard": 2.0}
"""Upper bounds of a stage's step time over that of each reference. They should find a mistake, not a slow network."""
SLACK_SECONDS = {"cpu": 0.02, "gpu": 0.002}
"""Allowed in addition: the step of a tiny module is mostly Python, and CPUs are shared with other programs."""
SMALL = {"num_layers": 4, "width": 128, "vocab_size": 1024, "block_size": 64}
LARGE_ON_GPU = {"num_layers": 8, "width": 1024, "vocab_size": 8192, "block_size": 512}
BATCH_SIZE = 4

Line = tuple[str, bool | None, str]
"""What is checked, whether it passes (``None``: it cannot be checked here), and the figures."""


class Example(GPT):
    """The recipe's GPT without metrics."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # (B, T + 1)
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class RawFullyShard(LaunchedDDP):
    """PyTorch's ``fully_shard`` as in its tutorial: applied to each block of the example, then to the root."""

    def configure_ddp(self) -> None:
        module: Any = self.lightning_module
        is_low = self.precision_plugin.precision == "bf16-mixed"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if is_low else None
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for each in (*module.blocks, module):
            fully_shard(each, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
        register_fsdp_forward_method(module, "training_step")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The world of ranks that runs a part of the check."""

    folder: str
    """Folder for results and checkpoints, which all ranks can see."""
    accelerator: str
    devices: int
    """Ranks on each host."""
    num_nodes: int
    precision: str
    settings: Mapping[str, Any]
    """Keyword arguments of ``ZeroStrategy`` except the stage."""
    own: bool
    """Whether ``module.pt`` in the folder holds the user's module and data."""
    shares_gpu: bool
    """Whether two ranks share the only GPU."""

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes

    def strategy(self, name: str) -> Any:
        """Returns a new strategy: ``ddp``, ``fully_shard`` or one of ``STAGES``."""
        shared: dict[str, Any] = {}
        if self.shares_gpu:
            shared["parallel_devices"] = [torch.device("cuda", 0)] * self.devices
            shared["process_group_backend"] = "cpu:gloo,cuda:gloo"
        if name not in STAGES:
            kind = LaunchedDDP if name == "ddp" else RawFullyShard
            return kind(find_unused_parameters=self.own, **shared)
        # The example's blocks are small on CPUs, but each must be a unit
        units = {} if self.own else {"min_unit_numel": 1}
        settings: dict[str, Any] = {"timeout_seconds": TIMEOUT_SECONDS, **units, **self.settings}
        return ZeroStrategy(int(name[-1]), **settings, **shared)  # type: ignore[arg-type]

    def trainer(
        self, strategy: str, callback: Any, precision: str, num_batches: int = MICRO_BATCHES, **options: Any
    ) -> Trainer:
        return Trainer(
            strategy=self.strategy(strategy),
            accelerator=self.accelerator,
            devices=1 if self.shares_gpu else self.devices,
            num_nodes=self.num_nodes,
            precision=precision,  # type: ignore[arg-type]
            callbacks=[callback],
            max_epochs=1,
            limit_train_batches=num_batches,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.folder,
            **options,
        )

    def module_and_data(self, large: bool = False, num_batches: int = MICRO_BATCHES) -> tuple[Any, Any]:
        """Returns a module with the same weights in each call, and its data, as ``Trainer.fit`` takes them."""
        seed_everything(7, verbose=False)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        if self.own:
            path = Path(self.folder, "module.pt")
            return torch.load(path, map_location="cpu", weights_only=False)  # type: ignore[no-any-return]
        shape = LARGE_ON_GPU if large and self.accelerator == "gpu" else SMALL
        size = num_batches * self.world_size * BATCH_SIZE, shape["block_size"] + 1
        ids = torch.randint(shape["vocab_size"], size, generator=torch.Generator().manual_seed(1))
        return Example(**shape), DataLoader(ids, batch_size=BATCH_SIZE)  # type: ignore[arg-type]


# The engine treats callbacks of this package like Lightning's. User hooks would change what it keeps gathered.


class Watch(Callback):
    """Records losses and times of a fit as this rank sees it. Saves a checkpoint after half of the micro-batches."""

    def __init__(self, checkpoint: str | None = None) -> None:
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self._checkpoint = checkpoint
        self._since = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Dropout must not depend on earlier random numbers, which a resumed run does not draw
        torch.manual_seed(1000 * trainer.global_rank + batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().float())
        if self._checkpoint and batch_idx + 1 == HALF:
            trainer.save_checkpoint(self._checkpoint)
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self._since = now


# -- same ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A fit: each rank's losses, and on rank 0 all weights, so that one copy per host fits."""

    losses: Tensor  # 1D, one per micro-batch
    initial: Tensor  # 1D
    weights: Tensor  # 1D


def same(job: Job) -> Iterator[Line]:
    """Trains under DDP and at each stage, in each precision."""
    for precision in dict.fromkeys((FP32, job.precision)):
        most_loss, most_weights = FULL_TOLERANCES if precision in (FP32, "64-true") else LOW_TOLERANCES
        expected, middle = _train(job, "ddp", precision), str(Path(job.folder, "middle.ckpt"))
        for stage in STAGES:
            run, resumed = _train(job, stage, precision, saves=middle), _train(job, stage, precision, resumes=middle)
            texts, passes = [], True
            for found, losses in ((run, expected.losses), (resumed, expected.losses[HALF:])):
                off = difference(found.losses, losses), distance(found.weights, expected.weights, expected.initial)
                loss, weights = (max(each) for each in zip(*of_every_rank(off), strict=True))
                passes = passes and loss <= most_loss and weights <= most_weights
                texts.append(f"losses off by {loss:.1e}, weights by {weights:.1e}")
            yield f"{stage} {precision}", passes, f"{'; resumed: '.join(texts)} (<= {most_loss:g}, {most_weights:g})"


def _train(job: Job, strategy: str, precision: str, saves: str | None = None, resumes: str | None = None) -> Run:
    module, data = job.module_and_data()
    watch = Watch(saves)
    automatic: dict[str, Any] = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP}
    trainer = job.trainer(strategy, watch, precision, **(automatic if module.automatic_optimization else {}))
    initial = _weights(trainer, module.state_dict())
    trainer.fit(module, data, ckpt_path=resumes, weights_only=False)
    weights = _weights(trainer, trainer.strategy.lightning_module_state_dict())
    return Run(torch.tensor([float(loss) for loss in watch.losses]), initial, weights)


def _weights(trainer: Trainer, state: Mapping[str, Tensor]) -> Tensor:
    """Returns a copy of ``state`` in host memory on rank 0, and nothing on the other ranks."""
    found = [t for _, t in sorted(state.items()) if t.is_floating_point() and trainer.is_global_zero]
    return torch.cat([torch.empty(0), *(t.float().cpu().flatten() for t in found)])


def difference(losses: Tensor, expected: Tensor) -> float:
    """Returns the largest relative difference; a loss that is missing or not finite differs infinitely."""
    if losses.shape != expected.shape:
        return math.inf
    off = ((losses - expected).abs() / expected.abs().clamp(min=1e-6)).nan_to_num(math.inf, math.inf)
    return max(off.tolist(), default=0.0)


def distance(weights: Tensor, expected: Tensor, initial: Tensor) -> float:
    """Returns the norm of the difference over the norm of ``expected - initial``."""
    if weights.shape != expected.shape:
        return math.inf
    off, way = (float((t - expected).norm(dtype=torch.float64)) for t in (weights, initial))
    return off / way if way and math.isfinite(off) else math.inf if off else 0.0


# -- fits ------------------------------------------------------------------------------------------------------------


def fits(job: Job) -> Iterator[Line]:
    """Compares the bytes of each stage with the plan."""
    on_gpu = job.accelerator == "gpu"
    for stage in STAGES:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated() if on_gpu else 0
        monitor = ZeroMonitor(every_n_steps=1)
        module, data = job.module_and_data(large=True)
        trainer = job.trainer(stage, monitor, job.precision)
        trainer.fit(module, data)
        planned, notes = monitor.planned(trainer), monitor.plan.notes if monitor.plan else ()
        if notes or not planned:
            yield stage, None, "; ".join(notes) or "there is no plan"
        else:
            yield stage, *_with_plan(monitor.rows, planned, left)


def _with_plan(rows: Sequence[Mapping[str, float]], planned: Mapping[str, float], left: int) -> tuple[bool, str]:
    """Compares the fullest rank with the plan, which has no peak on CPUs: the interpreter would count."""
    texts, passes = [], True
    for kind, (tolerance, slack) in TOLERANCES.items():
        is_peak = kind == "memory peak"
        if is_peak and "memory peak bytes" not in planned:
            continue
        measured, plan = max(_bytes(row, kind) for row in rows) - (left if is_peak else 0), _bytes(planned, kind)
        is_near = abs(measured - plan) <= tolerance * plan + slack
        passes = passes and is_near
        wrong = "" if is_near else f", not within {tolerance:.0%}"
        texts.append(f"{kind} {measured / MIB:.2f} MiB (plan {plan / MIB:.2f}{wrong})")
    return passes, ", ".join(texts)


def _bytes(row: Mapping[str, float], kind: str) -> float:
    """Returns the bytes of ``kind``; traffic is one sum over the collectives."""
    return sum(value for name, value in row.items() if name == f"{kind} bytes" or name.startswith(f"{kind}: "))


# -- fast ------------------------------------------------------------------------------------------------------------


def fast(job: Job) -> Iterator[Line]:
    """Lets all contenders train a few steps alternately in several rounds, so that a slow minute affects them all."""
    precision = job.precision if job.accelerator == "gpu" or job.own else FP32  # CPUs emulate low precision
    knows_raw = not job.own and precision != "16-mixed"  # the tutorial has no loss scale
    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name in ("ddp", *(["fully_shard"] if knows_raw else []), *STAGES):
            watch = Watch()
            _few_steps(job, name, precision, watch)
            seconds.setdefault(name, []).append(statistics.median(watch.seconds[WARMUP_STEPS:] or watch.seconds))
    exposed: dict[str, float] = {}
    for name in ("ddp", *STAGES) if job.accelerator == "gpu" and job.world_size > 1 else ():
        kernels = Kernels()
        _few_steps(job, name, precision, kernels)
        exposed[name] = exposed_share(kernels.found)
    for stage in STAGES:
        passes, text = _judge_times(stage, seconds, precision, SLACK_SECONDS[job.accelerator])
        if exposed:
            text += f", {exposed[stage]:.0%} of it only communication (ddp {exposed['ddp']:.0%})"
        yield stage, passes, text


def _few_steps(job: Job, name: str, precision: str, callback: Any) -> None:
    steps = WARMUP_STEPS + TIMED_STEPS
    module, data = job.module_and_data(large=True, num_batches=steps)
    job.trainer(name, callback, precision, steps).fit(module, data)


class Kernels(Callback):
    """Records name, start and end of each kernel of this rank's device after the first steps."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, float]] = []
        self._profiler = profile(activities=[ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP_STEPS:
            torch.cuda.synchronize()
            self._profiler.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.synchronize()
        self._profiler.stop()
        for event in self._profiler.events():
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                self.found.append((event.name, event.time_range.start, event.time_range.end))


def exposed_share(kernels: Sequence[tuple[str, float, float]]) -> float:
    """Returns the share of time in which only NCCL's kernels run, waiting for other ranks included. A kernel is a name,
    a start and an end."""
    events = [(at, "nccl" in name, step) for name, start, end in kernels for at, step in ((start, 1), (end, -1))]
    changes = sorted(events)
    running = {True: 0, False: 0}  # whether a kernel communicates -> number of those that run
    alone = 0.0
    for (at, communicates, step), (until, *_) in pairwise(changes):
        running[communicates] += step
        alone += until - at if running[True] and not running[False] else 0.0
    return alone / (changes[-1][0] - changes[0][0]) if changes else 0.0


def _judge_times(stage: str, seconds: Mapping[str, list[float]], precision: str, slack: float) -> tuple[bool, str]:
    """Compares the step time of one stage, the median of its rounds, with those of the references."""
    medians = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    text, passes = f"{1e3 * medians[stage]:.1f} ms a step in {precision}", True
    for other, bound in BOUNDS.items():
        if other in medians:
            passes = passes and medians[stage] <= bound * medians[other] + slack
            text += f", {medians[stage] / medians[other]:.2f} x {other} (<= {bound:g})"
    return passes, text


# -- safe ------------------------------------------------------------------------------------------------------------


class Raise(Callback):
    """Raises on the last rank in the middle of a step, while the other ranks enter the step's collectives."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if trainer.global_step == RAISES_AT_STEP and trainer.global_rank == trainer.world_size - 1:
            raise RuntimeError(f"{ON_PURPOSE} at {time.time():.3f}")


def safe(job: Job) -> Iterator[Line]:
    """Raises on one rank, so no line comes from here: the process that has started the ranks sees how they end."""
    module, data = job.module_and_data()
    job.trainer("zero3", Raise(), FP32).fit(module, data)
    yield from ()


# -- two ranks on one GPU --------------------------------------------------------------------------------------------


def stage_through_host() -> None:
    """Makes the collectives that ``fully_shard`` and ``DTensor`` call go through host memory, in this process."""

    def all_gather(output: Any = None, input: Any = None, *unused: Any, **named: Any) -> None:
        output, input = named.get("output_tensor", output), named.get("input_tensor", input)
        output.view(-1).copy_(torch.cat(_gathered(input)).view(output.dtype))

    def reduce_scatter(output: Any = None, input: Any = None, op: Any = dist.ReduceOp.SUM, **unused: Any) -> None:
        full = input.detach().float().cpu()
        dist.all_reduce(full)
        size = dist.get_world_size()
        full = full / size if op == dist.ReduceOp.AVG else full
        output.view(-1).copy_(full.view(size, -1)[dist.get_rank()])

    def all_gather_tensor(self: Tensor, gather_dim: int = 0, *unused: Any, **named: Any) -> Tensor:
        parts = [part.view(self.dtype).view(self.shape) for part in _gathered(self)]
        return torch.cat(parts, dim=gather_dim).to(self.device)

    for home, replaced in (
        (dist, {"all_gather_into_tensor": all_gather, "all_gather_single": all_gather}),
        (dist, {"reduce_scatter_tensor": reduce_scatter, "reduce_scatter_single": reduce_scatter}),
        (functional, {"all_gather_tensor": all_gather_tensor, "all_gather_single": all_gather_tensor}),
    ):
        for name, function in replaced.items():
            if hasattr(home, name):
                setattr(home, name, function)


def _gathered(t: Tensor) -> list[Tensor]:
    """Returns the tensors of all ranks as bytes, 1D, in host memory."""
    mine = t.detach().cpu().contiguous().view(-1).view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return parts


# -- a process -------------------------------------------------------------------------------------------------------


PARTS = {"same": same, "fits": fits, "fast": fast, "safe": safe}


def command(part: str, job: Job) -> list[str]:
    """Returns the command that starts a part on this host."""
    return [sys.executable, "-m", "lightning_zero.app.check_ranks", part, json.dumps(asdict(job))]


def main() -> None:
    part, job = sys.argv[1], Job(**json.loads(sys.argv[2]))
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if job.shares_gpu:
        stage_through_host()
    for line in PARTS[part](job):
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{LINE}{json.dumps(line)}", flush=True)


if __name__ == "__main__":
    from lightning_zero.app import check_ranks  # the engine takes callbacks in __main__ for a user's

    check_ranks.main()
