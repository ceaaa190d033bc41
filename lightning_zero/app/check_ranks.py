"""The ranks' side of ``lightning-zero check``: ``python -m lightning_zero.app.check_ranks JOB``.

A job is one part of the check, and the world of ranks that runs it. Each part yields the lines of the report; rank 0
appends each to ``<name>.jsonl`` in the folder of the check as soon as it is known, so that a later crash does not lose
it. :mod:`lightning_zero.app.check` starts jobs and makes the report.

    same   losses and weights of each stage, from the start and from its own checkpoint, against DDP in each precision
    fits   bytes of each stage, measured and planned
    fast   the same step under DDP, raw ``fully_shard`` and each stage, alternately; on several GPUs also the part of a
           step in which the device only communicates
    safe   the last rank raises in the middle of a step

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_zero.callbacks import ZeroMonitor
from lightning_zero.launch.launcher import LaunchedDDP
from lightning_zero.private.torch import functional_collectives as functional
from lightning_zero.recipes.gpt import GPT
from lightning_zero.strategy import ZeroStrategy

FP32 = "32-true"
STAGES = (1, 2, 3)
MICRO_BATCHES = 12
ACCUMULATE = 2
CLIP = 1.0
WARMUP_STEPS, TIMED_STEPS, ROUNDS = 2, 6, 3
RAISES_AT_STEP = 2
ON_PURPOSE = "raised on purpose by lightning-zero check"
TIMEOUT_SECONDS = 60.0
"""Timeout of a collective."""
MIB = 2**20
FULL_TOLERANCES = 1e-4, 1e-3
"""In full precision. Losses: largest relative difference. Weights: norm of the difference over the norm of the change
since initialization. Sums over ranks round in another order (1e-7), which AdamW amplifies if gradients are near 0."""
LOW_TOLERANCES = 3e-2, 0.2
"""In low precision. Each gather rounds the sharded weights once, and their gradients are rounded as well. Autocast
rounds weights in each operator and keeps gradients in fp32. A missing reduction makes a larger difference."""
TOLERANCES = {"parameters": 0.01, "gradients": 0.01, "optimizer": 0.01, "sent per step": 0.02, "peak": 0.1}
"""Relative difference of bytes from the plan, which does not count the ranks' agreements."""
PEAK_SLACK_BYTES = 64 * MIB
"""cuBLAS keeps workspaces (32 MiB on Hopper), and the allocator rounds blocks up."""
BOUNDS = {"ddp": 3.0, "fully_shard": 2.0}
"""Upper bounds of a stage's step time over that of each reference. They should find a mistake, not a slow network."""
SLACK_SECONDS = {"cpu": 0.02, "gpu": 0.002}
"""Allowed in addition: the step of a tiny module is mostly Python, and CPUs are shared with other programs."""

Line = tuple[str, bool | None, str]
"""What is checked, whether it passes (``None``: it cannot be checked here), and the figures."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One part of the check, and the world of ranks that runs it."""

    name: str = ""
    folder: str
    """Folder for results and checkpoints, which all ranks can see."""
    accelerator: str
    devices: int
    """Ranks on each host."""
    num_nodes: int = 1
    one_gpu: bool = False
    """Whether there is a single GPU. Two ranks share it, except where times are measured."""
    precision: str
    settings: Mapping[str, Any]
    """Keyword arguments of ``ZeroStrategy`` except the stage."""
    own: bool = False
    """Whether ``module.pt`` in the folder holds the user's module and data."""

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes

    @property
    def shares_gpu(self) -> bool:
        return self.one_gpu and self.devices > 1

    def part(self, name: str) -> Job:
        """Returns a copy of this job for one part of the check."""
        devices = 2 if self.one_gpu and name != "fast" else self.devices
        return replace(self, name=name, devices=devices)

    def path(self, name: str) -> str:
        return str(Path(self.folder, name))

    @property
    def lines(self) -> list[str]:
        """What each line of the report is about."""
        precisions = [f" {each}" for each in dict.fromkeys((FP32, self.precision))] if self.name == "same" else [""]
        return [f"zero{stage}{precision}" for precision in precisions for stage in STAGES]

    def strategy(self, stage: int) -> Any:
        """Returns a new strategy. Stage 0 is DDP."""
        shared: dict[str, Any] = {}
        if self.shares_gpu:
            shared["parallel_devices"] = [torch.device("cuda", 0)] * self.devices
            shared["process_group_backend"] = "cpu:gloo,cuda:gloo"
        if not stage:
            return LaunchedDDP(find_unused_parameters=self.own, **shared)
        # The example's blocks are small on CPUs, but each must be a unit
        units = {} if self.own else {"min_unit_numel": 1}
        settings: dict[str, Any] = {"timeout_seconds": TIMEOUT_SECONDS, **units, **self.settings}
        return ZeroStrategy(stage, **settings, **shared)  # type: ignore[arg-type]

    def trainer(
        self, stage: int, callback: Any, precision: str, num_batches: int = MICRO_BATCHES, **options: Any
    ) -> Trainer:
        return Trainer(
            strategy=self.strategy(stage),
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

    def module_and_data(self, large: bool = False, num_batches: int = MICRO_BATCHES) -> tuple[Any, dict[str, Any]]:
        """Returns a module with the same weights in each call, and its data as arguments of ``Trainer.fit``."""
        seed_everything(7, verbose=False)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        if self.own:
            module, data = torch.load(self.path("module.pt"), map_location="cpu", weights_only=False)
            key = "datamodule" if isinstance(data, LightningDataModule) else "train_dataloaders"
            return module, {key: data}
        shape = (LARGE_ON_GPU if self.accelerator == "gpu" else LARGE) if large else SMALL
        return shape.module(), {"train_dataloaders": shape.batches(num_batches * self.world_size)}


# -- the example -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Size of the example, and of a micro-batch."""

    num_layers: int
    width: int
    vocab_size: int
    batch_size: int
    length: int

    def module(self) -> Example:
        return Example(self.vocab_size, self.length, self.num_layers, 4, self.width)

    def batches(self, count: int) -> DataLoader[Tensor]:
        """Returns ``count`` micro-batches for all ranks together, each (batch_size, length + 1)."""
        random = torch.Generator().manual_seed(1)
        ids = torch.randint(self.vocab_size, (count * self.batch_size, self.length + 1), generator=random)
        return DataLoader(ids, batch_size=self.batch_size)  # type: ignore[arg-type]


SMALL = Shape(num_layers=2, width=64, vocab_size=128, batch_size=2, length=16)
LARGE = Shape(num_layers=4, width=128, vocab_size=1024, batch_size=4, length=64)
LARGE_ON_GPU = Shape(num_layers=8, width=1024, vocab_size=8192, batch_size=8, length=512)


class Example(GPT):
    """The recipe's GPT, with a step that the raw loop can repeat."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # (B, T + 1)
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# The engine treats callbacks of this package like Lightning's. User hooks would change what it keeps gathered.


class Watch(Callback):
    """Records losses and times of a fit. Saves a checkpoint to ``middle`` after half of the batches."""

    def __init__(self, middle: str | None = None) -> None:
        self.middle = middle
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self.first_batch = 0
        self._since = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.losses:
            self.first_batch = batch_idx
        # Dropout must not depend on earlier random numbers, which a resumed run does not draw
        torch.manual_seed(1000 * trainer.global_rank + batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().float())
        half = int(trainer.num_training_batches) // (2 * ACCUMULATE) * ACCUMULATE
        if self.middle and batch_idx + 1 == half:
            trainer.save_checkpoint(self.middle)
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self._since = now


def of_every_rank(value: Any) -> list[Any]:
    """Returns each rank's ``value`` (collective)."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- same ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A training, as one rank has seen it."""

    first_batch: int
    losses: list[float]
    initial: dict[str, Tensor]
    weights: dict[str, Tensor]
    """Before and after it, on rank 0."""


def same(job: Job) -> Iterator[Line]:
    """Trains under DDP and at each stage, in each precision."""
    for precision in dict.fromkeys((FP32, job.precision)):
        tolerances = FULL_TOLERANCES if precision in (FP32, "64-true") else LOW_TOLERANCES
        expected, middle = _train(job, 0, precision), job.path("middle.ckpt")
        for stage in STAGES:
            try:
                runs = _train(job, stage, precision, saves=middle), _train(job, stage, precision, resumes=middle)
            except Exception as error:
                yield f"zero{stage} {precision}", False, f"{type(error).__name__}: {error}"
                return  # after an error no other fit begins
            found = [_compared(run, expected, tolerances) for run in runs]
            texts = "; resumed: ".join(text for _, text in found)
            bounds = "(<= {:g}, {:g})".format(*tolerances)
            yield f"zero{stage} {precision}", all(passes for passes, _ in found), f"{texts} {bounds}"


def _train(job: Job, stage: int, precision: str, saves: str | None = None, resumes: str | None = None) -> Run:
    module, data = job.module_and_data()
    watch = Watch(saves)
    automatic: dict[str, Any] = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP}
    trainer = job.trainer(stage, watch, precision, **(automatic if module.automatic_optimization else {}))
    initial = _weights(trainer, module.state_dict())
    trainer.fit(module, **data, ckpt_path=resumes, weights_only=False)
    weights = _weights(trainer, trainer.strategy.lightning_module_state_dict())
    return Run(watch.first_batch, [float(loss) for loss in watch.losses], initial, weights)


def _weights(trainer: Trainer, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a copy of ``state`` in host memory on rank 0, and nothing on the other ranks: one copy per host fits."""
    if not trainer.is_global_zero:
        return {}
    return {name: t.to("cpu", copy=True) for name, t in state.items() if t.is_floating_point()}


def _compared(run: Run, expected: Run, tolerances: tuple[float, float]) -> tuple[bool, str]:
    """Returns whether all ranks' losses and weights agree with DDP's, and the figures (collective)."""
    off, batch = difference(run.losses, expected.losses[run.first_batch :], tolerances[0])
    off, batch, rank = max((*each, rank) for rank, each in enumerate(of_every_rank((off, run.first_batch + batch))))
    moved = max(of_every_rank(distance(run.weights, expected.weights, expected.initial)))
    where = f" (rank {rank}, from batch {batch} on)" if off > tolerances[0] else ""
    return off <= tolerances[0] and moved <= tolerances[1], f"losses off by {off:.1e}{where}, weights by {moved:.1e}"


def difference(losses: list[float], expected: list[float], most: float) -> tuple[float, int]:
    """Returns the largest relative difference, and the index of the first one above ``most``."""
    if len(losses) != len(expected):
        return math.inf, min(len(losses), len(expected))
    off = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, expected, strict=True)]
    off = [each if math.isfinite(each) else math.inf for each in off]
    return max(off, default=0.0), next((i for i, each in enumerate(off) if each > most), 0)


def distance(weights: dict[str, Tensor], expected: dict[str, Tensor], initial: dict[str, Tensor]) -> float:
    """Returns the norm of the difference over the norm of ``expected - initial``."""
    if weights.keys() != expected.keys():
        return math.inf
    off = sum(float((weights[name].double() - t.double()).square().sum()) for name, t in expected.items())
    way = sum(float((t.double() - initial[name].double()).square().sum()) for name, t in expected.items())
    return math.sqrt(off / way) if way and math.isfinite(off) else math.inf if off else 0.0


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
        module, data = job.module_and_data(large=on_gpu)
        trainer = job.trainer(stage, monitor, job.precision)
        trainer.fit(module, **data)
        planned, notes = monitor.planned(trainer), monitor.plan.notes if monitor.plan else ()
        if notes or not planned:
            yield f"zero{stage}", None, "; ".join(notes) or "there is no plan"
        else:
            yield f"zero{stage}", *_with_plan([_figures(row) for row in monitor.rows], _figures(planned), left)


def _figures(row: Mapping[str, float]) -> dict[str, float]:
    """Returns bytes by kind, the traffic as one sum. A plan for CPUs has no peak: resident memory includes the
    interpreter and libraries."""
    found = {kind: row[f"{kind} bytes"] for kind in ("parameters", "gradients", "optimizer")}
    found["sent per step"] = sum(value for key, value in row.items() if key.startswith("sent per step"))
    return found | ({"peak": row["memory peak bytes"]} if "memory peak bytes" in row else {})


def _with_plan(ranks: Sequence[Mapping[str, float]], planned: Mapping[str, float], left: int) -> tuple[bool, str]:
    texts, passes = [], True
    for kind, tolerance in TOLERANCES.items():
        if kind not in planned:
            texts.append("peak: not counted by the CPU's allocator")
            continue
        is_peak = kind == "peak"
        measured = max(each[kind] for each in ranks) - (left if is_peak else 0)
        off = abs(measured - planned[kind])
        is_near = off <= tolerance * planned[kind] + (PEAK_SLACK_BYTES if is_peak else 1024)
        passes = passes and is_near
        wrong = "" if is_near else f", not within {tolerance:.0%}"
        texts.append(f"{kind} {measured / MIB:.2f} MiB (plan {planned[kind] / MIB:.2f}{wrong})")
    return passes, ", ".join(texts)


# -- fast ------------------------------------------------------------------------------------------------------------


def fast(job: Job) -> Iterator[Line]:
    """Lets all contenders train a few steps alternately in several rounds, so that a slow minute affects them all."""
    precision = job.precision if job.accelerator == "gpu" or job.own else FP32  # CPUs emulate low precision
    stages = {"ddp": 0} | ({} if job.own else {"fully_shard": None}) | {f"zero{stage}": stage for stage in STAGES}
    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, stage in stages.items():
            watch = Watch()
            _few_steps(job, stage, precision, watch)
            seconds.setdefault(name, []).append(statistics.median(watch.seconds[WARMUP_STEPS:] or watch.seconds))
    exposed: dict[str, float | None] = {}
    for stage in (0, *STAGES) if job.accelerator == "gpu" and job.world_size > 1 else ():
        kernels = Kernels()
        _few_steps(job, stage, precision, kernels)
        exposed[f"zero{stage}" if stage else "ddp"] = exposed_share(kernels.found)
    for name in job.lines:
        yield name, *judge_times(job, name, seconds, exposed, precision)


def judge_times(
    job: Job, name: str, seconds: Mapping[str, list[float]], exposed: Mapping[str, float | None], precision: str
) -> tuple[bool, str]:
    """Compares the step times of one stage with those of the references in the same rounds."""
    text, passes = f"{1e3 * statistics.median(seconds[name]):.1f} ms a step in {precision}", True
    for other, bound in BOUNDS.items():
        if other in seconds:
            rounds = list(zip(seconds[name], seconds[other], strict=True))
            ratio = statistics.median(mine / its for mine, its in rounds)
            late = statistics.median(mine - bound * its for mine, its in rounds)
            passes = passes and late <= SLACK_SECONDS[job.accelerator]
            text += f", {ratio:.2f} x {other} (<= {bound:g})"
    share, of_ddp = exposed.get(name), exposed.get("ddp")
    if share is not None and of_ddp is not None:
        text += f", {share:.0%} of it only communication (ddp {of_ddp:.0%})"
    return passes, text


def _few_steps(job: Job, stage: int | None, precision: str, callback: Any) -> None:
    """Trains for a few steps; ``None`` is raw ``fully_shard``."""
    steps = WARMUP_STEPS + TIMED_STEPS
    module, data = job.module_and_data(large=True, num_batches=steps)
    if stage is None:
        _raw_loop(job, module, data["train_dataloaders"], precision, callback)
    else:
        job.trainer(stage, callback, precision, steps).fit(module, **data)


class Kernels(Callback):
    """Records the name, start and end of each kernel of this rank's device after the first steps."""

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


def exposed_share(kernels: Sequence[tuple[str, float, float]]) -> float | None:
    """Returns the share of time in which only NCCL's kernels run, waiting for other ranks included; ``None`` if nothing
    was recorded. A kernel is a name, a start and an end."""
    changes = [(at, "nccl" in name, step) for name, start, end in kernels for at, step in ((start, 1), (end, -1))]
    if not changes:
        return None
    changes.sort()
    running = {True: 0, False: 0}  # whether a kernel communicates -> number of those that run
    before, alone = changes[0][0], 0.0
    for at, communicates, step in changes:
        if running[True] and not running[False]:
            alone += at - before
        running[communicates] += step
        before = at
    return alone / (changes[-1][0] - changes[0][0])


def _raw_loop(job: Job, module: LightningModule, loader: Any, precision: str, watch: Watch) -> None:
    """Trains with ``fully_shard`` as in its tutorial: applied to each block, then to the root."""
    kind = "cuda" if job.accelerator == "gpu" else "cpu"
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    low = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False) if low else MixedPrecisionPolicy()
    mesh = init_device_mesh(kind, (job.world_size,))
    module.to(device)
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    rank, since = dist.get_rank(), time.perf_counter()
    for batch in list(loader)[rank :: job.world_size]:
        with torch.autocast(kind, low, enabled=low is not None):
            ids = batch.to(device)
            logits = module(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "cuda":
            torch.cuda.synchronize()
        watch.seconds.append(time.perf_counter() - since)
        since = time.perf_counter()


# -- safe ------------------------------------------------------------------------------------------------------------


class Raise(Callback):
    """Raises on the last rank in the middle of a step, while the other ranks enter the step's collectives."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if trainer.global_step == RAISES_AT_STEP and trainer.global_rank == self.job.world_size - 1:
            Path(self.job.path("raised")).write_text(str(time.time()), encoding="utf-8")
            raise RuntimeError(ON_PURPOSE)


def safe(job: Job) -> Iterator[Line]:
    """Raises on one rank, so no line comes from here: the process that has started the ranks sees how they end."""
    module, data = job.module_and_data()
    job.trainer(3, Raise(job), FP32).fit(module, **data)
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


def command(job: Job) -> list[str]:
    """Returns the command that starts ``job`` on this host."""
    return [sys.executable, "-m", "lightning_zero.app.check_ranks", json.dumps(asdict(job))]


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if job.shares_gpu:
        stage_through_host()
    for line in PARTS[job.name](job):
        if not dist.is_initialized() or dist.get_rank() == 0:
            with open(job.path(f"{job.name}.jsonl"), "a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    from lightning_zero.app import check_ranks  # the engine takes callbacks in __main__ for a user's

    check_ranks.main()
