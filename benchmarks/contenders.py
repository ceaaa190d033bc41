"""The contenders whose training steps :mod:`benchmarks.bench` times.

Each contender is a function that trains the same model on the same data from the same seed, and calls
``job.tick(loss)`` after every optimizer step. It imports only what it needs, so that memory and start-up time are its
own.

    python benchmarks/contenders.py '{"contender": "zero3", "shape": "gpt", "ranks": 2}'     # one run, as JSON
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARMUP_STEPS = 2


@dataclass
class Job:
    """A contender's task and its measurements."""

    contender: str
    shape: str = "gpt"
    ranks: int = 2
    accumulate: int = 1
    steps: int = 6
    """Counted steps, after :data:`WARMUP_STEPS`."""
    turn_steps: int = 0
    """After the warm-up and after so many steps each the job stops itself, all its processes, until it is continued.
    Rank 0 leaves the pause out of its step; the others' clocks go on."""
    begun: float = field(default_factory=time.time)
    rank: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        self.ticks = 0
        self.seconds: list[float] = []
        self.losses: list[Any] = []
        self.updates: list[float] = []
        # What a job without a model, such as one that measures a copy's bandwidth, says too
        self.imported = 0

    @property
    def clip(self) -> float | None:
        return SHAPES[self.shape].clip

    @property
    def device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def model(self) -> Any:
        import torch

        self.imported = _resident_bytes("VmRSS") if self.device == "cpu" else 0
        torch.manual_seed(0)
        return make_model(SHAPES[self.shape]).to(self.device)

    def optimizer(self, parameters: Any) -> Any:
        import torch

        return torch.optim.AdamW(parameters, lr=1e-3)

    def batches(self) -> Any:
        """One micro-batch after the other, (batch_size, length + 1) token ids, others on every rank."""
        import torch

        shape = SHAPES[self.shape]
        random = torch.Generator().manual_seed(1000 + self.rank)
        for _ in range((self.steps + WARMUP_STEPS) * self.accumulate):
            ids = torch.randint(shape.vocab_size, (shape.batch_size, shape.length + 1), generator=random)
            yield ids.to(self.device)

    @contextlib.contextmanager
    def update(self) -> Any:
        """Context that times clipping and the optimizer's step, for contenders whose loop we write."""
        begun = self._now()
        yield
        self.updates.append(self._now() - begun)

    def _now(self) -> float:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def tick(self, loss: Any) -> None:
        """One optimizer step is done; ``loss`` is its last micro-batch's, unscaled."""
        now = self._now()
        self.losses.append(loss.detach())
        self.ticks += 1
        counted = self.ticks - WARMUP_STEPS
        if self.ticks == 1:
            self.start_up = time.time() - self.begun
        if counted == 0:
            self.wire = -_wire_bytes()
            self.cpu = -time.process_time()
            self.peak_before = _peak_bytes(self.device)
            _reset_peak(self.device)
        elif counted > 0:
            self.seconds.append(now - self.step_begun)
        if counted == self.steps:
            self.wire += _wire_bytes()
            self.cpu += time.process_time()
            self.peak = _peak_bytes(self.device)
        elif self.turn_steps and counted >= 0 and counted % self.turn_steps == 0 and self.rank == 0:
            os.killpg(0, signal.SIGSTOP)
        self.step_begun = self._now()

    def result(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "update_seconds": self.updates[WARMUP_STEPS:],
            "losses": [float(loss) for loss in self.losses],
            "cpu_seconds_per_step": self.cpu / self.steps,
            "peak_bytes": self.peak,
            # being built and sharded, and at the end made whole, too
            "life_peak_bytes": max(self.peak_before, _peak_bytes(self.device)),
            "imported_bytes": self.imported,
            "wire_bytes_per_step": self.wire / self.steps / self.ranks,
            "start_up_seconds": self.start_up,
        }


# -- models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A GPT's size, and what it is trained on."""

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int
    batch_size: int
    length: int
    clip: float | None = None


SHAPES = {
    "gpt": Shape(num_layers=8, width=512, num_heads=8, vocab_size=1024, batch_size=2, length=96),  # 26 M parameters
    "many": Shape(num_layers=200, width=64, num_heads=2, vocab_size=512, batch_size=1, length=16, clip=1.0),
    "embedding": Shape(num_layers=2, width=256, num_heads=4, vocab_size=64_000, batch_size=1, length=16),
    "tiny": Shape(num_layers=1, width=8, num_heads=1, vocab_size=16, batch_size=1, length=4),
}


def make_model(shape: Shape) -> Any:
    """A decoder-only transformer whose call gives the loss of (batch_size, length + 1) token ids."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        """The main job's, written again: its own module imports Lightning, which bare contenders must not pay for."""

        def __init__(self) -> None:
            super().__init__()
            width = shape.width
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: Any) -> Any:  # (B, T, C) -> (B, T, C)
            batch, length, width = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, shape.num_heads, width // shape.num_heads)
            y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(shape.vocab_size, shape.width)
            self.positions = nn.Embedding(shape.length, shape.width)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.num_layers))
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02)

        def forward(self, ids: Any) -> Any:
            inputs, targets = ids[:, :-1], ids[:, 1:]
            x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    return Model()


# -- bare loops ----------------------------------------------------------------------------------------------------


def _train(job: Job, model: Any, optimizer: Any, before: Callable[[bool], Any] | None = None) -> None:
    """A bare training loop; ``before(is_last)`` returns a context for each micro-batch."""
    import torch

    batches = job.batches()
    for _ in range(job.steps + WARMUP_STEPS):
        for i in range(job.accumulate):
            with before(i == job.accumulate - 1) if before else contextlib.nullcontext():
                loss = model(next(batches))
                (loss / job.accumulate).backward()
        with job.update():
            if job.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
        optimizer.zero_grad()
        job.tick(loss)


def _join(job: Job) -> None:
    import torch
    import torch.distributed as dist

    if job.device == "cuda":
        torch.cuda.set_device(job.rank)
    # Offloaded gradients are clipped over gloo.
    dist.init_process_group("cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo")


def floor(job: Job) -> None:
    model = job.model()
    _train(job, model, job.optimizer(model.parameters()))


def _compile_blocks(model: Any) -> None:
    """Compiles each block in place before sharding, as torchtitan does."""
    for block in model.blocks:
        block.compile()


def ddp(job: Job, compiled: bool = False) -> None:
    from torch.nn.parallel import DistributedDataParallel

    _join(job)
    model = job.model()
    if compiled:
        _compile_blocks(model)
    model = DistributedDataParallel(model)
    optimizer = job.optimizer(model.parameters())
    _train(job, model, optimizer, lambda is_last: contextlib.nullcontext() if is_last else model.no_sync())


def _shard(model: Any, reshard_after_forward: bool | None, **settings: Any) -> None:
    """``fully_shard`` as its tutorial has it: each block, then the rest."""
    from torch.distributed.fsdp import fully_shard

    settings |= {} if reshard_after_forward is None else {"reshard_after_forward": reshard_after_forward}
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)


def _fully_shard(job: Job, reshard_after_forward: bool | None, compiled: bool = False) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    _join(job)
    model = job.model()
    if compiled:
        _compile_blocks(model)
    _shard(model, reshard_after_forward, mesh=init_device_mesh(job.device, (job.ranks,)))
    _train(job, model, job.optimizer(model.parameters()))


def _deepspeed(job: Job, stage: int) -> None:
    _deepspeed_loop(job, job.optimizer, {"zero_optimization": {"stage": stage}})


def _deepspeed_loop(job: Job, make_optimizer: Callable[[Any], Any], config: dict[str, Any]) -> None:
    """DeepSpeed's own loop; ``config`` extends the job's settings."""
    _join(job)
    os.environ.setdefault("LOCAL_SIZE", str(job.ranks))
    if job.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    model = job.model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": SHAPES[job.shape].batch_size,
            "gradient_accumulation_steps": job.accumulate,
            "gradient_clipping": job.clip or 0.0,
            **config,
        },
    )
    batches = job.batches()
    for _ in range(job.steps + WARMUP_STEPS):
        for _ in range(job.accumulate):
            loss = engine(next(batches))
            engine.backward(loss)
            engine.step()
        job.tick(loss)


def _engine(job: Job, stage: int) -> None:
    """The strategy's own engine in a bare loop: what the Trainer and the strategy add is the difference."""
    import torch

    from lightning_zero.config import ZeroConfig
    from lightning_zero.engines.fsdp2.engine import Fsdp2Engine
    from lightning_zero.engines.precision import DtypePolicy

    _join(job)
    engine = Fsdp2Engine(ZeroConfig(stage=stage, units=["blocks.*"]), torch.device(job.device), DtypePolicy())
    model = job.model()
    engine.shard(model)
    engine.keep_gathered = True
    optimizer, batches = job.optimizer(model.parameters()), job.batches()
    for _ in range(job.steps + WARMUP_STEPS):
        for i in range(job.accumulate):
            with contextlib.nullcontext() if i == job.accumulate - 1 else engine.no_sync():
                loss = engine.run("forward", next(batches))
                engine.backward((loss / job.accumulate).backward)
        with job.update():
            if job.clip:
                engine.clip_grad_norm(optimizer, job.clip)
            engine.step(optimizer)
        with engine.view():  # gradients lie on shards, which only the view clears
            optimizer.zero_grad()
        job.tick(loss)


# -- Lightning and Accelerate --------------------------------------------------------------------------------------


def _lightning(job: Job, strategy: Any, **options: Any) -> None:
    """``strategy`` is a name, a strategy, or a function that makes one; ``options`` are the Trainer's."""
    import warnings

    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    warnings.simplefilter("ignore")

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()

        def configure_model(self) -> None:
            if self.device_mesh is not None and not self.sharded:  # ModelParallelStrategy: sharded by hand
                self.sharded = True
                _shard(self.model, job.contender != "lightning-2", mesh=self.device_mesh["data_parallel"])

        sharded = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.loss = self.model(batch)
            return self.loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            job.tick(self.loss)  # a hook between micro-batches would see parameters, which are sharded for it

        def configure_optimizers(self) -> Any:
            return job.optimizer(self.parameters())

    strategy = strategy() if callable(strategy) else strategy
    trainer = Trainer(
        accelerator=job.device.replace("cuda", "gpu"),
        devices=job.ranks,
        strategy=strategy,
        max_steps=job.steps + WARMUP_STEPS,
        accumulate_grad_batches=job.accumulate,
        gradient_clip_val=job.clip,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Module(), train_dataloaders=DataLoader(list(job.batches()), batch_size=None))  # type: ignore[arg-type]


def _model_parallel(job: Job) -> None:
    def make() -> Any:
        from lightning.pytorch.strategies import ModelParallelStrategy

        return ModelParallelStrategy(data_parallel_size=job.ranks, tensor_parallel_size=1)

    _lightning(job, make)


def _zero(job: Job, **settings: Any) -> None:
    between_hosts = settings.pop("between_hosts", False)

    def make() -> Any:
        from lightning_zero.comm import peer_memory
        from lightning_zero.strategy import ZeroStrategy

        if between_hosts:  # as each rank sees it: nobody's memory can be read
            peer_memory._connect = lambda *unused: False
        # The units that the others are given by hand, but where a row is about other ones.
        by_hand = {"units": ["model.blocks.*"]} if "engine" not in settings else {}
        return ZeroStrategy(**{**by_hand, **settings})

    _lightning(job, make)


def _accelerate(job: Job, plugin: str) -> None:
    # Its DeepSpeed wants transformers, which Lightning would import if it were installed for all
    sys.path.append(str(Path(sys.prefix, "accelerate")))
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    os.environ["DS_ACCELERATOR"] = "cpu" if job.device == "cpu" else "cuda"
    model = job.model()
    model._no_split_modules = ["Block"]
    settings: dict[str, Any]
    if plugin == "fsdp2":
        settings = {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
            )
        }
    else:
        settings = {
            "deepspeed_plugin": DeepSpeedPlugin(
                hf_ds_config={
                    "train_micro_batch_size_per_gpu": SHAPES[job.shape].batch_size,
                    "gradient_accumulation_steps": job.accumulate,
                    "gradient_clipping": job.clip or 0.0,
                    "zero_optimization": {"stage": 3},
                    "zero_force_ds_cpu_optimizer": False,
                    "zero_allow_untested_optimizer": True,
                }
            )
        }
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ.setdefault("LOCAL_SIZE", str(job.ranks))
    on_cpu = job.device == "cpu" and plugin == "fsdp2"  # its DeepSpeed knows the device from DeepSpeed itself
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=job.accumulate, **settings)
    if accelerator.distributed_type.value.lower() not in ("fsdp", "deepspeed"):
        raise RuntimeError(f"Accelerate runs {accelerator.distributed_type.value} here, whatever the plugin")
    model, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))
    batches = job.batches()
    for _ in range(job.steps + WARMUP_STEPS):
        for _ in range(job.accumulate):
            with accelerator.accumulate(model):
                loss = model(next(batches))
                accelerator.backward(loss)
                if job.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), job.clip)
                optimizer.step()
                optimizer.zero_grad()
        job.tick(loss)


CONTENDERS: dict[str, tuple[str, Callable[[Job], None]]] = {
    # name -> what it is, how it runs
    "floor": ("no communication", floor),
    "ddp": ("DistributedDataParallel", ddp),
    "fully_shard": ("fully_shard, no argument", lambda job: _fully_shard(job, None)),
    "engine-1": ("our engine in a bare loop, stage 1", lambda job: _engine(job, 1)),
    "zero1": ("**lightning_zero, stage 1**", lambda job: _zero(job, stage=1)),
    "engine-2": ("our engine in a bare loop, stage 2", lambda job: _engine(job, 2)),
    "zero2": ("**lightning_zero, stage 2**", lambda job: _zero(job, stage=2)),
    "engine-3": ("our engine in a bare loop, stage 3", lambda job: _engine(job, 3)),
    "zero3": ("**lightning_zero, stage 3**", lambda job: _zero(job, stage=3)),
    "lightning-ddp": ("Lightning, DDP", lambda job: _lightning(job, "ddp")),
    "zero1-sockets": (
        "**lightning_zero, stage 1**, as between hosts",
        lambda job: _zero(job, stage=1, between_hosts=True),
    ),
    "zero2-sockets": (
        "**lightning_zero, stage 2**, as between hosts",
        lambda job: _zero(job, stage=2, between_hosts=True),
    ),
    "zero3-sockets": (
        "**lightning_zero, stage 3**, as between hosts",
        lambda job: _zero(job, stage=3, between_hosts=True),
    ),
    **{
        f"zero{stage}-units": (
            f"**lightning_zero, stage {stage}**, automatic units",
            partial(_zero, stage=stage, units=None),
        )
        for stage in (1, 2, 3)
    },
    "ddp-compiled": ("DistributedDataParallel, compiled", partial(ddp, compiled=True)),
    "fully_shard-compiled": (
        "fully_shard, no argument, compiled",
        partial(_fully_shard, reshard_after_forward=None, compiled=True),
    ),
    **{
        f"zero{stage}-compiled": (
            f"**lightning_zero, stage {stage}**, compiled",
            partial(_zero, stage=stage, compile="units"),
        )
        for stage in (1, 2, 3)
    },
    "fully_shard-2": ("fully_shard(reshard_after_forward=False)", lambda job: _fully_shard(job, False)),
    "deepspeed-1": ("DeepSpeed, stage 1", lambda job: _deepspeed(job, 1)),
    "deepspeed-2": ("DeepSpeed, stage 2", lambda job: _deepspeed(job, 2)),
    "deepspeed-3": ("DeepSpeed, stage 3", lambda job: _deepspeed(job, 3)),
    "lightning-2": ("Lightning, ModelParallelStrategy, reshard_after_forward=False", _model_parallel),
    "lightning-3": ("Lightning, ModelParallelStrategy", _model_parallel),
    "accelerate-fsdp2": ("Accelerate, FSDP2", lambda job: _accelerate(job, "fsdp2")),
    "accelerate-deepspeed": ("Accelerate, DeepSpeed stage 3", lambda job: _accelerate(job, "deepspeed")),
    "zero1_deepspeed": ("**lightning_zero, DeepSpeed, stage 1**", lambda job: _zero(job, stage=1, engine="deepspeed")),
    "zero2_deepspeed": ("**lightning_zero, DeepSpeed, stage 2**", lambda job: _zero(job, stage=2, engine="deepspeed")),
    "zero3_deepspeed": ("**lightning_zero, DeepSpeed, stage 3**", lambda job: _zero(job, stage=3, engine="deepspeed")),
}


# -- processes -----------------------------------------------------------------------------------------------------


def launch(job: Job, timeout_seconds: float = 300.0, script: str = __file__) -> list[dict[str, Any]]:
    """Runs ``job`` on its ranks, each a process of ``script``, which knows the contender; their results by rank.

    Raises:
        RuntimeError: When a rank fails or takes too long, with the end of its output.
    """
    _own_network()
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [_start(job, rank, port, folder, script) for rank in range(job.ranks)]
        try:
            deadline = time.monotonic() + timeout_seconds
            codes = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in ranks]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):  # 69 MB each, by DeepSpeed
                left.unlink()
        if any(codes):
            logs = [Path(folder, f"{rank}.log").read_text()[-3000:] for rank in range(job.ranks)]
            raise RuntimeError(f"{job.contender} failed:\n" + "\n".join(logs))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(job.ranks)]


def _start(job: Job, rank: int, port: int, folder: str, script: str) -> Any:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "bench",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    settings = json.dumps(asdict(job) | {"rank": rank, "folder": folder})
    with open(Path(folder, f"{rank}.log"), "w") as log:
        return subprocess.Popen(
            [sys.executable, script, "--rank", settings], env=environment, stdout=log, stderr=log, cwd=folder
        )


def _run_rank(settings: str) -> None:
    job = Job(**json.loads(settings))
    import torch

    torch.set_num_threads(1)
    CONTENDERS[job.contender][1](job)
    Path(job.folder, f"{job.rank}.json").write_text(json.dumps(job.result()))
    sys.stdout.flush()
    os._exit(0)  # what libraries do at their exit is not looked at


def _own_network() -> None:
    """A network namespace of this run's own, where the kernel lets us, so that bytes on the loopback are its own."""
    flags = 0x10000000 | 0x40000000  # CLONE_NEWUSER | CLONE_NEWNET, <sched.h>
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        print("no network namespace: bytes on the wire are the whole machine's", file=sys.stderr)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        up = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(control, 0x8914, up)  # SIOCSIFFLAGS


def _wire_bytes() -> int:
    """Bytes sent over the loopback so far, by all processes of the namespace."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def _reset_peak(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return _resident_bytes("VmHWM")


def _resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        _run_rank(sys.argv[2])
    else:
        wanted = Job(**json.loads(sys.argv[1]))
        print(json.dumps(launch(wanted, 3600.0 if wanted.turn_steps else 300.0)))  # the others' turns count as well
